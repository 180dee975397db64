"""A run that is ended again and again: its model, its rows, and what it came to."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.config.settings import EncodeConfig, GenerateConfig, ScoreConfig, run_directory
from jobs.datasets import DatasetConfig
from jobs.datasets.config import DatasetKind
from jobs.record.run_dir import RunDirectory
from jobs.record.summary import Outcome
from jobs.run.tasks.encode import encode
from jobs.run.tasks.generate import generate
from jobs.run.tasks.score import score
from runtime.config.sampling import SamplingConfig
from runtime.config.settings import (
    Admission,
    DType,
    KVConfig,
    KVTier,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    Tier,
)
from runtime.synthesize.tokenizer import byte_level_tokenizer
from tests.generations import read_generations
from tests.support import synthesize

CONFIGS = {"generate": GenerateConfig, "score": ScoreConfig, "encode": EncodeConfig}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One block of `num_rows` sequences, or where they come and go two of half as many; of prompts that are only read
    (`score`, `encode`), and in windows of `window_rows`, blocks of three. `checkpoint_seconds`: of each start."""

    home: Path
    job: str = "generate"
    window_rows: int | None = None
    family: str = "llama"
    kv: KVTier = KVTier.auto
    checkpoint_seconds: float = 0.3
    num_rows: int = 12
    num_new_tokens: int = 120
    begin_alike: bool = False
    admission: Admission = Admission.wave
    draft_tokens: int | None = None  # of the runs that are ended; the whole run guesses none
    temperature: float = 0.0

    def run(self, name: str, should_stop: Callable[[], bool]) -> Outcome:
        """A start of the run up to its end."""
        config = self.config(name)
        if isinstance(config, ScoreConfig):
            return score(config, should_stop)
        return encode(config, should_stop) if isinstance(config, EncodeConfig) else generate(config, should_stop)

    def config(self, name: str) -> GenerateConfig:
        return CONFIGS[self.job](
            run=name,
            output_root=str(self.home),
            model=ModelConfig(name="test", path=str(self.home / self.family), dtype=DType.float32),
            offload=OffloadConfig(tier=Tier.nvme, resident_layers=0, read_chunk_mib=1),
            kv=KVConfig(tier=self.kv, device_fraction=None if self.kv is KVTier.auto else 0.0),
            dataset=self.dataset(),
            policy=PolicyConfig(
                kind=PolicyKind.fixed,
                micro_batch_size=-(-self.num_rows // (3 * self.num_blocks)),
                num_micro_batches=3,
                prefill_chunk_tokens=16 if self.reads else None,
                admission=self.admission,
                draft_tokens=self.draft_tokens,
            ),
            sampling=SamplingConfig(
                max_new_tokens=self.num_new_tokens, ignore_eos=True, temperature=self.temperature, seed=1
            ),
            checkpoint_seconds=self.checkpoint_seconds,
        )

    @property
    def reads(self) -> bool:
        """Whether prompts are read and no token is generated."""
        return self.job != "generate"

    @property
    def has_own_rows(self) -> bool:
        """Whether its rows are drawn ones, which begin alike, and not the bundled prompts."""
        return self.begin_alike or self.reads or self.window_rows is not None

    @property
    def num_blocks(self) -> int:
        if self.reads or self.window_rows is not None:
            return -(-self.num_rows // 3)
        return 1 if self.admission is Admission.wave else 2

    def dataset(self) -> DatasetConfig:
        if not self.has_own_rows:
            return DatasetConfig(limit=self.num_rows)
        return DatasetConfig(
            kind=DatasetKind["jsonl"], path=str(self.home / "rows.jsonl"), window_rows=self.window_rows, id_field="name"
        )

    def make_inputs(self) -> None:
        """The model, and drawn rows: prompts of two tasks behind the same instructions, 400 letters longer where they
        are only read, each with two targets."""
        directory = synthesize(self.family, self.home / self.family)
        byte_level_tokenizer(640).save_pretrained(directory)
        drawn = random.Random(1)
        stem, *tasks = ("".join(drawn.choices("abcdefgh ", k=50)) for _ in range(3))
        num_more = 400 if self.reads else 0
        own = ("".join(drawn.choices("abcdefgh ", k=num_more + drawn.randint(1, 30))) for _ in range(self.num_rows))
        rows = [
            {"name": f"row {turn}", "prompt": stem + tasks[turn % 2] + text, "target": [f"{turn} a", f"{turn} bc"]}
            for turn, text in enumerate(own)
        ]
        (self.home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def directory(self, name: str) -> RunDirectory:
        return RunDirectory(path=run_directory(self.config(name)))

    def rows(self, name: str) -> Mapping[tuple[str, int], dict[str, Any]]:
        """What the run has committed, by row and by target of a row, each once."""
        index = "target_index" if self.job == "score" else "sample_index"
        rows = read_generations(self.directory(name)).to_pylist()
        found = {(row["id"], row[index]): row for row in rows}
        num_each = 2 if self.job == "score" else 1
        assert len(found) == len(rows) == self.num_rows * num_each, "not each row once"
        return found
