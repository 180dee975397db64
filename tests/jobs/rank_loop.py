"""Ranks of which one is killed, again and again: python -m tests.jobs.rank_loop [ranks=2] [rounds=10] [stops=1]
[seed=0] [tokens=400] [continuous=1] [way=sharded].

After each kill the others end by themselves with 75, and behind those so many times all where one has been sent
SIGTERM; at the end each row is there once, with the tokens of one process.
"""

import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.record.run_dir import RunDirectory
from jobs.run.tasks.generate import generate
from runtime.config.settings import (
    Admission,
    OffloadConfig,
    Parallelism,
    PolicyConfig,
    PolicyKind,
    SamplingConfig,
    SharePrefixes,
    Tier,
)
from tests.generations import read_generations
from tests.jobs.killing import job_alone
from tests.processes import PROCESSES

RESUMABLE, RETRY_SECONDS = 75, 60.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """`num_rows` in two blocks."""

    home: Path
    num_rows: int = 12
    num_new_tokens: int = 60
    admission: Admission = Admission.wave
    way: Parallelism = Parallelism.sharded

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(path=self.home / "generate" / "shared")

    def config(self, run: str) -> GenerateConfig:
        return GenerateConfig(
            run=run,
            output_root=str(self.home),
            offload=OffloadConfig(tier=Tier.nvme, resident_layers=0),
            dataset=DatasetConfig(kind=DatasetKind["sample"], limit=self.num_rows),
            policy=PolicyConfig(
                kind=PolicyKind.fixed,
                micro_batch_size=3,
                num_micro_batches=self.num_rows // 6,
                share_prefixes=SharePrefixes.off,
                admission=self.admission,
            ),
            sampling=SamplingConfig(max_new_tokens=self.num_new_tokens, ignore_eos=True),
            checkpoint_seconds=0.2,
        )

    def start(self, num_ranks: int, *, apart: bool = False) -> Sequence[BaseProcess]:
        """What `torchrun -m jobs.generate devices=sharded` starts; if `apart` each in a node of its own."""
        arguments = (
            *("run=shared", f"output_root={self.home}", "offload=nvme", "offload.resident_layers=0"),
            *("dataset=sample", f"dataset.limit={self.num_rows}", "policy=fixed", "policy.micro_batch_size=3"),
            *(f"policy.num_micro_batches={self.num_rows // 6}", "policy.share_prefixes=off"),
            *(f"sampling.max_new_tokens={self.num_new_tokens}", "sampling.ignore_eos=true"),
            *("checkpoint_seconds=0.2", "log_level=warning", f"devices={self.way.value}"),
            f"policy.admission={self.admission.value}",
        )
        port = free_port()
        ranks = [
            PROCESSES.Process(target=rank_alone, args=(rank, num_ranks, port, arguments, apart))
            for rank in range(num_ranks)
        ]
        for each in ranks:
            each.start()
        return ranks


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def rank_alone(rank: int, size: int, port: int, arguments: Sequence[str], apart: bool) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(OMP_NUM_THREADS="1", SLURMD_NODENAME=f"n{rank}" if apart else "n")
    job_alone(arguments)


def end_of(ranks: Sequence[BaseProcess], retry_seconds: float = RETRY_SECONDS) -> list[int | None]:
    """The exit codes, once all have ended. Raises AssertionError where one goes on and on."""
    until = time.monotonic() + retry_seconds
    for each in ranks:
        each.join(max(0.0, until - time.monotonic()))
    codes = [each.exitcode for each in ranks]
    for each in ranks:
        each.kill()
    assert None not in codes, f"ranks go on although one has ended: {codes}"
    return codes


MOMENTS = {  # what can be seen of how far a start is: files that it has written
    "it has started": "../..",
    "the run begins": ".lock",
    "the plan is made": "plan.parquet",
    "a pass has ended": "running*",
    "a block is committed": "generations/part-*",
}


def kill_one(
    case: Case,
    num_ranks: int,
    victim: int,
    written: str,
    after_seconds: float = 0.0,
    *,
    helped: bool = False,
    apart: bool = False,
    gently: bool = False,
) -> list[int]:
    """Starts the ranks, kills one behind the first file of that name that this start has written, `gently` by SIGTERM,
    and gives the exit codes of the others. They end by themselves, or if `helped` by SIGTERM, which launchers send:
    those that have not met yet wait for one another. Where the run ends before, there are none."""
    begin, ranks = time.time_ns(), case.start(num_ranks, apart=apart)

    def is_written() -> bool:
        return any(_changed_ns(path) > begin for path in case.directory.path.glob(written))

    while written != MOMENTS["it has started"] and not is_written() and all(each.is_alive() for each in ranks):
        time.sleep(0.002)
    time.sleep(after_seconds)
    if not ranks[victim].is_alive():
        assert end_of(ranks) == [0] * num_ranks
        return []
    (ranks[victim].terminate if gently else ranks[victim].kill)()
    if helped:
        time.sleep(1.0)
        for each in ranks:
            each.terminate()
    codes = end_of(ranks)
    assert codes.pop(victim) == (RESUMABLE if gently else -signal.SIGKILL)
    early = -signal.SIGTERM if helped else None  # of one that had not yet come to handle it
    return [RESUMABLE if code == early else code for code in codes if code is not None]


def _changed_ns(path: Path) -> int:
    """0 where it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def require_equal(case: Case) -> None:
    """Raises AssertionError where the ranks' rows are not those of one process."""
    process = PROCESSES.Process(target=_alone, args=(case,))
    process.start()
    process.join()
    assert process.exitcode == 0, "the run of one process failed"
    names = ("shared", "alone")
    shared, alone = (read_generations(RunDirectory(path=case.home / "generate" / name)) for name in names)
    assert shared.num_rows == case.num_rows
    assert shared.equals(alone), "the ranks' rows are not those of one process"


def _alone(case: Case) -> None:
    generate(case.config("alone"), lambda: False)


def check(case: Case, num_rounds: int, num_stops: int, most_ranks: int, seed: int) -> int:
    """How many of the rounds killed one; others stop one, and the last start is left alone."""
    chance, num_killed = random.Random(seed), 0
    for turn in range(num_rounds):
        size = chance.randint(2, most_ranks)
        moment = [*MOMENTS][turn % 5 if turn < 5 else 3]  # plan and manifest are written once
        victim, helped, apart = chance.randrange(size), moment == "it has started", turn % 2 == 1
        after_seconds = chance.uniform(0.0, 0.5) if turn > 2 else 0.0  # a plan that is there is not written again
        codes = kill_one(case, size, victim, MOMENTS[moment], after_seconds, helped=helped, apart=apart)
        assert set(codes) <= {RESUMABLE}, f"rank {victim} of {size} killed when {moment}: {codes}"
        print(f"rank {victim} of {size}, {'apart' if apart else 'together'}, when {moment}: {codes}", flush=True)
        num_killed += bool(codes)
    for _ in range(num_stops):
        size = chance.randint(2, most_ranks)
        victim = chance.randrange(size)
        codes = kill_one(case, size, victim, MOMENTS["a pass has ended"], chance.uniform(0.0, 0.2), gently=True)
        assert set(codes) <= {RESUMABLE}, f"rank {victim} of {size} stopped: {codes}"
        print(f"rank {victim} of {size} stopped: {codes}", flush=True)
    assert end_of(case.start(2), retry_seconds=600.0) == [0, 0]  # all of a run, on a machine that may be busy
    require_equal(case)
    return num_killed


def main(words: Sequence[str]) -> None:
    named = {name: value for name, _, value in (word.partition("=") for word in words)}
    way, options = Parallelism(named.pop("way", "sharded")), {name: int(value) for name, value in named.items()}
    with tempfile.TemporaryDirectory() as home:
        admission = Admission.continuous if options.get("continuous") else Admission.wave
        tokens = options.get("tokens", 400)
        case = Case(home=Path(home), num_rows=36, num_new_tokens=tokens, admission=admission, way=way)
        rounds, stops = options.get("rounds", 10), options.get("stops", 1)
        killed = check(case, rounds, stops, options.get("ranks", 2), options.get("seed", 0))
    print(f"{killed} kills of a rank; {case.num_rows} rows, each once and as one process makes them")


if __name__ == "__main__":
    main(sys.argv[1:])
