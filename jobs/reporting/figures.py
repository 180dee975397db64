"""The figures (numbers) of a run, finished or not, from its parts, plan and summary."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow.parquet as pq

from runtime.errors import DamagedRunError

from ..files.publishing import PARQUET_PROBLEMS, JsonValue, read_json
from ..record.passes import PassRow
from ..record.run_dir import EVALUATION_NAME
from ..record.run_reader import Condition, RunReader
from ..record.summary import Summary, summarize

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """The figures of one run. Damaged files are left out with a warning."""

    run: RunReader

    @property
    def name(self) -> str:
        path = self.run.path
        return f"{path.parent.name}/{path.name}" if self.is_nested else path.name

    @property
    def is_nested(self) -> bool:
        """True for a turn of a chat, and for a run of an evaluation. These are subdirectories of one directory, whose
        name tells them from other runs."""
        return self.run.num_turns > 1 or (self.run.path.parent / EVALUATION_NAME).is_file()

    @cached_property
    def passes(self) -> Sequence[PassRow]:
        """The recorded passes, in order of execution."""
        rows: list[PassRow] = []
        for block in sorted(self.run.parts):
            try:
                rows += self.run.read_passes(block)
            except PARQUET_PROBLEMS as error:
                path = self.run.directory.throughput_part(block)
                log.warning("figures without the passes of block %d: cannot read %s: %s", block, path, error)
        return rows

    @cached_property
    def statuses(self) -> Mapping[str, int]:
        """The number of rows by status."""
        counts: Counter[str] = Counter()
        for path in self.run.parts.values():
            try:
                counts.update(pq.read_table(path, columns=["status"])["status"].to_pylist())
            except PARQUET_PROBLEMS as error:
                log.warning("figures without the rows of %s: %s", path, error)
        return counts

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.passes, rows={"ok": self.statuses.get("ok", 0), "error": self.num_errors})

    @property
    def num_errors(self) -> int:
        return self.statuses.get("error", 0)

    @property
    def num_done(self) -> int:
        return sum(self.statuses.values())

    @property
    def num_rows(self) -> int | None:
        """The number of planned rows; None if there is no plan, or if it is damaged."""
        try:
            return self.run.num_rows
        except DamagedRunError:
            return None

    @property
    def seconds(self) -> float:
        """The summed time of all passes. Excludes time between passes, and the time to start processes."""
        return sum(row.seconds for row in self.passes)

    @property
    def elapsed_seconds(self) -> float | None:
        """The wall-clock time of all processes; None before the end of the first pass."""
        return self.summary.elapsed.seconds if self.summary.elapsed is not None else None

    @property
    def rows_per_minute(self) -> float | None:
        return 60 * self.num_done / self.seconds if self.seconds else None

    @cached_property
    def recorded_summary(self) -> Mapping[str, JsonValue]:
        """The content of summary.json; empty until the run is finished."""
        try:
            return read_json(self.run.directory.summary)
        except (OSError, DamagedRunError):
            return {}

    @property
    def settings(self) -> Mapping[str, JsonValue]:
        return {**self.run.operational, **self.run.semantic}

    @property
    def state(self) -> str:
        """The condition of the run, with progress if it is not finished."""
        condition, rows = self.run.condition, self.num_rows
        if condition is Condition.done:
            return condition.value
        if condition is Condition.damaged:
            return f"damaged: {self.run.problem}"
        return condition.value if rows is None else f"{condition.value}, {self.num_done:,} of {rows:,} rows"
