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
    rating or verdict; errors are counted separately."""

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
        """Mean of each turn; with several turns also the mean of all, under key 0, resampled by question."""
        by_turn = dict(sorted(self.values[model].items()))
        found = {turn: estimate_groups([[value] for value in values.values()]) for turn, values in by_turn.items()}
        if len(by_turn) > 1:
            questions: dict[str, list[float]] = defaultdict(list)
            for values in by_turn.values():
                for question, value in values.items():
                    questions[question].append(value)
            found[ALL_TURNS] = estimate_groups(list(questions.values()))
        return found


def grade_judgments(config: MetricsConfig) -> JudgingResult:
    """Reads the run's judgments and writes the scores. Raises as `grade` does."""
    shards = require_complete_run(config)
    tables = list(read_tables(shards, partial=config.partial))
    for table in tables[:1]:
        require_judge_columns(table.schema, shards[0])
    found = read_judgments(tables)
    if not found.values:
        raise ConfigError(
            f"run={','.join(config.runs)}: no judgment has a rating: "
            f"{format_count(found.num_errors, 'row')} with an error, "
            f"{format_count(found.num_unparsed, 'judgment')} without the number or the letter that was asked for; "
            "sampling.max_new_tokens may have been too few"
        )
    found.out = write_scores(config, shards, found.rows)
    return found


def read_judgments(tables: Iterable[pa.Table]) -> JudgingResult:
    """Collects the judgments of these tables; the two games of a pair may be in different tables."""
    found, pairs = JudgingResult(), defaultdict[tuple[str, str, int], dict[int, RowValues]](dict)
    for row in iter_rows(tables):
        if row["baseline"] is not None:
            found.baseline = row["baseline"]
            pairs[row["model"], str(row["question_id"]), row["turn"]][row["game"]] = row
            continue
        rating = parse_rating(row["completion"]) if row["status"] == "ok" else None
        found.num_errors += row["status"] != "ok"
        found.num_unparsed += row["status"] == "ok" and rating is None
        found.rows.append(
            _identity_columns(row) | {"status": row["status"], "rating": None if rating is None else float(rating)}
        )
        if rating is not None:
            found.values[row["model"]][row["turn"]][str(row["question_id"])] = float(rating)
    for (model, question, turn), by_game in pairs.items():
        games = [by_game[game] for game in sorted(by_game)]
        is_ok = len(games) == 2 and all(row["status"] == "ok" for row in games)
        winners = [parse_game_winner(row["game"], judgment_text(row)) for row in games]
        is_read = is_ok and "error" not in winners
        found.num_errors += not is_ok
        found.num_unparsed += is_ok and not is_read
        # The winner is who won in both orders; where they differ it is a tie (Zheng et al., arXiv 2306.05685).
        winner = (winners[0] if len(set(winners)) == 1 else "tie") if is_read else None
        found.rows.append(_identity_columns(games[0]) | {"status": "ok" if is_ok else "error", "winner": winner})
        if winner is not None:
            found.values[model][turn][question] = POINTS[winner]
            found.outcomes[model][winner] += 1
    return found


def _identity_columns(row: RowValues) -> dict[str, object]:
    question = {"question_id": str(row["question_id"]), "category": row.get("category")}
    return {"model": row["model"], "baseline": row["baseline"], "turn": row["turn"], **question}


def format_judging(found: JudgingResult) -> list[str]:
    """Summary lines: one per model and turn, the best model first."""
    estimates = {model: found.estimates(model) for model in found.values}
    overall = {model: of.get(ALL_TURNS) or next(iter(of.values())) for model, of in estimates.items()}
    lines, form = list[str](), ".2f" if found.baseline is None else ".1%"
    for model in sorted(estimates, key=lambda model: (-(overall[model].mean or 0.0), model)):
        for turn, each in estimates[model].items():
            name = f"turn {turn}" if turn != ALL_TURNS else "all turns"
            mean, low, high = (f"{value:{form}}" for value in (each.mean, each.low, each.high) if value is not None)
            interval = f"(95% interval {low} to {high}, {format_count(each.num_rows, 'judgment')})"
            lines.append(f"{model:<24} {name:<10} {mean} {interval}")
        if found.baseline is not None:
            won = found.outcomes[model]
            lines.append(f"  beside {found.baseline}: {won['model_1']} won, {won['tie']} tied, {won['model_2']} lost")
    counts = [f"{found.num_errors:,} with an error"] if found.num_errors else []
    counts += [f"{found.num_unparsed:,} without what was asked for"] if found.num_unparsed else []
    judgments = format_count(len(found.rows), "judgment")
    left_out = f", left out: {' and '.join(counts)}" if counts else ""
    return [*lines, f"{judgments}{left_out}", *([f"by question: {found.out}"] if found.out else [])]
