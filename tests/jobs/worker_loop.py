"""Workers of one run that are killed, stopped, paused and started again: python -m tests.jobs.worker_loop
[workers=6] [rows=96] [kills=30] [seed=0] [minutes=0].

At the end each row is there once, and all rows are those of a run that one worker made alone; so again and again with
other seeds until the minutes are over. Then two workers are timed beside one.
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import pyarrow.parquet as pq

from jobs.config.settings import GenerateConfig, Workers
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.files.locks import read_lease
from jobs.record.run_dir import RunDirectory
from jobs.record.unfinished import lease_name, leased_blocks
from jobs.run.tasks.generate import generate
from runtime.config.settings import PolicyConfig, PolicyKind, SamplingConfig
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
        with suppress(ProcessLookupError):  # it was ending as it was stopped
            os.kill(process.pid, signal.SIGCONT)


@dataclass(kw_only=True)
class Watch:
    """The blocks of workers that were killed or paused, and how long each waited for another holder or its part."""

    directory: RunDirectory
    waiting: dict[int, tuple[bytes, float]] = field(default_factory=dict)  # what its lease held, and since when
    longest_seconds: float = 0.0

    def begin(self, pid: int | None) -> None:
        for block in leased_blocks(self.directory.leases):
            if block.holder.get("pid") == pid:
                self.waiting[block.block] = self._lease(block.block), time.monotonic()

    def look(self) -> None:
        for block, (data, since) in list(self.waiting.items()):
            if self._lease(block) != data:
                self.longest_seconds = max(self.longest_seconds, time.monotonic() - since)
                del self.waiting[block]

    def _lease(self, block: int) -> bytes:
        found = read_lease(self.directory.leases / f"{lease_name(block)}.json")
        return found.data if found is not None else b""


def drain(case: Case, disturbed: Counter[str] | None = None) -> list[int]:
    """Workers until the run is finished; the exit codes of those that ended by themselves. `disturbed` counts what was
    done to them, and the longest that a block of one waited, in milliseconds."""
    chance, codes, kills = random.Random(case.seed), list[int](), 0
    watch, disturbed = (
        Watch(directory=RunDirectory(path=case.home / "generate" / "shared")),
        disturbed if disturbed is not None else Counter(),
    )
    success = RunDirectory(path=case.home / "generate" / "shared").success
    workers: list[BaseProcess] = []
    while not success.exists() or workers:
        if not success.exists():
            workers += [case.start() for _ in range(case.num_workers - len(workers))]
        time.sleep(chance.uniform(0.1, 0.6))
        if kills < case.num_kills and not success.exists():
            worker, kind = chance.choice(workers), chance.choice(KINDS)
            watch.begin(worker.pid)
            disturb(worker, kind, chance.uniform(0.5, 1.5) * LEASE_SECONDS)
            disturbed[kind.name] += 1
            kills += 1
        watch.look()
        ended = [worker for worker in workers if not worker.is_alive()]
        codes += [worker.exitcode or 0 for worker in ended]
        workers = [worker for worker in workers if worker not in ended]
    disturbed["waited_ms"] = max(disturbed["waited_ms"], round(1000 * watch.longest_seconds))
    return codes


def check(case: Case, disturbed: Counter[str] | None = None) -> int:
    """How many starts had a share in the run. Raises AssertionError where its rows are not those of one worker."""
    process = PROCESSES.Process(target=_alone, args=(case,))
    process.start()
    process.join()
    assert process.exitcode == 0, "the run of one worker failed"
    codes = drain(case, disturbed)
    strange = {code for code in codes if code not in (0, RESUMABLE, -signal.SIGKILL, -signal.SIGTERM)}
    assert not strange, f"workers ended with {strange}"
    shared, alone = (read_generations(RunDirectory(path=case.home / "generate" / name)) for name in ("shared", "alone"))
    assert shared.num_rows == case.num_rows
    assert shared.equals(alone), "the workers' rows are not those of one worker"
    passes = pq.read_table(case.home / "generate" / "shared" / "throughput", columns=["started_at"])
    return len(passes["started_at"].unique())


def _alone(case: Case) -> None:
    generate(case.config("alone", Workers.one), lambda: False)


def seconds_with(case: Case, num_workers: int) -> float:
    """How long so many workers of one thread each take, undisturbed."""
    began = time.monotonic()
    workers = [start_job(*case.words(), "machine.num_threads=1") for _ in range(num_workers)]
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * num_workers
    return time.monotonic() - began


def main(words: Sequence[str]) -> None:
    options = {name: int(value) for name, _, value in (word.partition("=") for word in words)}
    disturbed, num_rounds, num_starts = Counter[str](), 0, 0
    sizes = {"num_workers": options.get("workers", 6), "num_rows": options.get("rows", 96)}
    began, first = time.monotonic(), options.get("seed", 0)
    while not num_rounds or time.monotonic() - began < 60 * options.get("minutes", 0):
        with tempfile.TemporaryDirectory() as home:
            case = Case(home=Path(home), num_kills=options.get("kills", 30), seed=first + num_rounds, **sizes)
            num_starts += check(case, disturbed)
        num_rounds += 1
    kinds = ", ".join(f"{disturbed[kind.name]} {kind.name}" for kind in KINDS)
    print(f"{num_rounds} rounds of {sizes['num_rows']} rows by {num_starts} starts with {kinds} in all:")
    print(
        "each row once and as one worker makes them; the block of a worker that was disturbed waited at most", end=" "
    )
    print(f"{disturbed['waited_ms'] / 1000:.1f} s for another, with leases of {LEASE_SECONDS:.0f} s")
    times = list[float]()
    for count in (1, 2):
        with tempfile.TemporaryDirectory() as home:
            times.append(seconds_with(Case(home=Path(home), num_new_tokens=200, **sizes), count))
    print(f"undisturbed, one thread each: {times[0]:.0f} s by one worker, {times[1]:.0f} s by two")


if __name__ == "__main__":
    main(sys.argv[1:])
