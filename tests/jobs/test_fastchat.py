"""Ratings and wins are read out of judgments, and answers and judgments have the form that FastChat reads."""

import io
import json
from typing import Any

import pyarrow as pa
import pytest

from jobs.exporting.config import ErrorRows
from jobs.exporting.fastchat import AnswerWriter, JudgmentWriter, parse_game_winner, parse_rating
from tests.jobs.judgments import RATED, table


@pytest.mark.parametrize(
    ("judgment", "rating"),
    [("so [[7]] it is", 7), ("[[7.5]] then [[9]]", 7.5), ("Rating: [8]", 8), ("[3] but [[4]]", 4), ("eight", None)],
)
def test_a_rating_is_the_first_number_in_two_brackets_or_else_in_one(judgment: str, rating: float | None) -> None:
    assert parse_rating(judgment) == rating


def test_the_winner_is_told_apart_from_where_it_stood() -> None:
    assert [parse_game_winner(1, text) for text in ("[[A]]", "[[B]]", "[[C]]", "A")] == [
        "model_1",
        "model_2",
        "tie",
        "error",
    ]
    assert [parse_game_winner(2, text) for text in ("[[A]]", "[[B]]", "[[C]]")] == ["model_2", "model_1", "tie"]


def lines_of(writer: AnswerWriter | JudgmentWriter, found: pa.Table) -> list[dict[str, Any]]:
    file = io.BytesIO()
    writer.write([found], found.schema, file)
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_judgments_have_the_keys_that_fastchat_tabulates() -> None:
    lines = lines_of(JudgmentWriter(judge="j", time=5.0, error_rows=ErrorRows.keep), RATED)
    assert lines[0] == {
        "question_id": 1,
        "model": "good",
        "judge": ["j", "single-v1"],
        "user_prompt": "?",
        "judgment": "[[9]]",
        "score": 9,
        "turn": 1,
        "tstamp": 5.0,
    }
    assert [line["score"] for line in lines] == [9, 7, 5.5, -1, 2, -1]
    pair = table(("mine", 1, 1, "[[A]]", 1), ("mine", 1, 1, "[[C]]", 2), baseline="theirs")
    (line,) = lines_of(JudgmentWriter(judge="j", time=5.0, error_rows=ErrorRows.keep), pair)
    assert line == {
        "question_id": 1,
        "model_1": "mine",
        "model_2": "theirs",
        "g1_winner": "model_1",
        "g2_winner": "tie",
        "judge": ["j", "single-v1"],
        "g1_user_prompt": "?",
        "g1_judgment": "[[A]]",
        "g2_user_prompt": "?",
        "g2_judgment": "[[C]]",
        "turn": 1,
        "tstamp": 5.0,
    }


def test_answers_have_a_choice_for_each_replica_and_all_turns_in_order() -> None:
    said = [("81", 2, "b"), ("81", 1, "a"), ("q", 1, "z"), ("81#1", 1, "c"), ("81#1", 2, None)]
    rows = [
        {"id": id, "sample_index": 0, "status": "ok" if text else "error", "completion": text or "", "turn": turn}
        for id, turn, text in said
    ]
    writer = AnswerWriter(model_id="m", time=5.0, error_rows=ErrorRows.keep)
    lines = lines_of(writer, pa.Table.from_pylist(rows))
    assert [(line["question_id"], line["choices"]) for line in lines] == [
        (81, [{"index": 0, "turns": ["a", "b"]}, {"index": 1, "turns": ["c", "$ERROR$"]}]),
        ("q", [{"index": 0, "turns": ["z"]}]),
    ]
    assert {(line["model_id"], line["tstamp"]) for line in lines} == {("m", 5.0)}
    assert (writer.num_lines, writer.num_errors) == (2, 1)
