"""Messages about unfinished runs: missing rows and blocks, and workers with leases.

A lease is a file that says which worker computes a block.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.units import format_count

from ..files.locks import format_holder, read_lease
from ..files.publishing import JsonValue, UnexpectedFileError
from .run_reader import Condition, RunReader


def lease_name(block: int) -> str:
    return f"block-{block:06d}"


@dataclass(frozen=True, kw_only=True)
class LeasedBlock:
    """A block that a worker computes. `holder`: the content of the lease. `since_seconds` and `heartbeat_seconds`: time
    since the lease was taken and renewed. They are only displayed, because clocks of machines differ."""

    block: int
    holder: Mapping[str, JsonValue]
    since_seconds: float
    heartbeat_seconds: float

    @property
    def slurm(self) -> dict[str, str]:
        """Environment variables with the Slurm ids of the worker."""
        ids = self.holder.get("slurm")
        return {key: str(value) for key, value in ids.items()} if isinstance(ids, dict) else {}

    def __str__(self) -> str:
        return f"block {self.block}: {format_holder(self.holder)}{format_slurm_ids(self.slurm)}"


def format_slurm_ids(ids: Mapping[str, str]) -> str:
    """The Slurm job or array task as text; empty outside of Slurm."""
    array, task = ids.get("SLURM_ARRAY_JOB_ID"), ids.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array is not None and task is not None else ids.get("SLURM_JOB_ID")
    restarts = ids.get("SLURM_RESTART_COUNT", "0")
    if job is None:
        return ""
    return f", Slurm job {job}" + (f" (restart {restarts})" if restarts != "0" else "")


def leased_blocks(folder: Path) -> list[LeasedBlock]:
    """The blocks with a lease in `folder`. Raises OSError."""
    now, leases = time.time(), list[LeasedBlock]()
    for path in sorted(folder.glob("block-*.json")):
        match = re.fullmatch(r"block-(\d{6,})\.json", path.name)
        try:
            lease = read_lease(path)
        except UnexpectedFileError:  # not a lease
            continue
        if match is None or lease is None:  # the name is not that of a lease, or the lease was released meanwhile
            continue
        since = lease.holder.get("since")
        leases.append(
            LeasedBlock(
                block=int(match[1]),
                holder=lease.holder,
                since_seconds=max(0.0, now - since) if isinstance(since, float) else 0.0,
                heartbeat_seconds=max(0.0, now - lease.touched_ns / 1e9),
            )
        )
    return leases


NUM_LISTED = 10


def missing_rows(run: RunReader) -> list[int]:
    """The numbers, in the input, of planned rows that are in no part, sorted."""
    committed = list(run.parts)
    row_indices = [plan["row_index"].to_numpy()[~np.isin(plan["block"].to_numpy(), committed)] for plan in run.plans()]
    return np.unique(np.concatenate([np.empty(0, np.int64), *row_indices])).tolist()


def describe_unfinished(runs: Sequence[RunReader]) -> list[str]:
    """A sentence for each run that is running or interrupted."""
    ended = (Condition.done, Condition.damaged)
    return [describe_missing_rows(run, missing_rows(run)) for run in runs if run.condition not in ended]


def describe_missing_rows(run: RunReader, rows: Sequence[int]) -> str:
    """A sentence about a run that is not done: what is missing, or why it is damaged. `rows`: as from
    `missing_rows`."""
    index, count = run.shard
    name = f"{run.location}" + (f" (shard {index} of {count})" if count > 1 else "")
    if run.condition is Condition.damaged:
        return f"{name} is damaged: {run.problem}"
    state = "is in use by another process" if run.condition is Condition.running else "is not finished"
    if run.num_rows is None:
        return f"{name} {state}: it has no plan yet"
    texts = [f"{run.num_done:,} of {run.num_rows:,} rows are done"]
    if len(rows):
        missing = sorted(set(run.rows_by_block) - set(run.parts))
        blocks = f"{len(missing):,} of {format_count(len(run.rows_by_block), 'block')} ({format_ranges(missing)})"
        texts.append(f"missing: rows {format_ranges(rows)}, in {blocks}")
    line = f"{name} {state}: {', '.join(texts)}"
    # Leases are meaningful only while workers run.
    leased = leased_blocks(run.directory.leases) if run.condition is Condition.running else []
    if not leased:
        return line
    more = f" and {len(leased) - NUM_LISTED} more" if len(leased) > NUM_LISTED else ""
    return f"{line}; leased: {', '.join(map(str, leased[:NUM_LISTED]))}{more}"


def format_ranges(numbers: Sequence[int]) -> str:
    """The first NUM_LISTED ranges of sorted numbers as text: `3 to 7` for consecutive numbers."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in ranges]
    more = f" and {len(texts) - NUM_LISTED} more" if len(texts) > NUM_LISTED else ""
    return ", ".join(texts[:NUM_LISTED]) + more
