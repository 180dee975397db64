"""Starts children, ends one that hangs, and counts what they say."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHILD = ["-m", "tests.fuzz.child"]
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
    stderr: str = ""

    def __str__(self) -> str:
        accepted, refused = self.counts["accepted"], self.counts["refused"]
        return f"{self.target:14} {accepted:7} accepted {refused:7} refused {len(self.findings):4} findings"


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
    words = [f"target={tally.target}", f"seed={seed}", f"first={first}", f"seconds={seconds}"]
    words += [] if last is None else [f"last={last}"]
    command = [sys.executable, *CHILD, *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        lines: queue.Queue[bytes | None] = queue.Queue()
        readers = [
            threading.Thread(target=_put_lines, args=(child, lines), daemon=True),
            threading.Thread(target=_keep_stderr, args=(child, tally), daemon=True),
        ]
        for reader in readers:
            reader.start()
        try:
            return _listen(tally, seed, first, lines, child)
        finally:
            child.kill()
            for reader in readers:
                reader.join()


def _listen(
    tally: Tally, seed: int, first: int, lines: "queue.Queue[bytes | None]", child: "subprocess.Popen[bytes]"
) -> tuple[int, float | None]:
    running, started = None, None
    number = first
    begun, used = 0.0, 0.0  # of the case that runs: by the clock, and the processor time before it

    def find(what: str) -> None:
        tally.findings.append(Finding(target=tally.target, seed=seed, number=number, what=what))

    while True:
        try:
            line = lines.get(timeout=START_SECONDS if running is None else MAX_SECONDS)
        except queue.Empty:
            is_starved = started is not None and cpu_seconds(child.pid) - used < MAX_SECONDS / 2
            if is_starved and time.monotonic() - begun < WALL_FACTOR * MAX_SECONDS:
                continue  # the machine has much else to do
            find(f"no end after {MAX_SECONDS:.0f} s" if started else "never ready")
            return number + 1, started
        if line is None:
            if running is not None or started is None:
                find(f"ended the process with {child.wait()}: {tally.stderr[-2000:]}")
            return number + 1, started
        said: Mapping[str, object] = json.loads(line)
        if "ready" in said:
            started = time.monotonic()
        elif "begins" in said:
            running = number = int(str(said["begins"]))
            begun, used = time.monotonic(), cpu_seconds(child.pid)
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


def _put_lines(child: "subprocess.Popen[bytes]", lines: "queue.Queue[bytes | None]") -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(None)


def _keep_stderr(child: "subprocess.Popen[bytes]", tally: Tally) -> None:
    assert child.stderr is not None
    for line in child.stderr:
        tally.stderr = (tally.stderr + line.decode("utf-8", "replace"))[-8000:]
