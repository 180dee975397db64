"""Waiting for a run's end, with all its shards and turns, and saying meanwhile what is missing."""

import time
from collections.abc import Callable, Sequence
from math import inf

from runtime.errors import Interrupted
from runtime.units import counted

from ..record.found import FoundRun, find_runs, is_locked
from ..record.leased import leased_blocks
from .shards import absent_shards, require_one_run

POLL_SECONDS, SECONDS_PER_LINE = 2.0, 10.0


def wait_for_end(
    names: Sequence[str],
    should_stop: Callable[[], bool],
    tell: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns once the run that `names` mean is finished, whoever works on it, and nobody works in its directory any
    more. Meanwhile `tell` is told what is missing, when that changes. Raises Interrupted, and what `find_runs` and
    `require_one_run` raise."""
    said, said_at, plans = "", -inf, _Plans()
    while texts := plans.lacking(require_one_run(find_runs(names, "run"))):
        text = f"waiting: {'; '.join(texts)}"
        if should_stop():
            raise Interrupted(f"stopped while {text}")
        if text != said and clock() - said_at >= SECONDS_PER_LINE:
            tell(text)
            said, said_at = text, clock()
        sleep(POLL_SECONDS)


class _Plans:
    """The numbers of blocks of runs; a plan is read once, as it does not change."""

    def __init__(self) -> None:
        self._num_blocks: dict[str, int] = {}

    def lacking(self, shards: Sequence[FoundRun]) -> list[str]:
        """A sentence about each shard that is not finished."""
        return absent_shards(shards) + [text for run in shards if (text := self._about(run)) is not None]

    def _about(self, run: FoundRun) -> str | None:
        is_running, name = is_locked(run.directory.lock), str(run.path)
        if run.directory.success.exists() and not is_running:
            return None
        leased = len(leased_blocks(run.directory.leases)) if is_running else 0
        state = f"{counted(leased, 'worker')} at work" if leased else "at work" if is_running else "nobody is at work"
        if not self._num_blocks.get(name):
            self._num_blocks[name] = len(run.rows_by_block)
        if not (count := self._num_blocks[name]):
            return f"{name} has no plan yet, {state}"
        return f"{name} lacks {max(0, count - len(run.parts)):,} of {counted(count, 'block')}, {state}"
