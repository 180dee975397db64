"""What a judge made of answers: ratings by model and turn, or who won beside a baseline, with intervals."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from runtime.errors import ConfigError
from runtime.units import counted

from ..exporting.fastchat import RowValues, judgment_of, rating_of, require_judged, rows_of, winner_of_game
from .config import MetricsConfig
from .grading import complete_run, tables_of, written
from .intervals import Estimate, estimate_of_groups

POINTS = {"model_1": 1.0, "tie": 0.5, "model_2": 0.0}  # of a pair; the first is the one that is judged
ALL_TURNS = 0


@dataclass(kw_only=True)
class Judged:
    """`values`: ratings, or points of pairs, by model and turn, and of those by question. `num_unread`: judgments
    without a rating or a winner; errors count apart."""

    out: Path | None = None
    rows: list[dict[str, object]] = field(default_factory=list)
    values: dict[str, dict[int, dict[str, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    baseline: str | None = None
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    num_errors: int = 0
    num_unread: int = 0

    def estimates(self, model: str) -> dict[int, Estimate]:
        """The mean of each turn, and under 0 that of all values of several turns, drawn by question."""
        by_turn = dict(sorted(self.values[model].items()))
        found = {turn: estimate_of_groups([[value] for value in values.values()]) for turn, values in by_turn.items()}
        if len(by_turn) > 1:
            questions: dict[str, list[float]] = defaultdict(list)
            for values in by_turn.values():
                for question, value in values.items():
                    questions[question].append(value)
            found[ALL_TURNS] = estimate_of_groups(list(questions.values()))
        return found


def judged(config: MetricsConfig) -> Judged:
    """Reads the judgments of the run and writes what they come to. Raises as `grade` does."""
    shards = complete_run(config)
    tables = list(tables_of(shards, partial=config.partial))
    for table in tables[:1]:
        require_judged(table.schema, shards[0])
    found = judged_tables(tables)
    if not found.values:
        raise ConfigError(
            f"run={','.join(config.runs)}: no judgment has a rating: {counted(found.num_errors, 'row')} with an error, "
            f"{counted(found.num_unread, 'judgment')} without the number or the letter that was asked for; "
            "sampling.max_new_tokens may have been too few"
        )
    found.out = written(config, shards, found.rows)
    return found


def judged_tables(tables: Iterable[pa.Table]) -> Judged:
    """The judgments of these parts. The two games of a pair are in any of them."""
    found, pairs = Judged(), defaultdict[tuple[str, str, int], dict[int, RowValues]](dict)
    for row in rows_of(tables):
        if row["baseline"] is None:
            _add_single(found, row)
        else:
            found.baseline = row["baseline"]
            pairs[row["model"], str(row["question_id"]), row["turn"]][row["game"]] = row
    for games in pairs.values():
        _add_pair(found, [games[game] for game in sorted(games)])
    return found


def _add_single(found: Judged, row: RowValues) -> None:
    rating = rating_of(row["completion"]) if row["status"] == "ok" else None
    if row["status"] != "ok":
        found.num_errors += 1
    elif rating is None:
        found.num_unread += 1
    found.rows.append(_about(row) | {"status": row["status"], "rating": None if rating is None else float(rating)})
    if rating is not None:
        found.values[row["model"]][row["turn"]][str(row["question_id"])] = float(rating)


def _add_pair(found: Judged, games: Sequence[RowValues]) -> None:
    """The winner is who won in both orders; where they differ it is a tie (Zheng et al., arXiv 2306.05685)."""
    is_ok = len(games) == 2 and all(row["status"] == "ok" for row in games)
    winners = [winner_of_game(row["game"], judgment_of(row)) for row in games]
    is_read = is_ok and "error" not in winners
    found.num_errors += not is_ok
    found.num_unread += is_ok and not is_read
    winner = (winners[0] if len(set(winners)) == 1 else "tie") if is_read else None
    first = games[0]
    found.rows.append(_about(first) | {"status": "ok" if is_ok else "error", "winner": winner})
    if winner is not None:
        found.values[first["model"]][first["turn"]][str(first["question_id"])] = POINTS[winner]
        found.outcomes[first["model"]][winner] += 1


def _about(row: RowValues) -> dict[str, object]:
    question = {"question_id": str(row["question_id"]), "category": row.get("category")}
    return {"model": row["model"], "baseline": row["baseline"], "turn": row["turn"], **question}


def describe_judged(found: Judged) -> list[str]:
    """What a person reads: a line for each model and turn, the best model first."""
    estimates = {model: found.estimates(model) for model in found.values}
    order = sorted(estimates, key=lambda model: (-_overall(estimates[model]), model))
    lines: list[str] = []
    for model in order:
        for turn, estimate in estimates[model].items():
            name = f"turn {turn}" if turn != ALL_TURNS else "all turns"
            lines.append(f"{model:<24} {name:<10} {_shown(estimate, is_share=found.baseline is not None)}")
        if found.baseline is not None:
            won = found.outcomes[model]
            lines.append(f"  beside {found.baseline}: {won['model_1']} won, {won['tie']} tied, {won['model_2']} lost")
    counts = [f"{found.num_errors:,} with an error"] if found.num_errors else []
    counts += [f"{found.num_unread:,} without what was asked for"] if found.num_unread else []
    judgments = counted(len(found.rows), "judgment")
    left_out = f", left out: {' and '.join(counts)}" if counts else ""
    return [*lines, f"{judgments}{left_out}", *([f"by question: {found.out}"] if found.out else [])]


def _overall(estimates: dict[int, Estimate]) -> float:
    last = estimates.get(ALL_TURNS) or next(iter(estimates.values()))
    return last.mean or 0.0


def _shown(found: Estimate, *, is_share: bool) -> str:
    form = ".1%" if is_share else ".2f"
    mean, low, high = (f"{value:{form}}" for value in (found.mean, found.low, found.high) if value is not None)
    return f"{mean} (95% interval {low} to {high}, {counted(found.num_rows, 'judgment')})"
