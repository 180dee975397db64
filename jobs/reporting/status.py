"""How far a run is, by the names of its parts, its plan and its leases. No rows are read: it is quick for many rows."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet as pq

from runtime.errors import DamagedRunError
from runtime.units import counted

from ..files.lease import read_lease, told
from ..files.publishing import PARQUET_PROBLEMS
from ..run.found import FoundRun, is_locked
from ..run.progress import roughly
from ..run.workers import leased_block

NUM_PARTS_OF_PACE = 20


@dataclass(frozen=True, kw_only=True)
class LeasedBlock:
    """A block in work. `since_seconds` and `heartbeat_seconds`: how long ago it was leased, and renewed last, where
    clocks of the worker, the file system and this machine agree; only shown, nothing goes by them."""

    block: int
    holder: str
    slurm: dict[str, str]
    since_seconds: float
    heartbeat_seconds: float


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """`state`: done, running or interrupted. Blocks and rows that are planned are None before the plan is fixed;
    `rows_per_second` is of the last parts, None where there are too few."""

    run: str
    state: str
    num_blocks: int | None
    num_blocks_done: int
    num_rows: int | None
    num_rows_done: int
    rows_per_second: float | None
    leased: Sequence[LeasedBlock]

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at the pace of the last parts; None where nobody is at work."""
        if self.state != "running" or not self.rows_per_second or self.num_rows is None:
            return None
        return (self.num_rows - self.num_rows_done) / self.rows_per_second


def status_of(run: FoundRun) -> RunStatus:
    """Raises DamagedRunError where the plan cannot be read."""
    rows = _rows_by_block(run.directory.plan)
    done = {block: path for block, path in run.parts.items() if block in rows}
    is_running = is_locked(run.directory.lock)
    is_done = run.directory.success.exists() and len(done) == len(rows)
    return RunStatus(
        run=str(run.path),
        state="running" if is_running else "done" if is_done else "interrupted",
        num_blocks=len(rows) or None,
        num_blocks_done=len(done),
        num_rows=sum(rows.values()) or None,
        num_rows_done=sum(rows[block] for block in done),
        rows_per_second=_pace([(path.stat().st_mtime, rows[block]) for block, path in done.items()]),
        leased=_leased(run.directory.leases) if is_running else [],
    )


def as_text(statuses: Sequence[RunStatus]) -> str:
    """A line of what is done for each run, and one for each block in work."""
    return "\n\n".join("\n".join(_lines(status)) for status in statuses)


def as_json(statuses: Sequence[RunStatus]) -> str:
    """A list with an object for each run."""
    return json.dumps([asdict(status) | {"seconds_left": status.seconds_left} for status in statuses], indent=2)


def _lines(status: RunStatus) -> list[str]:
    if status.num_blocks is None or status.num_rows is None:
        return [f"{status.run}: {status.state}, no plan yet"]
    left = status.num_blocks - status.num_blocks_done - len(status.leased)
    lines = [
        f"{status.run}: {status.state}",
        f"rows    {status.num_rows_done:,} of {status.num_rows:,}",
        f"blocks  {status.num_blocks_done:,} of {status.num_blocks:,} done, {len(status.leased)} leased, {left:,} left",
    ]
    if status.seconds_left is not None and status.rows_per_second is not None:
        lines.append(f"pace    {status.rows_per_second:.3g} rows/s, about {roughly(status.seconds_left)} left")
    if status.leased:
        lines.append(f"at work on {counted(len(status.leased), 'block')}:")
    return lines + [_line(leased) for leased in status.leased]


def _line(leased: LeasedBlock) -> str:
    slurm = "".join(f", {name} {value}" for name, value in leased.slurm.items())
    age = f"for {roughly(leased.since_seconds)}, last sign {roughly(leased.heartbeat_seconds)} ago"
    return f"  block {leased.block}: {leased.holder}{slurm}, {age}"


def _rows_by_block(plan: Path) -> dict[int, int]:
    """How many rows each block has; nothing before the plan is fixed. Raises DamagedRunError."""
    try:
        counts = pq.read_table(plan, columns=["block"])["block"].value_counts()
    except FileNotFoundError:
        return {}
    except PARQUET_PROBLEMS as error:
        raise DamagedRunError(f"{plan} is damaged ({error}): the run's own command says what to do") from error
    return {each["values"]: each["counts"] for each in counts.to_pylist()}


def _pace(parts: Sequence[tuple[float, int]]) -> float | None:
    """Rows a second of the last parts, by when each was written."""
    last = sorted(parts)[-NUM_PARTS_OF_PACE:]
    if len(last) < 2 or last[-1][0] <= last[0][0]:
        return None
    return sum(num_rows for _, num_rows in last[1:]) / (last[-1][0] - last[0][0])


def _leased(folder: Path) -> list[LeasedBlock]:
    found = ((leased_block(path.name), read_lease(path)) for path in sorted(folder.glob("block-*.json")))
    now, leases = time.time(), list[LeasedBlock]()
    for block, lease in found:
        if block is None or lease is None:  # given back in between
            continue
        since, slurm = lease.holder.get("since"), lease.holder.get("slurm")
        leases.append(
            LeasedBlock(
                block=block,
                holder=told(lease.holder),
                slurm={key: str(value) for key, value in slurm.items()} if isinstance(slurm, dict) else {},
                since_seconds=max(0.0, now - since) if isinstance(since, float) else 0.0,
                heartbeat_seconds=max(0.0, now - lease.touched_ns / 1e9),
            )
        )
    return leases
