"""A run of long answers that is ended again and again: its model, its prompts, and what it came to."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig
from jobs.datasets.config import DatasetKind
from jobs.run.run_dir import RunDirectory
from runtime.config import (
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
from runtime.sampling_config import SamplingConfig
from runtime.synthesize.tokenizer import byte_level_tokenizer
from tests.generations import read_generations
from tests.support import synthesize


@dataclass(frozen=True, kw_only=True)
class Case:
    """One block of `num_rows` sequences, or where they come and go two of half as many. `checkpoint_seconds`: of each
    start."""

    home: Path
    family: str = "llama"
    kv: KVTier = KVTier.auto
    checkpoint_seconds: float = 0.3
    num_rows: int = 12
    num_new_tokens: int = 120
    begin_alike: bool = False
    admission: Admission = Admission.wave

    def config(self, name: str) -> GenerateConfig:
        return GenerateConfig(
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
                admission=self.admission,
            ),
            sampling=SamplingConfig(max_new_tokens=self.num_new_tokens, ignore_eos=True),
            checkpoint_seconds=self.checkpoint_seconds,
        )

    @property
    def num_blocks(self) -> int:
        return 1 if self.admission is Admission.wave else 2

    def dataset(self) -> DatasetConfig:
        if not self.begin_alike:
            return DatasetConfig(limit=self.num_rows)
        return DatasetConfig(kind=DatasetKind.jsonl, path=str(self.home / "alike.jsonl"))

    def make_inputs(self) -> None:
        """The model, and prompts of two tasks behind the same instructions, which are drawn."""
        directory = synthesize(self.family, self.home / self.family)
        byte_level_tokenizer(640).save_pretrained(directory)
        drawn = random.Random(1)
        stem, *tasks = ("".join(drawn.choices("abcdefgh ", k=50)) for _ in range(3))
        own = ("".join(drawn.choices("abcdefgh ", k=drawn.randint(1, 30))) for _ in range(self.num_rows))
        prompts = [stem + tasks[turn % 2] + text for turn, text in enumerate(own)]
        lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (self.home / "alike.jsonl").write_text("".join(lines))

    def directory(self, name: str) -> RunDirectory:
        return RunDirectory(path=self.home / "generate" / name)

    def tokens(self, name: str) -> Mapping[str, list[int]]:
        table = read_generations(self.directory(name))
        assert len(set(table["id"].to_pylist())) == table.num_rows == self.num_rows, "not each row once"
        return dict(zip(table["id"].to_pylist(), table["token_ids"].to_pylist(), strict=True))
