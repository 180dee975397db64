"""Sends a run that is over to trackers."""

import secrets
from collections.abc import Iterator, Sequence

import pyarrow.parquet as pq

from runtime.errors import ConfigError, OutputError

from ..files.publishing import PARQUET_PROBLEMS
from ..record.passes import PassRow
from ..record.run_reader import Condition, RunReader
from .curves import Curves
from .reporter import describe
from .trackers import TRACKERS, TrackedRun


def send_run(run: RunReader, names: Sequence[str]) -> Iterator[str]:
    """Sends curves, sums and settings to each tracker, as a new run there. Yields where it is. Raises ConfigError,
    DamagedRunError, and OutputError for a tracker that fails."""
    if not names:
        return
    if run.condition in (Condition.running, Condition.damaged):
        reason = "is running: send it once it has ended" if run.problem is None else f"is damaged: {run.problem}"
        raise ConfigError(f"track: {run.location} {reason}")
    events = run.path / "tensorboard"
    if "tensorboard" in names and events.exists():
        raise ConfigError(f"track=tensorboard: {events} exists, the run was tracked: delete it to write it again")
    passes, num_errors = _timed_passes(run), _errors_by_block(run)
    first = min((row.started_at for _, _, row in passes), default=0.0)
    tracked = TrackedRun(directory=run.path, id=secrets.token_hex(6), started_at=first)
    exit_code = (3 if any(num_errors.values()) else 0) if run.condition is Condition.done else 75
    status = {0: "finished", 3: "errors", 75: "interrupted"}[exit_code]
    for name in names:
        try:
            tracker = TRACKERS[name](tracked)
            for at, values in _points(run, passes, num_errors):
                tracker.log(values, at)
            tracker.finish(status, exit_code)
        except Exception as error:  # packages raise what they like
            raise OutputError(f"track={name}: {describe(error)}. The run is not affected") from error
        yield f"track={name}: {tracker.location}"


def _timed_passes(run: RunReader) -> list[tuple[float, int, PassRow]]:
    """End of each pass in Unix seconds, its block, and the pass, in order of time."""
    try:
        passes = [(block, row) for block in run.parts for row in run.read_passes(block)]
    except PARQUET_PROBLEMS as error:
        raise ConfigError(f"track: the passes of {run.location} cannot be read: {error}") from error
    timed = [(row.started_at + row.since_start_seconds, block, row) for block, row in passes]
    return sorted(timed, key=lambda item: item[:2])


def _errors_by_block(run: RunReader) -> dict[int, int]:
    """Number of bad rows of each committed block."""
    tables = {block: pq.read_table(path, columns=["status"]) for block, path in run.parts.items()}
    return {block: table["status"].to_pylist().count("error") for block, table in tables.items()}


def _points(
    run: RunReader, passes: Sequence[tuple[float, int, PassRow]], num_errors: dict[int, int]
) -> Iterator[tuple[float, dict[str, float]]]:
    """Points of the curves. Rows count as done at the last pass of their block."""
    curves, rows = Curves(), run.rows_by_block
    curves.num_rows = sum(rows.values())
    last_pass = {block: index for index, (_, block, _) in enumerate(passes)}
    for block in num_errors.keys() - last_pass.keys():  # only of rows that no pass computed
        curves.num_done, curves.num_errors = curves.num_done + rows[block], curves.num_errors + num_errors[block]
    for index, (at, block, row) in enumerate(passes):
        curves.add(row)
        if last_pass[block] == index:
            curves.num_done += rows[block]
            curves.num_errors += num_errors[block]
        if curves.is_due(at) or index == len(passes) - 1:
            yield at, curves.take_point(at)
