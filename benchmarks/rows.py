"""The benchmark of the start of `jobs.generate` with many rows: time and memory until the first pass (forward)."""

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs.config.settings import GenerateConfig, run_directory
from jobs.datasets.config import DatasetConfig, DatasetKind
from runtime.config.settings import OffloadConfig, PolicyConfig, PolicyKind, SamplingConfig
from runtime.errors import Interrupted
from runtime.stream.host_memory import disk_read_bytes, peak_resident_bytes

from .runner import ask_worker
from .task import Result

NUMBERS_OF_ROWS = (10, 1_000, 10_000, 100_000)


@dataclass(frozen=True, kw_only=True)
class StartCase:
    """A number of input rows, and the kind of policy (`policy=`)."""

    num_rows: int
    policy: str

    def __str__(self) -> str:
        return f"{self.num_rows} rows, policy={self.policy}"


def measure_start(case: StartCase) -> Result:
    """Measures in a separate process, from before its start."""
    return Result(**ask_worker(__name__, {"begun": time.monotonic(), "rows": asdict(case)}))


def measure(case: StartCase, start_time: float) -> Result:
    """Seconds from `start_time` (time.monotonic) to the first pass of the tiny model. Peak memory includes
    libraries."""
    from jobs.run.tasks.generate import generate  # imports torch, which is part of the start

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        _write_rows(path, case.num_rows)
        config = GenerateConfig(
            output_root=folder,
            run="rows",
            dataset=DatasetConfig(kind=DatasetKind["jsonl"], path=str(path)),
            policy=PolicyConfig(kind=PolicyKind(case.policy)),
            sampling=SamplingConfig(max_new_tokens=1),
            offload=OffloadConfig(cache_dir=str(Path(folder) / "cache")),  # empty: the policy is searched
        )
        run = run_directory(config)
        seconds = peak = 0.0

        def is_planned() -> bool:
            """The stop check that `generate` calls before every stage. Stops the run when the schedule is written."""
            nonlocal seconds, peak
            if not (run / "schedule.txt").exists():
                return False
            seconds, peak = time.monotonic() - start_time, peak_resident_bytes()
            return True

        try:
            generate(config, is_planned)
        except Interrupted:
            assert (run / "plan.parquet").exists(), "a plan is written before a schedule"
    return Result(
        seconds=seconds,
        prefill_seconds=0.0,
        rate=case.num_rows / seconds,
        peak_bytes=int(peak),
        baseline_bytes=0,
        bytes_read=disk_read_bytes(),
        tokens=[],
    )


def _write_rows(path: Path, count: int) -> None:
    """Writes prompts of 12 to 80 bytes."""
    with path.open("w", encoding="utf-8") as file:
        for index in range(count):
            file.write(json.dumps({"prompt": f"Question {index}: {'what comes next? ' * (index % 5)}"}) + "\n")


def answers(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's entry point (`benchmarks.worker`)."""
    yield asdict(measure(StartCase(**question["rows"]), question["begun"]))
