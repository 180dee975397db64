"""Aggregates a judge's verdicts: mean ratings by model and turn, or win rates against a baseline, with intervals."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from runtime.errors import ConfigError
from runtime.units import format_count

from ..exporting.columns import RowValues, iter_rows
from ..exporting.fastchat import judgment_text, parse_game_winner, parse_rating, require_judge_columns
from .config import MetricsConfig
from .grading import read_tables, require_complete_run, write_scores
from .intervals import Estimate, estimate_groups

POINTS = {"model_1": 1.0, "tie": 0.5, "model_2": 0.0}  # model_1 is the judged model, model_2 the baseline
ALL_TURNS = 0


@dataclass(kw_only=True)
class JudgingResult:
    """Judgments of a run. `values`: rating or points by model, turn and question. `num_unparsed`: judgments without a
    rating or verdict, apart from errors."""

    out: Path | None = None
    rows: list[dict[str, object]] = field(default_factory=list)
    values: dict[str, dict[int, dict[str, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    baseline: str | None = None
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    num_errors: int = 0
    num_unparsed: int = 0

    def estimates(self, model: str) -> dict[int, Estimate]:
        """The mean and interval of each turn. With several turns, key `ALL_TURNS` has all, grouped by question."""
        by_turn = dict(sorted(self.values[model].items()))
        means = {turn: estimate_groups([[value] for value in values.values()]) for turn, values in by_turn.items()}
        if len(by_turn) > 1:
            questions: dict[str, list[float]] = defaultdict(list)
            for values in by_turn.values():
                for question, value in values.items():
                    questions[question].append(value)
            means[ALL_TURNS] = estimate_groups(list(questions.values()))
        return means


def grade_judgments(config: MetricsConfig) -> JudgingResult:
    """Reads the run's judgments and writes the scores. Raises as `grade` does."""
    shards = require_complete_run(config)
    tables = list(read_tables(shards, partial=config.partial))
    for table in tables[:1]:
        require_judge_columns(table.schema, shards[0])
    result = read_judgments(tables)
    if not result.values:
        raise ConfigError(
            f"run={','.join(config.runs)}: no judgment has a rating: {format_count(result.num_errors, 'row')} with an "
            f"error, {format_count(result.num_unparsed, 'judgment')} without a rating or verdict; "
            "sampling.max_new_tokens may be too low"
        )
    result.out = write_scores(config, shards, result.rows)
    return result


def read_judgments(tables: Iterable[pa.Table]) -> JudgingResult:
    """Collects the judgments of these tables; the two games of a pair may be in different tables."""
    result, pairs = JudgingResult(), defaultdict[tuple[str, str, int], dict[int, RowValues]](dict)
    for row in iter_rows(tables):
        if row["baseline"] is not None:
            result.baseline = row["baseline"]
            pairs[row["model"], str(row["question_id"]), row["turn"]][row["game"]] = row
            continue
        rating = parse_rating(row["completion"]) if row["status"] == "ok" else None
        result.num_errors += row["status"] != "ok"
        result.num_unparsed += row["status"] == "ok" and rating is None
        columns = {"status": row["status"], "rating": None if rating is None else float(rating)}
        result.rows.append(_identity_columns(row) | columns)
        if rating is not None:
            result.values[row["model"]][row["turn"]][str(row["question_id"])] = float(rating)
    for (model, question, turn), by_game in pairs.items():
        games = [by_game[game] for game in sorted(by_game)]
        is_ok = len(games) == 2 and all(row["status"] == "ok" for row in games)
        winners = [parse_game_winner(row["game"], judgment_text(row)) for row in games]
        is_parsed = is_ok and "error" not in winners
        result.num_errors += not is_ok
        result.num_unparsed += is_ok and not is_parsed
        # The winner must win in both orders; otherwise it is a tie (Zheng et al., arXiv 2306.05685).
        winner = (winners[0] if len(set(winners)) == 1 else "tie") if is_parsed else None
        result.rows.append(_identity_columns(games[0]) | {"status": "ok" if is_ok else "error", "winner": winner})
        if winner is not None:
            result.values[model][turn][question] = POINTS[winner]
            result.outcomes[model][winner] += 1
    return result


def _identity_columns(row: RowValues) -> dict[str, object]:
    question = {"question_id": str(row["question_id"]), "category": row.get("category")}
    return {"model": row["model"], "baseline": row["baseline"], "turn": row["turn"], **question}


def format_judging(result: JudgingResult) -> list[str]:
    """Formats a line per model and turn, the best model first, then the counts."""
    estimates = {model: result.estimates(model) for model in result.values}
    overall = {model: turns.get(ALL_TURNS) or next(iter(turns.values())) for model, turns in estimates.items()}
    lines, number_format = list[str](), ".2f" if result.baseline is None else ".1%"
    for model in sorted(estimates, key=lambda model: (-(overall[model].mean or 0.0), model)):
        for turn, value in estimates[model].items():
            name = f"turn {turn}" if turn != ALL_TURNS else "all turns"
            numbers = (value.mean, value.low, value.high)
            mean, low, high = (f"{number:{number_format}}" for number in numbers if number is not None)
            interval = f"(95% interval {low} to {high}, {format_count(value.num_rows, 'judgment')})"
            lines.append(f"{model:<24} {name:<10} {mean} {interval}")
        if result.baseline is not None:
            games = result.outcomes[model]
            counts = f"{games['model_1']} won, {games['tie']} tied, {games['model_2']} lost"
            lines.append(f"  against {result.baseline}: {counts}")
    skipped = [f"{result.num_errors:,} with an error"] if result.num_errors else []
    skipped += [f"{result.num_unparsed:,} without a rating or verdict"] if result.num_unparsed else []
    judgments = format_count(len(result.rows), "judgment")
    left_out = f", left out: {' and '.join(skipped)}" if skipped else ""
    return [*lines, f"{judgments}{left_out}", *([f"by question: {result.out}"] if result.out else [])]
