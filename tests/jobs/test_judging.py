"""Judgments become means by model and turn, and wins beside a baseline."""

import pyarrow as pa
import pytest

from jobs.grading.intervals import bootstrap_interval, estimate_groups
from jobs.grading.judging import format_judging, read_judgments
from tests.jobs.judgments import RATED, table


def test_ratings_are_averaged_by_model_and_turn_and_what_has_none_is_counted() -> None:
    found = read_judgments([RATED])
    means = {model: {turn: each.mean for turn, each in found.estimates(model).items()} for model in found.values}
    assert means == {"good": {1: 8.0, 2: 5.5, 0: (9 + 7 + 5.5) / 3}, "bad": {1: 2.0}}
    assert (found.num_errors, found.num_unparsed) == (1, 1)
    lines = format_judging(found)
    assert [line.split()[:3] for line in lines[:4]] == [
        ["good", "turn", "1"],
        ["good", "turn", "2"],
        ["good", "all", "turns"],
        ["bad", "turn", "1"],
    ]
    assert lines[-1] == "6 judgments, left out: 1 with an error and 1 without a rating or verdict"


def test_a_pair_is_won_by_who_wins_in_both_orders() -> None:
    games = table(
        ("mine", 1, 1, "[[A]]", 1),
        ("mine", 1, 1, "[[B]]", 2),  # won
        ("mine", 2, 1, "[[A]]", 1),
        ("mine", 2, 1, "[[A]]", 2),  # whoever came first: a tie
        ("mine", 3, 1, "[[B]]", 1),
        ("mine", 3, 1, "[[A]]", 2),  # lost
        ("mine", 4, 1, "[[B]]", 1),
        ("mine", 4, 1, "neither", 2),
        baseline="theirs",
    )
    found = read_judgments([games.slice(4), games.slice(0, 4)])  # parts in any order
    assert found.outcomes["mine"] == {"model_1": 1, "tie": 1, "model_2": 1}
    assert found.estimates("mine")[1].mean == 0.5
    assert found.num_unparsed == 1
    assert "against theirs: 1 won, 1 tied, 1 lost" in format_judging(found)[1]


def test_an_interval_of_groups_of_one_is_that_of_their_values() -> None:
    values = [3.0, 5.0, 5.5, 9.0, 2.0]
    alone = estimate_groups([[value] for value in values])
    assert (alone.low, alone.high) == pytest.approx(bootstrap_interval(pa.array(values).to_numpy()))
    twice = estimate_groups([[value, value] for value in values])
    assert (twice.low, twice.high, twice.num_rows) == (alone.low, alone.high, 10)  # no more is known by repeating it
