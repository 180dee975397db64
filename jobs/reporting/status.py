"""Progress of runs, evaluations and batches, from the names of parts, the plan and leases; speed of workers, from the
passes of recent parts. Reads no rows, so it is fast for large runs."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from runtime.units import format_count, format_rounded

from ..files.locks import format_holder
from ..files.publishing import PARQUET_PROBLEMS, JsonValue, read_regular_file
from ..record.run_reader import RunReader, is_locked
from ..record.unfinished import LeasedBlock, format_slurm_ids, leased_blocks
from .directories import EvaluationDirectory, Found, ServerDirectory, TaskMetric
from .text_tables import METRIC_HEAD, format_columns, metric_cells

log = logging.getLogger(__name__)
NUM_RECENT_PARTS, NUM_PACE_PARTS = 100, 20  # last parts for the speeds of workers, and for that of a run without leases


@dataclass(kw_only=True)
class WorkerRate:
    """The work of one process in recent parts. `num_rows`: rows of parts, divided among processes by the seconds of
    their passes."""

    holder: Mapping[str, JsonValue]
    num_parts: int = 0
    num_rows: float = 0.0
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def rows_per_second(self) -> float:
        return self.num_rows / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def is_holder(self, holder: Mapping[str, JsonValue]) -> bool:
        """True if a lease names this process."""
        return bool(self.holder) and all(holder.get(key) == value for key, value in self.holder.items())


def worker_rates(run: RunReader, rows_by_block: Mapping[int, int]) -> list[WorkerRate]:
    """The work of each process in recent parts, the fastest first. Skips unreadable parts with a warning."""
    last = sorted((path.stat().st_mtime, block) for block, path in run.parts.items() if block in rows_by_block)
    rates: dict[str, WorkerRate] = {}
    for _, block in last[-NUM_RECENT_PARTS:]:
        path = run.directory.throughput_part(block)
        try:
            with pq.ParquetFile(pa.BufferReader(read_regular_file(path)[0])) as file:
                passes = file.read(["worker", "seconds", "useful_tokens"]).to_pylist()
        except PARQUET_PROBLEMS as error:
            log.warning("rates without %s: %s", path, error)
            continue
        seconds = sum(row["seconds"] for row in passes)
        for name in {row["worker"] for row in passes}:
            own = [row for row in passes if row["worker"] == name]
            own_seconds = sum(row["seconds"] for row in own)
            rate = rates.setdefault(name, WorkerRate(holder=_parse_holder(name)))
            rate.num_parts += 1
            rate.num_rows += rows_by_block[block] * own_seconds / seconds if seconds else 0.0
            rate.num_tokens += sum(row["useful_tokens"] for row in own)
            rate.seconds += own_seconds
    return sorted(rates.values(), key=lambda rate: -rate.rows_per_second)


def _parse_holder(text: str) -> Mapping[str, JsonValue]:
    """Parses a value of the column `worker`. Empty if it is damaged, which is harmless."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """A worker. `rate`: its speed; None before its first part. `leased`: its block; None if it waits or has ended."""

    holder: Mapping[str, JsonValue]
    rate: WorkerRate | None
    leased: LeasedBlock | None

    def __str__(self) -> str:
        ids, rate, leased = self.holder.get("slurm"), self.rate, self.leased
        slurm_ids = {key: str(value) for key, value in ids.items()} if isinstance(ids, dict) else {}
        name = format_holder(self.holder) + format_slurm_ids(slurm_ids)
        texts = ["no part yet"]
        if rate is not None:
            texts = [format_count(rate.num_parts, "part"), f"{rate.rows_per_second:.3g} rows/s"]
            texts += [f"{rate.tokens_per_second:.3g} tokens/s"] if rate.num_tokens else []
        if leased is not None:
            age, heartbeat = format_rounded(leased.since_seconds), format_rounded(leased.heartbeat_seconds)
            texts.append(f"on block {leased.block} for {age}, last heartbeat {heartbeat} ago")
        return f"  {name}: {', '.join(texts)}"

    def to_plain(self) -> dict[str, object]:
        """The worker as JSON values."""
        return {
            "holder": format_holder(self.holder),
            "slurm": self.holder.get("slurm", {}),
            "block": self.leased.block if self.leased is not None else None,
            "num_parts": self.rate.num_parts if self.rate is not None else 0,
            "rows_per_second": self.rate.rows_per_second if self.rate is not None else None,
            "tokens_per_second": self.rate.tokens_per_second if self.rate is not None else None,
        }


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run.

    - `state`: done, running or interrupted; for a run in an object store, where workers are unknown, done or unfinished
    - `num_blocks`, `num_rows`: planned; None without a plan
    - `rows_per_second`: of the active workers or, without leases, of the last parts; None with too few parts, and in an
      object store
    - `num_windows`: parts of a large input, which are planned one after the other
    """

    run: str
    state: str
    num_blocks: int | None
    num_blocks_done: int
    num_rows: int | None
    num_rows_done: int
    rows_per_second: float | None
    leased: Sequence[LeasedBlock]
    workers: Sequence[WorkerStatus]
    num_windows: int = 1
    num_windows_planned: int = 1

    @property
    def seconds_left(self) -> float | None:
        """The remaining seconds at `rows_per_second`; None if the run is not running. Windows without a plan are
        assumed to be as large as the planned ones."""
        if self.state != "running" or not self.rows_per_second or self.num_rows is None:
            return None
        num_rows = self.num_rows * self.num_windows / max(1, self.num_windows_planned)
        return (num_rows - self.num_rows_done) / self.rows_per_second


def read_status(run: RunReader) -> RunStatus:
    """The status of a run. Raises DamagedRunError if the plan cannot be read."""
    rows = run.rows_by_block
    done = {block: path for block, path in run.parts.items() if block in rows}
    is_running, is_local = is_locked(run.directory.lock), run.url is None
    num_planned = len(run.directory.plans)
    is_done = run.directory.success.exists() and len(done) == len(rows) and num_planned == run.num_windows
    leased = leased_blocks(run.directory.leases) if is_running else []
    rates = worker_rates(run, rows)
    holder_rates = [next((rate for rate in rates if rate.is_holder(block.holder)), None) for block in leased]
    active = [
        WorkerStatus(holder=block.holder, rate=rate, leased=block)
        for block, rate in zip(leased, holder_rates, strict=True)
    ]
    active_rates = [rate for rate in holder_rates if rate is not None]
    ended = [WorkerStatus(holder=rate.holder, rate=rate, leased=None) for rate in rates if rate not in active_rates]
    # An active worker without a part is assumed to be as fast as the mean of the other ones.
    speeds = [rate.rows_per_second for rate in active_rates or rates]
    workers_speed = len(leased) * sum(speeds) / len(speeds) if speeds else None
    last = sorted((path.stat().st_mtime, rows[block]) for block, path in done.items())[-NUM_PACE_PARTS:]
    pace = None  # rows per second between the first and the last of these parts
    if len(last) > 1 and last[-1][0] > last[0][0]:
        pace = sum(num_rows for _, num_rows in last[1:]) / (last[-1][0] - last[0][0])
    return RunStatus(
        run=run.location,
        state="running" if is_running else "done" if is_done else "interrupted" if is_local else "unfinished",
        num_blocks=len(rows) or None,
        num_blocks_done=len(done),
        num_rows=sum(rows.values()) or None,
        num_rows_done=sum(rows[block] for block in done),
        rows_per_second=(workers_speed or pace) if is_local else None,
        leased=leased,
        workers=active + ended,
        num_windows=run.num_windows,
        num_windows_planned=num_planned,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationStatus:
    """Status of an evaluation. `state`: done, running or interrupted. `metrics`: empty before the end."""

    evaluation: str
    state: str
    model: str
    tasks: Sequence[str]
    runs: Sequence[RunStatus]
    metrics: Sequence[TaskMetric]


@dataclass(frozen=True, kw_only=True)
class BatchStatus:
    """Status of a batch. `state`: of OpenAI's API. `problem`: the message of a failed batch. `run`: None before it has
    started."""

    batch: str
    state: str
    num_requests: int | None
    problem: str | None
    run: RunStatus | None


@dataclass(frozen=True, kw_only=True)
class ServerStatus:
    server: str
    batches: Sequence[BatchStatus]


AnyStatus: TypeAlias = RunStatus | EvaluationStatus | ServerStatus


def read_statuses(found: Found) -> list[AnyStatus]:
    """The status of each run, evaluation and server. Raises DamagedRunError if a plan cannot be read."""
    return [
        *map(read_status, found.runs),
        *map(_read_evaluation, found.evaluations),
        *map(_read_server, found.servers),
    ]


def _read_evaluation(directory: EvaluationDirectory) -> EvaluationStatus:
    return EvaluationStatus(
        evaluation=str(directory.path),
        state=directory.state,
        model=directory.model,
        tasks=directory.tasks,
        runs=[read_status(run) for run in directory.runs],
        metrics=directory.metrics,
    )


def _read_server(directory: ServerDirectory) -> ServerStatus:
    batches = [
        BatchStatus(
            batch=batch.id,
            state=batch.status,
            num_requests=batch.total,
            problem=batch.problem,
            run=None if batch.run is None else read_status(batch.run),
        )
        for batch in directory.batches
    ]
    return ServerStatus(server=str(directory.path), batches=batches)


def format_text(statuses: Sequence[AnyStatus]) -> str:
    """Formats the progress of each run and a line for each of its workers; those of an evaluation with its metrics; a
    line for each batch, and the progress of unfinished ones."""
    return "\n\n".join("\n".join(_format_any(status)) for status in statuses)


def format_json(statuses: Sequence[AnyStatus]) -> str:
    """Formats a JSON list with an object for each run, evaluation and server."""
    return json.dumps([_to_plain_any(status) for status in statuses], indent=2)


def _format_any(status: AnyStatus) -> list[str]:
    if isinstance(status, RunStatus):
        return _format_lines(status)
    return _format_evaluation(status) if isinstance(status, EvaluationStatus) else _format_server(status)


def _format_evaluation(status: EvaluationStatus) -> list[str]:
    lines = [
        f"{status.evaluation}: {status.state}",
        f"model   {status.model}",
        f"tasks   {', '.join(status.tasks) or 'unknown'}",
    ]
    if status.metrics:
        lines += ["", *format_columns(METRIC_HEAD, [metric_cells(metric) for metric in status.metrics])]
    for run in status.runs:
        lines += ["", *_format_lines(run)]
    if not status.runs:
        lines.append("no run yet")
    return lines


def _format_server(status: ServerStatus) -> list[str]:
    counts = Counter(batch.state for batch in status.batches)
    states = ", ".join(f"{number:,} {state}" for state, number in counts.items())
    lines = [f"{status.server}: {len(status.batches):,} batch{'es' if len(status.batches) != 1 else ''}: {states}"]
    rows = [
        [batch.batch, batch.state, _format_progress(batch), "-" if batch.run is None else batch.run.run]
        for batch in status.batches
    ]
    lines += format_columns(("batch", "status", "rows", "run"), rows)
    for batch in status.batches:
        if batch.problem is not None:
            lines += ["", f"{batch.batch} failed: {batch.problem}"]
        elif batch.run is not None and batch.run.state != "done":
            lines += ["", *_format_lines(batch.run)]
    return lines


def _format_progress(batch: BatchStatus) -> str:
    done = batch.run.num_rows_done if batch.run is not None else 0
    return f"{done:,}" if batch.num_requests is None else f"{done:,} of {batch.num_requests:,}"


def _to_plain_any(status: AnyStatus) -> dict[str, object]:
    if isinstance(status, RunStatus):
        return _to_plain(status)
    if isinstance(status, EvaluationStatus):
        metrics, runs = [asdict(metric) for metric in status.metrics], [_to_plain(run) for run in status.runs]
        return {**vars(status), "runs": runs, "metrics": metrics}
    batches = [{**vars(batch), "run": None if batch.run is None else _to_plain(batch.run)} for batch in status.batches]
    return {**vars(status), "batches": batches}


def _to_plain(status: RunStatus) -> dict[str, object]:
    leased = [{**asdict(block), "holder": format_holder(block.holder), "slurm": block.slurm} for block in status.leased]
    workers = [worker.to_plain() for worker in status.workers]
    return {**vars(status), "leased": leased, "workers": workers, "seconds_left": status.seconds_left}


def _format_lines(status: RunStatus) -> list[str]:
    if status.num_blocks is None or status.num_rows is None:
        return [f"{status.run}: {status.state}, no plan yet"]
    left = status.num_blocks - status.num_blocks_done - len(status.leased)
    lines = [
        f"{status.run}: {status.state}",
        f"rows    {status.num_rows_done:,} of {status.num_rows:,}",
        f"blocks  {status.num_blocks_done:,} of {status.num_blocks:,} done, {len(status.leased)} leased, {left:,} left",
    ]
    if status.num_windows > 1:
        planned = f"{status.num_windows_planned:,} of {status.num_windows:,}"
        lines.append(f"windows {planned} planned: the rows above are those of planned windows")
    if status.seconds_left is not None and status.rows_per_second is not None:
        by = f" with {format_count(len(status.leased), 'worker')}" if status.leased else ""
        left_text = format_rounded(status.seconds_left)
        lines.append(f"pace    {status.rows_per_second:.3g} rows/s, about {left_text} left{by}")
    if status.workers:
        lines.append("workers, from recent parts:")
    return lines + [str(worker) for worker in status.workers]
