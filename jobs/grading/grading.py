"""Grades a finished run against references: a Parquet file of scores per row and sample, and a table of means.

A score is between 0 and 1. With several references, the best score counts.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from runtime.errors import ConfigError
from runtime.units import format_count

from ..exporting.columns import decode_json, is_json_column
from ..exporting.shards import check_complete, read_parts, require_one_run
from ..files.named import publish_named, require_replaceable
from ..record.run_reader import RunReader, find_runs
from .config import Metric, MetricsConfig
from .intervals import Estimate, estimate

DEFAULT_OUT = "metrics.parquet"  # in the run's directory, unless the config says otherwise
COLUMNS = ("id", "sample_index", "status", "completion")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
MARKED_NUMBER = re.compile(r"####\s*\$?\s*(-?[\d,.]*\d)")
ANSWER_IS = re.compile(r"the answer is:?\s*([^\n]*)", re.IGNORECASE)
ROUGES = ("rouge1", "rouge2", "rougeL")

Scorer: TypeAlias = Callable[[str, str], Mapping[str, float]]  # a completion and a reference: scores by column


@dataclass(kw_only=True)
class GradingResult:
    """Scores by row. `num_samples`: graded completions, without error rows and rows without a reference."""

    out: Path | None = None
    rows: list[dict[str, object]] = field(default_factory=list)
    scores: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    num_samples: int = 0
    num_errors: int = 0
    num_without_reference: int = 0

    def estimates(self) -> dict[str, Estimate]:
        """The mean and interval of each metric; a row's value is the mean over its samples."""
        return {
            name: estimate([sum(values) / len(values) for values in by_row.values()])
            for name, by_row in self.scores.items()
        }


def grade(config: MetricsConfig) -> GradingResult:
    """Grades the run and writes the scores. Raises ConfigError if the run, a column or an extra is missing,
    DamagedRunError, or OutputError. After an error, an existing file of scores is unchanged."""
    scorers = make_scorers(config.metrics)
    shards = require_complete_run(config)
    graded = grade_tables(read_tables(shards, partial=config.partial), config.reference_field, scorers)
    if not graded.num_samples:
        raise ConfigError(
            f"run={','.join(config.runs)}: no row has both a completion and a reference: "
            f"{format_count(graded.num_errors, 'row')} with an error, {graded.num_without_reference:,} without "
            f"reference_field={config.reference_field}"
        )
    graded.out = write_scores(config, shards, graded.rows)
    return graded


def require_complete_run(config: MetricsConfig) -> list[RunReader]:
    """Returns the shards of the run. Raises ConfigError if the run is incomplete and not `partial`, or if `out` is a
    file that no job wrote."""
    if config.out is not None:
        require_replaceable([Path(config.out).expanduser()], f"out={config.out}")
    shards = require_one_run(find_runs(config.runs, "run"))
    check_complete(config.runs, shards, partial=config.partial, verb="grades")
    return shards


def write_scores(config: MetricsConfig, shards: Sequence[RunReader], rows: list[dict[str, object]]) -> Path:
    """Writes the scores and returns the file's path. Raises OutputError."""
    folder = shards[0].path.parent if shards[0].num_turns > 1 else shards[0].path  # each turn has a subdirectory
    out = Path(config.out).expanduser() if config.out else folder / DEFAULT_OUT
    table = pa.Table.from_pylist(rows)
    publish_named(out, lambda file: pq.write_table(table, file))
    return out


def grade_tables(tables: Iterable[pa.Table], reference_field: str, scorers: Sequence[Scorer]) -> GradingResult:
    """Grades the rows of these tables. Raises ConfigError if the reference column is missing."""
    graded = GradingResult()
    for table in tables:
        column = find_column(table.schema, reference_field)
        if column is None:
            columns = ", ".join(original_name(field) for field in table.schema)
            raise ConfigError(f"reference_field={reference_field}: no such column; columns: {columns}")
        references = table[column.name].to_pylist()
        if is_json_column(column):
            references = [decode_json(value) if isinstance(value, str) else value for value in references]
        for row, reference in zip(table.select(COLUMNS).to_pylist(), references, strict=True):
            alternatives = reference if isinstance(reference, list) else [reference]
            texts = [str(text) for text in alternatives if text is not None]
            values: dict[str, float] = {}
            if row["status"] != "ok":
                graded.num_errors += 1
            elif not texts:
                graded.num_without_reference += 1
            else:
                graded.num_samples += 1
                for scorer in scorers:
                    scores = [scorer(str(row["completion"]), text) for text in texts]
                    values |= {name: max(score[name] for score in scores) for name in scores[0]}
            identity = {"id": row["id"], "sample_index": row["sample_index"], "status": row["status"]}
            graded.rows.append({**identity, **values})
            for name, value in values.items():
                graded.scores[name][str(row["id"])].append(value)
    return graded


def find_column(schema: pa.Schema, name: str) -> pa.Field | None:
    """Finds a column by its name in the input, which may differ from that in parts. Returns None if there is none."""
    return next((column for column in schema if original_name(column) == name), None)


def original_name(column: pa.Field) -> str:
    return (column.metadata or {}).get(b"column", column.name.encode()).decode("utf-8", "surrogatepass")


def read_tables(shards: Sequence[RunReader], *, partial: bool) -> Iterator[pa.Table]:
    return (table for run in shards for table, _ in read_parts(run, partial=partial))


def format_grading(graded: GradingResult) -> list[str]:
    """Formats a line per metric, then the counts."""
    lines = [f"{name:<14} {format_estimate(mean)}" for name, mean in graded.estimates().items()]
    counts = f"{format_count(graded.num_samples, 'completion')} compared"
    if graded.num_errors:
        counts += f", {graded.num_errors:,} with an error left out"
    if graded.num_without_reference:
        counts += f", {graded.num_without_reference:,} without a reference left out"
    return [*lines, counts, *([f"scores by row: {graded.out}"] if graded.out else [])]


def format_estimate(result: Estimate) -> str:
    """Formats mean and interval: `75.0% (95% interval 58.9% to 86.2%, 36 rows)`."""
    if result.mean is None or result.low is None or result.high is None:
        return "-"
    rows = format_count(result.num_rows, "row")
    return f"{result.mean:.1%} (95% interval {result.low:.1%} to {result.high:.1%}, {rows})"


def format_task_answers(generations: Path) -> str:
    """Formats one answer per task of a run of dataset=tasks, and its accuracy."""
    table = pq.read_table(generations)
    graded = grade_tables([table], "reference", make_scorers([Metric.exact_match]))
    # Reversed twice: the first row of each task, in the order of rows.
    first_rows = {row["task"]: row for row in reversed(table.sort_by("row_index").to_pylist())}
    lines = [f"{row['prompt']}{row['completion']}".replace("\n", " ") for row in reversed(first_rows.values())]
    accuracy = graded.estimates().get("exact_match")
    return "\n".join([*lines, "", f"right answers: {format_estimate(accuracy)}" if accuracy else "nothing to compare"])


def is_exact_match(completion: str, reference: str) -> bool:
    """Compares without surrounding white space, as HELM's quasi-exact tasks and BBH do."""
    return completion.strip() == reference.strip()


def is_gsm8k_match(completion: str, reference: str) -> bool:
    """Compares as numbers: 18 equals 18.00, and 1,000 equals 1000 (Cobbe et al., arXiv 2110.14168)."""
    answer = parse_gsm8k_answer(completion)
    return answer is not None and answer == parse_gsm8k_answer(reference)


def parse_gsm8k_answer(text: str) -> Decimal | None:
    """The number after the first `####`, else the last number; None if there is none."""
    marked = MARKED_NUMBER.search(text)
    numbers = [marked.group(1)] if marked else NUMBER.findall(text)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None


def is_bbh_match(completion: str, reference: str) -> bool:
    """Compares answers without surrounding white space and final period (Suzgun et al., arXiv 2210.09261)."""
    return parse_bbh_answer(completion) == parse_bbh_answer(reference)


def parse_bbh_answer(text: str) -> str:
    """The rest of the line after the first `the answer is`, else the whole text."""
    match = ANSWER_IS.search(text)
    return (match.group(1) if match else text).strip().removesuffix(".").strip()


def make_scorers(metrics: Sequence[Metric]) -> list[Scorer]:
    """Returns a scorer for each metric. Raises ConfigError if an extra is not installed."""
    return [_rouge_scorer() if metric is Metric.rouge else _binary_scorer(metric) for metric in metrics]


def _binary_scorer(metric: Metric) -> Scorer:
    is_right = {Metric.exact_match: is_exact_match, Metric.gsm8k: is_gsm8k_match, Metric.bbh: is_bbh_match}[metric]
    return lambda completion, reference: {metric.value: float(is_right(completion, reference))}


def _rouge_scorer() -> Scorer:
    """Returns a scorer of ROUGE F-measures with stemming, as in HELM."""
    if find_spec("rouge_score") is None:
        raise ConfigError("metric=rouge needs the extra: pip install 'weightstream[eval]'")
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGES, use_stemmer=True)
    return lambda completion, reference: {
        name: float(score.fmeasure) for name, score in scorer.score(reference, completion).items()
    }
