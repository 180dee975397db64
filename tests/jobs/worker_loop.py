"""Workers of one run that are killed, stopped, paused and started again: python -m tests.jobs.worker_loop
[workers=6] [rows=96] [kills=30] [seed=0].

At the end each row is there once, and all rows are those of a run that one worker made alone.
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pyarrow.parquet as pq

from jobs.config.settings import GenerateConfig, Workers
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.run.generation import generate
from jobs.run.run_dir import RunDirectory
from runtime.config import PolicyConfig, PolicyKind, SamplingConfig
from tests.generations import read_generations
from tests.jobs.killing import start_job
from tests.processes import PROCESSES

KINDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
LEASE_SECONDS = 2.0
RESUMABLE = 75


@dataclass(frozen=True, kw_only=True)
class Case:
    """`num_rows` in blocks of two, for `num_workers` at a time, of whom `num_kills` are disturbed."""

    home: Path
    num_workers: int = 6
    num_rows: int = 96
    num_kills: int = 30
    num_new_tokens: int = 60
    seed: int = 0

    def config(self, run: str, workers: Workers) -> GenerateConfig:
        return GenerateConfig(
            run=run,
            output_root=str(self.home),
            dataset=DatasetConfig(kind=DatasetKind["sample"], limit=12, repeat=self.num_rows // 12),
            policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=1),
            sampling=SamplingConfig(max_new_tokens=self.num_new_tokens, ignore_eos=True),
            checkpoint_seconds=0.1,
            workers=workers,
            lease_seconds=LEASE_SECONDS,
        )

    def start(self) -> BaseProcess:
        """What the command of one more worker does."""
        return start_job(*self.words())

    def words(self) -> list[str]:
        """The settings of a worker's command."""
        dataset = ("dataset=sample", "dataset.limit=12", f"dataset.repeat={self.num_rows // 12}")
        policy = ("policy=fixed", "policy.micro_batch_size=2", "policy.num_micro_batches=1")
        sampling = (f"sampling.max_new_tokens={self.num_new_tokens}", "sampling.ignore_eos=true")
        workers = ("workers=elastic", f"lease_seconds={LEASE_SECONDS}", "checkpoint_seconds=0.1", "log_level=warning")
        return ["run=shared", f"output_root={self.home}", *dataset, *policy, *sampling, *workers]


def disturb(process: BaseProcess, kind: signal.Signals, pause: float) -> None:
    """Kills, stops, or pauses and wakes a worker."""
    assert process.pid is not None
    if not process.is_alive():
        return
    os.kill(process.pid, kind)
    if kind is signal.SIGSTOP:
        time.sleep(pause)
        os.kill(process.pid, signal.SIGCONT)


def drain(case: Case) -> list[int]:
    """Workers until the run is finished; the exit codes of those that ended by themselves."""
    chance, codes, kills = random.Random(case.seed), list[int](), 0
    success = RunDirectory(path=case.home / "generate" / "shared").success
    workers: list[BaseProcess] = []
    while not success.exists() or workers:
        if not success.exists():
            workers += [case.start() for _ in range(case.num_workers - len(workers))]
        time.sleep(chance.uniform(0.1, 0.6))
        if kills < case.num_kills and not success.exists():
            disturb(chance.choice(workers), chance.choice(KINDS), chance.uniform(0.5, 1.5) * LEASE_SECONDS)
            kills += 1
        ended = [worker for worker in workers if not worker.is_alive()]
        codes += [worker.exitcode or 0 for worker in ended]
        workers = [worker for worker in workers if worker not in ended]
    return codes


def check(case: Case) -> int:
    """How many starts had a share in the run. Raises AssertionError where its rows are not those of one worker."""
    process = PROCESSES.Process(target=_alone, args=(case,))
    process.start()
    process.join()
    assert process.exitcode == 0, "the run of one worker failed"
    codes = drain(case)
    strange = {code for code in codes if code not in (0, RESUMABLE, -signal.SIGKILL, -signal.SIGTERM)}
    assert not strange, f"workers ended with {strange}"
    shared, alone = (read_generations(RunDirectory(path=case.home / "generate" / name)) for name in ("shared", "alone"))
    assert shared.num_rows == case.num_rows
    assert shared.equals(alone), "the workers' rows are not those of one worker"
    passes = pq.read_table(case.home / "generate" / "shared" / "throughput", columns=["started_at"])
    return len(passes["started_at"].unique())


def _alone(case: Case) -> None:
    generate(case.config("alone", Workers.one), lambda: False)


def main(words: Sequence[str]) -> None:
    given = {name: int(value) for name, _, value in (word.partition("=") for word in words)}
    with tempfile.TemporaryDirectory() as home:
        case = Case(
            home=Path(home),
            num_workers=given.get("workers", 6),
            num_rows=given.get("rows", 96),
            num_kills=given.get("kills", 30),
            seed=given.get("seed", 0),
        )
        num_starts = check(case)
    print(f"{case.num_rows} rows by {num_starts} starts of workers, each once and as one worker makes them")


if __name__ == "__main__":
    main(sys.argv[1:])
