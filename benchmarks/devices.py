"""The benchmark of `devices=sharded`, in which ranks (processes) read different parts of each layer and exchange them.

Compares several ranks with one. The read rate of each rank is limited, so that reading is the bottleneck.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Unpack

from runtime.config.settings import DevicesConfig, Gather, OffloadConfig, Parallelism, RuntimeConfig, Tier
from runtime.devices.messages import end_sessions
from runtime.library.api import Runtime
from runtime.library.keywords import Settings
from runtime.plan.shape.shapes import Stripes
from runtime.ranks.launch import Launch
from runtime.ranks.ranks import Ranks
from runtime.store.mirrors import Copies, find_copies
from runtime.store.reader import Reader
from runtime.store.transfer import ChunkTiming
from runtime.trace import Trace
from runtime.units import MIB, format_bytes

from .report import table
from .runner import ask_worker
from .task import BenchmarkTask, Result, drop_page_cache
from .weightstream import measure_generation, open_runtime

READ_CHUNK_MIB = 1  # small compared with a rank's part of a page, so that the rate is even


class ThrottledReader(Reader):
    """A reader whose threads together read at most `bytes_per_second` from each directory."""

    def __init__(
        self,
        bytes_per_second: float,
        *,
        num_threads: int,
        chunk_bytes: int,
        direct: bool = True,
        copies: Copies | None = None,
        stripes: Mapping[str, Stripes] | None = None,
    ):
        super().__init__(
            num_threads=num_threads, chunk_bytes=chunk_bytes, direct=direct, copies=copies, stripes=stripes
        )
        self._seconds_per_byte, self._free_at = 1 / bytes_per_second, defaultdict[Path, float](float)
        self._limits = threading.Lock()  # guards _free_at: all threads share one limit for each directory

    def _read_file(
        self, path: str, offset: int, views: Sequence[memoryview], needed: int, pauses: Sequence[float]
    ) -> ChunkTiming:
        begin, folder = time.monotonic(), Path(path).parent
        with self._limits:  # reserves the next interval of a timeline that all threads share
            self._free_at[folder] = max(self._free_at[folder], begin) + sum(map(len, views)) * self._seconds_per_byte
            until = self._free_at[folder]
        timing = super()._read_file(path, offset, views, needed, pauses)
        time.sleep(max(0.0, until - time.monotonic()))
        return timing._replace(begin=begin, end=time.monotonic())


class ThrottledRuntime(Runtime):
    """A runtime that reads weights with a `ThrottledReader`."""

    def __init__(
        self,
        config: RuntimeConfig | None = None,
        *,
        bytes_per_second: float,
        trace: Trace | None = None,
        ranks: Ranks | None = None,
        **settings: Unpack[Settings],
    ):
        self._bytes_per_second = bytes_per_second
        super().__init__(config, trace=trace, ranks=ranks, **settings)

    def reader(self) -> Reader:
        offload = self.config.offload
        chunk_bytes, stripes = offload.read_chunk_mib * MIB, self.model.checkpoint.stripes
        return ThrottledReader(
            self._bytes_per_second,
            num_threads=offload.reader_threads,
            chunk_bytes=chunk_bytes,
            copies={} if stripes else find_copies(self.model.checkpoint, self.config.model.mirrors),
            stripes=stripes,
        )


@dataclass(frozen=True, kw_only=True)
class RanksCase:
    """`num_ranks` processes that each read `bytes_per_second` and exchange weights by `gather`."""

    num_ranks: int
    bytes_per_second: float
    gather: str = Gather.memory.value

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks, {self.gather}" if self.num_ranks > 1 else "1 rank"


def measure_ranks(case: RanksCase, task: BenchmarkTask) -> Result:
    """Measures with a process per rank and returns the result of rank 0. Raises WeightstreamError if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        rank_task = replace(task, num_threads=max(1, task.num_threads // case.num_ranks))
        question = {"task": asdict(rank_task), "case": asdict(case), "folder": folder, "rank": 0}
        return Result(**ask_worker(__name__, question))


def measure(task: BenchmarkTask, case: RanksCase, rank: int, folder: str) -> Result | None:
    """Measures as rank `rank`. Rank 0 starts the other ranks and returns the result; they return None. A case with one
    rank runs as usual, without `Ranks`. `folder`: where ranks find each other."""
    drop_page_cache(Path(task.path))
    make = partial(ThrottledRuntime, bytes_per_second=case.bytes_per_second)
    offload = OffloadConfig(tier=Tier.nvme, resident_layers=0, read_chunk_mib=READ_CHUNK_MIB)
    if case.num_ranks == 1:
        return measure_generation(*open_runtime(task, offload, make=make)).result
    processes = []
    for other in range(1, case.num_ranks) if rank == 0 else ():
        question = {"task": asdict(task), "case": asdict(case), "folder": folder, "rank": other}
        command = [sys.executable, "-m", "benchmarks.worker", __name__, json.dumps(question)]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    launch = Launch(rank=rank, size=case.num_ranks, url=f"file://{Path(folder) / 'meet'}")
    with Ranks(launch, devices=DevicesConfig(way=Parallelism.sharded, gather=case.gather)) as ranks:
        runtime, requests = open_runtime(task, offload, make=partial(make, ranks=ranks))
        if rank:
            for _ in runtime.follow(requests):
                pass
            return None
        result = measure_generation(runtime, requests).result
        end_sessions(ranks)
    for process in processes:
        process.wait()
    return result


def devices_table(rounds: Mapping[RanksCase, Sequence[Result]]) -> str:
    """A row for each case. Ratios are of medians; `equal` counts the sequences with the same tokens as in the first
    case."""
    first = next(iter(rounds.values()))
    rate, num_bytes = median(result.rate for result in first), _bytes_of_pass(first[0])
    rows = []
    for case, results in rounds.items():
        case_rate = median(result.rate for result in results)
        spread = f"{min(result.rate for result in results):.1f}-{max(result.rate for result in results):.1f}"
        pairs = zip(results[0].tokens, first[0].tokens, strict=True)
        rows.append(
            [
                str(case),
                f"{case_rate:.1f} ({spread})",
                f"{case_rate / rate:.2f}",
                format_bytes(_bytes_of_pass(results[0])),
                f"{_bytes_of_pass(results[0]) / num_bytes:.3f}",
                f"{sum(actual == expected for actual, expected in pairs)} of {len(results[0].tokens)}",
            ]
        )
    limit = next(iter(rounds)).bytes_per_second / 1e6
    headings = ["ranks", "tokens/s", "x one", "rank 0 reads in a pass", "share", "equal"]
    return f"{table(headings, rows)}\n\nEach rank reads at most {limit:g} MB/s (a setting of the bench)."


def _bytes_of_pass(result: Result) -> float:
    return result.bytes_read / result.num_passes


def answers(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's entry point (`benchmarks.worker`): yields the result of rank 0, nothing for other ranks."""
    task, case = BenchmarkTask(**question["task"]), RanksCase(**question["case"])
    if (result := measure(task, case, question["rank"], question["folder"])) is not None:
        yield asdict(result)
