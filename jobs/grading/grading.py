"""A finished run beside its references: a Parquet of the scores of each row and sample, and a table of means."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from runtime.errors import ConfigError
from runtime.units import counted

from ..exporting.columns import from_json, is_json
from ..exporting.shards import missing, read_parts, require_one_run
from ..files.named import publish_named, require_replaceable
from ..record.found import FoundRun, find_runs
from .config import Metric, MetricsConfig
from .intervals import Estimate, estimate
from .scores import Score, scorers

OUT = "metrics.parquet"  # in the run's directory, unless the config says otherwise
COLUMNS = ("id", "sample_index", "status", "completion")


@dataclass(kw_only=True)
class Graded:
    """Scores by row. `num_samples`: completions that were compared; errors and rows without a reference count apart."""

    out: Path | None = None
    rows: list[dict[str, object]] = field(default_factory=list)
    scores: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    num_samples: int = 0
    num_errors: int = 0
    num_without_reference: int = 0

    def estimates(self) -> dict[str, Estimate]:
        """The mean of each metric; of several samples of a row the mean is that row's value."""
        return {
            name: estimate([sum(values) / len(values) for values in by_row.values()])
            for name, by_row in self.scores.items()
        }


def grade(config: MetricsConfig) -> Graded:
    """Grades the run and writes the scores. Raises ConfigError for what is missing, DamagedRunError, and OutputError
    with an older file left as it was."""
    score = scorers(config.metrics)
    shards = complete_run(config)
    graded = graded_tables(tables_of(shards, partial=config.partial), config.reference_field, score)
    if not graded.num_samples:
        raise ConfigError(
            f"run={','.join(config.runs)}: no row has both a completion and a reference: "
            f"{counted(graded.num_errors, 'row')} with an error, {counted(graded.num_without_reference, 'row')} "
            f"without a value of reference_field={config.reference_field}"
        )
    graded.out = written(config, shards, graded.rows)
    return graded


def complete_run(config: MetricsConfig) -> list[FoundRun]:
    """The shards of the run. Raises ConfigError where something is missing that is not to be left out, or the file to
    write is somebody's own."""
    if config.out is not None:
        require_replaceable([Path(config.out).expanduser()], f"out={config.out}")
    shards = require_one_run(find_runs(config.runs, "run"))
    lacking = missing(shards)
    if lacking.sentences and not config.partial:
        raise ConfigError(
            f"run={','.join(config.runs)} is not complete: {'; '.join(lacking.sentences)}. The run's own command goes "
            "on with it; partial=true grades what is there"
        )
    return shards


def written(config: MetricsConfig, shards: Sequence[FoundRun], rows: list[dict[str, object]]) -> Path:
    """The file that the scores were written to. Raises OutputError."""
    folder = shards[0].path.parent if shards[0].num_turns > 1 else shards[0].path
    out = Path(config.out).expanduser() if config.out else folder / OUT
    table = pa.Table.from_pylist(rows)
    publish_named(out, lambda file: pq.write_table(table, file))
    return out


def graded_tables(tables: Iterable[pa.Table], reference_field: str, score: Sequence[Score]) -> Graded:
    """The rows of these parts, graded. Raises ConfigError where they lack the column of references."""
    graded = Graded()
    for table in tables:
        column = column_named(table.schema, reference_field)
        if column is None:
            raise ConfigError(
                f"reference_field={reference_field}: no such column among "
                f"{', '.join(named(field) for field in table.schema)}"
            )
        references = [_decoded(value, column) for value in table[column.name].to_pylist()]
        for row, reference in zip(table.select(COLUMNS).to_pylist(), references, strict=True):
            _add(graded, row, reference, score)
    return graded


def column_named(schema: pa.Schema, name: str) -> pa.Field | None:
    """The input's column of that name; parts may have had to call it otherwise."""
    return next((column for column in schema if named(column) == name), None)


def named(column: pa.Field) -> str:
    return (column.metadata or {}).get(b"column", column.name.encode()).decode("utf-8", "surrogatepass")


def _decoded(value: object, column: pa.Field) -> object:
    return from_json(value) if is_json(column) and isinstance(value, str) else value


def tables_of(shards: Sequence[FoundRun], *, partial: bool) -> Iterator[pa.Table]:
    return (table for run in shards for table, _ in read_parts(run, partial=partial))


def _add(graded: Graded, row: Mapping[str, object], reference: object, score: Sequence[Score]) -> None:
    references = [str(each) for each in (reference if isinstance(reference, list) else [reference]) if each is not None]
    values: dict[str, float] = {}
    if row["status"] != "ok":
        graded.num_errors += 1
    elif not references:
        graded.num_without_reference += 1
    else:
        graded.num_samples += 1
        for of_metric in score:
            found = [of_metric(str(row["completion"]), wanted) for wanted in references]
            values |= {name: max(each[name] for each in found) for name in found[0]}
    graded.rows.append({"id": row["id"], "sample_index": row["sample_index"], "status": row["status"], **values})
    for name, value in values.items():
        graded.scores[name][str(row["id"])].append(value)


def describe(graded: Graded) -> list[str]:
    """What a person reads: a line for each metric, and what was not compared."""
    lines = [f"{name:<14} {format_estimate(found)}" for name, found in graded.estimates().items()]
    counts = f"{counted(graded.num_samples, 'completion')} compared"
    if graded.num_errors:
        counts += f", {graded.num_errors:,} with an error left out"
    if graded.num_without_reference:
        counts += f", {graded.num_without_reference:,} without a reference left out"
    return [*lines, counts, *([f"scores by row: {graded.out}"] if graded.out else [])]


def format_estimate(found: Estimate) -> str:
    """The mean and its interval, as `75.0% (95% interval 58.9% to 86.2%, 36 rows)`."""
    if found.mean is None or found.low is None or found.high is None:
        return "-"
    rows = counted(found.num_rows, "row")
    return f"{found.mean:.1%} (95% interval {found.low:.1%} to {found.high:.1%}, {rows})"


def told(generations: Path) -> str:
    """The answers of a run of dataset=tasks, one of each task, and the share of right answers."""
    table = pq.read_table(generations)
    graded = graded_tables([table], "reference", scorers([Metric.exact_match]))
    first_of_task = {row["task"]: row for row in reversed(table.sort_by("row_index").to_pylist())}
    lines = [f"{row['prompt']}{row['completion']}".replace("\n", " ") for row in reversed(first_of_task.values())]
    found = graded.estimates().get("exact_match")
    return "\n".join([*lines, "", f"right answers: {format_estimate(found)}" if found else "nothing to compare"])
