"""Runs cases of one target, one after the other, and reports what became of each. Ended by who watches it."""

import logging
import os
import random
import resource
import shutil
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from runtime.errors import WeightstreamError
from tests.fuzz import targets
from tests.fuzz.target import Cases, OutsideError, write

ADDRESS_SPACE = 12 << 30  # on top of what is mapped before the first case

_watchers: list[Connection] = []


def serve(report: Connection, home: Path, name: str, seed: int, first: int, seconds: float, last: int | None) -> None:
    """Reports each case that begins, and how it ends. `home` is an empty directory, where the file `stderr` gets what
    is printed."""
    _watchers.append(report)
    with (home / "stderr").open("ab") as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
    logging.disable(logging.CRITICAL)
    os.environ["HF_HUB_OFFLINE"] = "1"
    cases = Cases.of(targets.BY_NAME[name], home)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE,) * 2)
    say(ready=True)
    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end and (last is None or number <= last):
        run(cases, seed, number, home / "case")
        number += 1
    say(done=True)


def run(cases: Cases, seed: int, number: int, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    write(cases.files(seed, number), directory)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    say(begins=number, cpu_seconds=sum(os.times()[:4]))
    try:
        cases.target.check(directory, random.Random(number))
        outcome, text = "accepted", ""
    except WeightstreamError as error:
        outcome, text = "refused", str(error)
    except (KeyboardInterrupt, SystemExit):
        raise
    except OutsideError as error:
        outcome, text = "outside", str(error)
    except BaseException:  # which is what is looked for
        outcome, text = "raised", traceback.format_exc()
    say(ends=number, outcome=outcome, text=text[-3000:], grown=resident("VmHWM") - before)


def resident(key: str) -> int:
    """Bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def say(**what: object) -> None:
    for watcher in _watchers:
        watcher.send(what)
