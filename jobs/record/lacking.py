"""What a run lacks until it is finished, for people: rows, their blocks, and who is at work on them."""

from collections.abc import Sequence

import numpy as np

from runtime.units import counted

from .found import Condition, FoundRun
from .leased import leased_blocks

NUM_LISTED = 10


def missing_rows(run: FoundRun) -> list[int]:
    """The places in the input of rows that were planned and that no part has, in order."""
    there = list(run.parts)
    gone = [plan["row_index"].to_numpy()[~np.isin(plan["block"].to_numpy(), there)] for plan in run.plans()]
    return np.unique(np.concatenate([np.empty(0, np.int64), *gone])).tolist()


def lacking(runs: Sequence[FoundRun]) -> list[str]:
    """A sentence about each of `runs` that is neither done nor damaged."""
    ended = (Condition.done, Condition.damaged)
    return [told_lacking(run, missing_rows(run)) for run in runs if run.condition not in ended]


def told_lacking(run: FoundRun, rows: Sequence[int]) -> str:
    """What is said of a run that is not done, of whose rows those at `rows` are missing."""
    index, count = run.shard
    name = f"{run.place}" + (f" (shard {index} of {count})" if count > 1 else "")
    if run.condition is Condition.damaged:
        return f"{name} is damaged: {run.problem}"
    state = "is being worked on by another process" if run.condition is Condition.running else "is not finished"
    if run.num_rows is None:
        return f"{name} {state}: nothing is planned yet"
    texts = [f"{run.num_done:,} of {run.num_rows:,} rows are done"]
    if len(rows):
        texts.append(f"missing are rows {listed(rows)}, in {_told_blocks(run)}")
    return f"{name} {state}: {', '.join(texts)}{_told_workers(run)}"


def _told_blocks(run: FoundRun) -> str:
    missing = sorted(set(run.rows_by_block) - set(run.parts))
    return f"{len(missing):,} of {counted(len(run.rows_by_block), 'block')} ({listed(missing)})"


def _told_workers(run: FoundRun) -> str:
    """Who has which block; of a run of one worker, or that nobody works on, there are no leases that mean anything."""
    leased = leased_blocks(run.directory.leases) if run.condition is Condition.running else []
    if not leased:
        return ""
    more = f" and {len(leased) - NUM_LISTED} more" if len(leased) > NUM_LISTED else ""
    return f"; leased are {', '.join(str(each) for each in leased[:NUM_LISTED])}{more}"


def listed(numbers: Sequence[int]) -> str:
    """The first numbers, those that follow one another as `3 to 7`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in ranges]
    more = f" and {len(texts) - NUM_LISTED} more" if len(texts) > NUM_LISTED else ""
    return ", ".join(texts[:NUM_LISTED]) + more
