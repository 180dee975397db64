"""The shards and turns of one run: checks completeness, waits for the run to finish, and reads its parts.

A shard is the run's output directory for one share of the input rows. A turn is a round of the conversations, with its
own output directories.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf

import numpy as np
import pyarrow as pa

from runtime.errors import ConfigError, DamagedRunError, Interrupted
from runtime.units import format_count

from ..record.run_reader import Condition, RunReader, find_runs, is_locked
from ..record.unfinished import describe_missing_rows, format_ranges, leased_blocks, missing_rows

log = logging.getLogger(__name__)
POLL_SECONDS, SECONDS_PER_LINE = 2.0, 10.0


def require_one_run(runs: Sequence[RunReader]) -> list[RunReader]:
    """Sorts `runs` by turn and shard index. Raises ConfigError unless they are distinct shards and turns of one run."""
    first = runs[0]
    for other in runs[1:]:
        expected, actual = first.identity, other.identity
        keys = sorted(key for key in {*expected, *actual} if expected.get(key) != actual.get(key))
        if keys:
            raise ConfigError(
                f"{other.location} and {first.location} are different runs: {', '.join(keys[:3])} differ. Export one "
                "at a time"
            )
        counts = first.shard[1], other.shard[1]
        if counts[0] != counts[1]:
            raise ConfigError(f"{first.location} has shard.count={counts[0]}, {other.location} {counts[1]}")
    by_turn_and_shard = {(run.turn, run.shard[0]): run for run in runs}
    if len(by_turn_and_shard) < len(runs):
        duplicate = next(run for run in runs if by_turn_and_shard[run.turn, run.shard[0]] is not run)
        other = by_turn_and_shard[duplicate.turn, duplicate.shard[0]]
        raise ConfigError(
            f"{duplicate.location} and {other.location} are both shard {duplicate.shard[0]} of {duplicate.shard[1]}: "
            "name one of them"
        )
    return [by_turn_and_shard[key] for key in sorted(by_turn_and_shard)]


def check_complete(names: Sequence[str], shards: Sequence[RunReader], *, partial: bool, verb: str) -> list[str]:
    """Returns sentences about missing shards and rows, from file names, footers and plans. Raises ConfigError if there
    are any, unless `partial`. `verb`: action of the caller, for the message."""
    missing = describe_missing_shards(shards)
    for run in shards:
        rows = missing_rows(run)
        if run.condition is not Condition.done or len(rows):
            missing.append(describe_missing_rows(run, rows))
    if missing and not partial:
        raise ConfigError(
            f"run={','.join(names)} is not complete: {'; '.join(missing)}. Repeat the run's command to resume it; "
            f"partial=true {verb} the finished rows"
        )
    return missing


def describe_missing_shards(runs: Sequence[RunReader]) -> list[str]:
    """A sentence for each turn with missing shards."""
    sentences, count = list[str](), runs[0].shard[1]
    for turn in range(1, runs[0].num_turns + 1):
        shards = [run for run in runs if run.turn == turn]
        absent = sorted(set(range(count)) - {run.shard[0] for run in shards})
        if absent and not shards:
            sentences.append(f"turn {turn} is missing")
        elif absent:
            suffix = f" (turn {turn})" if runs[0].num_turns > 1 else ""
            verb = "is" if len(absent) == 1 else "are"
            sentences.append(f"shard {format_ranges(absent)} of {count}{suffix} {verb} missing")
    return sentences


def read_parts(run: RunReader, *, partial: bool) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """Yields each part of a shard, verified, and its row indices in the input. Raises DamagedRunError; with `partial`,
    skips damaged parts with a warning."""
    for block in sorted(run.parts):
        try:
            table = run.read_part(block)
            row_indices = table["row_index"].to_numpy()
        except DamagedRunError as error:
            if not partial:
                raise
            log.warning("skipped: %s", error)
            continue
        yield table, row_indices


def wait_until_finished(
    names: Sequence[str],
    should_stop: Callable[[], bool],
    report: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Blocks until the run is finished and no process works in its directory. Calls `report` with a status line when it
    changes. Raises Interrupted, and the errors of `find_runs` and `require_one_run`."""
    logged, logged_at = "", -inf
    num_blocks: dict[str, int] = {}  # plans never change

    def describe_unfinished(run: RunReader) -> str | None:
        is_running, name = is_locked(run.directory.lock), str(run.path)
        if run.directory.success.exists() and not is_running:
            return None
        # A worker leases one block at a time. Without workers=elastic there are no leases.
        num_workers = len(leased_blocks(run.directory.leases)) if is_running else 0
        state = (
            f"{format_count(num_workers, 'worker')} running"
            if num_workers
            else "running"
            if is_running
            else "no process is running"
        )
        if not num_blocks.get(name):
            num_blocks[name] = len(run.rows_by_block)
        if not (count := num_blocks[name]):
            return f"{name} has no plan yet, {state}"
        return f"{name} lacks {max(0, count - len(run.parts)):,} of {format_count(count, 'block')}, {state}"

    while True:
        shards = require_one_run(find_runs(names, "run"))
        texts = describe_missing_shards(shards) + [
            text for run in shards if (text := describe_unfinished(run)) is not None
        ]
        if not texts:
            return
        text = f"waiting: {'; '.join(texts)}"
        if should_stop():
            raise Interrupted(f"stopped while {text}")
        if text != logged and clock() - logged_at >= SECONDS_PER_LINE:
            report(text)
            logged, logged_at = text, clock()
        sleep(POLL_SECONDS)
