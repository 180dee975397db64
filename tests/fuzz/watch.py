"""Starts children, ends one that hangs, and counts what they say."""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fuzz.child import serve
from tests.processes import PROCESSES

CHILD: Callable[..., None] = serve  # its report, home, target, seed, first case, seconds, last case
MAX_SECONDS, MAX_GROWTH_BYTES = 10.0, 1 << 30  # of a case
WALL_FACTOR = 6  # times as long by the clock, where a case gets no processor
START_SECONDS = 300.0  # imports, on a machine with much else to do


@dataclass(frozen=True, kw_only=True)
class Finding:
    target: str
    seed: int
    number: int
    what: str

    def __str__(self) -> str:
        repeat = f"python -m tests.fuzz targets={self.target} seed={self.seed} case={self.number}"
        return f"{self.target} case {self.number}: {self.what}\n  again: {repeat}"


@dataclass(kw_only=True)
class Tally:
    """Of one target; `counts` by outcome: accepted, refused, and findings."""

    target: str
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        accepted, refused = self.counts["accepted"], self.counts["refused"]
        return f"{self.target:14} {accepted:7} accepted {refused:7} refused {len(self.findings):4} findings"


@dataclass(frozen=True)
class Child:
    """What it prints goes to the file `printed`."""

    process: BaseProcess
    report: Connection
    printed: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None, "it was started"
        return self.process.pid

    def ended(self) -> str:
        """How, and what it printed last."""
        self.process.join()
        printed = self.printed.read_bytes()[-2000:] if self.printed.exists() else b""
        return f"{self.process.exitcode}: {printed.decode('utf-8', 'replace')}"


def watch(target: str, *, seconds: float, seed: int, first: int = 0, last: int | None = None) -> Tally:
    """Runs cases until `seconds` are over, not counting starts, or `last` is done. A child that a case ends or that is
    ended for it is followed by another, which goes on with the next case."""
    tally, left = Tally(target=target), seconds
    while left > 0 and (last is None or first <= last):
        begun = time.monotonic()
        first, started = _one_child(tally, seed, first, left, last)
        left -= max(0.1, time.monotonic() - (started or begun))
        if started is None:
            break
    return tally


def _one_child(tally: Tally, seed: int, first: int, seconds: float, last: int | None) -> tuple[int, float | None]:
    """The number of the case that comes next, and when the child was ready; None where it never was."""
    report, there = PROCESSES.Pipe(duplex=False)
    with report, TemporaryDirectory(prefix="fuzz-") as home:
        process = PROCESSES.Process(target=CHILD, args=(there, Path(home), tally.target, seed, first, seconds, last))
        process.start()
        there.close()
        try:
            return _listen(tally, seed, first, Child(process, report, Path(home) / "stderr"))
        finally:
            process.kill()
            process.join()


def _listen(tally: Tally, seed: int, first: int, child: Child) -> tuple[int, float | None]:
    running, started = None, None
    number = first
    begun, used = 0.0, 0.0  # of the case that runs: by the clock, and the processor time before it

    def find(what: str) -> None:
        tally.findings.append(Finding(target=tally.target, seed=seed, number=number, what=what))

    while True:
        if not child.report.poll(START_SECONDS if running is None else MAX_SECONDS):
            is_starved = started is not None and cpu_seconds(child.pid) - used < MAX_SECONDS / 2
            if is_starved and time.monotonic() - begun < WALL_FACTOR * MAX_SECONDS:
                continue  # the machine has much else to do
            find(f"no end after {MAX_SECONDS:.0f} s" if started else "never ready")
            return number + 1, started
        try:
            said: Mapping[str, object] = child.report.recv()
        except EOFError:
            if running is not None or started is None:
                find(f"ended the process with {child.ended()}")
            return number + 1, started
        if "ready" in said:
            started = time.monotonic()
        elif "begins" in said:
            running = number = int(str(said["begins"]))
            begun, used = time.monotonic(), float(str(said["cpu_seconds"]))
        elif "ends" in said:
            running = None
            _count(tally, said, find)
        else:
            return number + 1, started


def cpu_seconds(pid: int) -> float:
    """Of a process and its children, those that are over too."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(stat.parent.name) == pid:
            ticks += sum(map(int, fields[11:15]))
        elif int(fields[1]) == pid:
            ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _count(tally: Tally, said: Mapping[str, object], find) -> None:
    outcome, grown = str(said["outcome"]), int(str(said["grown"]))
    tally.counts[outcome] += 1
    if outcome in ("raised", "outside"):
        find(f"{outcome}: {said['text']}")
    elif outcome == "refused" and len(str(said["text"])) > 2500:
        find(f"a message of {len(str(said['text'])):,} characters: {str(said['text'])[:300]}")
    if grown > MAX_GROWTH_BYTES:
        find(f"grew by {grown / 2**30:.1f} GiB")
