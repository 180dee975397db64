"""Answers become prompts for a judge, whatever form they come in."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig, DatasetKind, Row, read_rows
from jobs.exporting.config import ExportConfig, ExportFormat
from jobs.exporting.export import export
from jobs.grading.config import Metric, MetricsConfig
from jobs.grading.judging import grade_judgments
from jobs.run.tasks.generate import generate
from runtime.config.settings import SamplingConfig
from runtime.errors import ConfigError, DatasetError

QUESTIONS: list[dict[str, object]] = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 101, "category": "math", "turns": ["2+2?", "And 3+3?"], "reference": ["4", "6"]},
    {"question_id": 102, "category": "math", "turns": ["5+5?", "And 6+6?"]},
]
# What FastChat's file has, by its names and places; the words are not its own.
TEMPLATES = {
    "single-v1": "Q {question} A {answer}",
    "single-math-v1": "Q {question} R {ref_answer_1} A {answer}",
    "single-v1-multi-turn": "Q {question_1} A {answer_1} Q {question_2} A {answer_2}",
    "single-math-v1-multi-turn": "{question_1} {ref_answer_1} {ref_answer_2} A {answer_1} Q {question_2} A {answer_2}",
    "pair-v2": "Q {question} A {answer_a} B {answer_b}",
    "pair-v2-multi-turn": "{question_1} {question_2} A {answer_a_1} {answer_a_2} B {answer_b_1} {answer_b_2}",
    "pair-math-v1": "R {ref_answer_1} Q {question} A {answer_a} B {answer_b}",
    "pair-math-v1-multi-turn": "R {ref_answer_2} {question_2} A {answer_a_2} B {answer_b_2}",
}


def answer(question: int, *turns: str) -> dict[str, object]:
    return {"question_id": question, "answer_id": "x", "model_id": "m", "choices": [{"index": 0, "turns": turns}]}


def write_lines(path: Path, items: list[dict[str, object]]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    said = [answer(81, "a{1}", "a2"), answer(101, "four", "six"), answer(102, "ten", "$ERROR$")]
    write_lines(tmp_path / "model_answer" / "one.jsonl", said)
    other = [answer(id, "x1", "x2") for id in (81, 101, 102)]
    prompts = [{"name": name, "system_prompt": "Judge.", "prompt_template": text} for name, text in TEMPLATES.items()]
    return {
        "kind": DatasetKind.mtbench_judge,
        "path": write_lines(tmp_path / "question.jsonl", QUESTIONS),
        "answers_path": str(tmp_path / "model_answer"),
        "judge_prompts_path": write_lines(tmp_path / "judge_prompts.jsonl", prompts),
        "other": write_lines(tmp_path / "other.jsonl", other),
    }


def rows_of(files: dict[str, Any], **settings: object) -> dict[str, Row]:
    given = {key: value for key, value in files.items() if key != "other"} | settings
    return {row.id: row for row in read_rows(DatasetConfig(**given))}


def test_each_answer_and_turn_is_put_into_the_prompt_of_its_category(files: dict[str, Any]) -> None:
    rows = rows_of(files)
    assert [(row.id, row.columns["prompt_name"], row.columns["user_prompt"]) for row in rows.values()] == [
        ("one/81/1", "single-v1", "Q Write. A a{1}"),
        ("one/81/2", "single-v1-multi-turn", "Q Write. A a{1} Q Again. A a2"),
        ("one/101/1", "single-math-v1", "Q 2+2? R 4 A four"),
        ("one/101/2", "single-math-v1-multi-turn", "2+2? 4 6 A four Q And 3+3? A six"),
        ("one/102/1", "single-v1", "Q 5+5? A ten"),  # it has no reference
        ("one/102/2", "single-v1-multi-turn", None),
    ]
    assert rows["one/81/1"].prompt == "Judge.\n\nQ Write. A a{1}"
    assert "turn 2 of question 102 has no answer" in str(rows["one/102/2"].error)
    chat = rows_of(files, chat_template=True)["one/81/1"]
    assert chat.messages == [
        {"role": "system", "content": "Judge."},
        {"role": "user", "content": "Q Write. A a{1}"},
    ]


def test_references_of_a_file_come_before_those_of_the_questions(files: dict[str, Any], tmp_path: Path) -> None:
    given = write_lines(tmp_path / "gpt-4.jsonl", [answer(101, "R1", "R2"), answer(102, "S1", "S2")])
    rows = rows_of(files, references_path=given)
    assert rows["one/101/1"].columns["user_prompt"] == "Q 2+2? R R1 A four"
    assert rows["one/102/1"].columns["user_prompt"] == "Q 5+5? R S1 A ten"


def test_a_pair_is_shown_in_both_orders(files: dict[str, Any]) -> None:
    rows = rows_of(files, baseline_path=files["other"])
    assert [rows[f"one/81/1/{game}"].columns["user_prompt"] for game in (1, 2)] == [
        "Q Write. A a{1} B x1",
        "Q Write. A x1 B a{1}",
    ]
    assert rows["one/101/2/2"].columns["user_prompt"] == "R 6 And 3+3? A x2 B six"
    assert {row.columns["baseline"] for row in rows.values()} == {"other"}


def test_our_own_prompts_have_a_place_for_everything(files: dict[str, Any]) -> None:
    for baseline in (None, files["other"]):
        for row in rows_of(files, judge_prompts_path=None, baseline_path=baseline).values():
            text = row.columns["user_prompt"]
            assert row.error or (isinstance(text, str) and "{" not in text.replace("a{1}", ""))
    assert "4" in str(rows_of(files, judge_prompts_path=None)["one/101/1"].columns["user_prompt"])


def test_what_cannot_be_judged_is_named(files: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="has no answer to any question"):
        rows_of(files, answers_path=write_lines(tmp_path / "none.jsonl", [answer(1, "x")]))
    with pytest.raises(DatasetError, match="no choices with turns"):
        rows_of(files, answers_path=write_lines(tmp_path / "bad.jsonl", [{"question_id": 81}]))
    odd = [{"name": "single-v1", "system_prompt": "", "prompt_template": "{solution}"}]
    with pytest.raises(DatasetError, match=r"single-v1 has an unknown field \{solution\}"):
        rows_of(files, judge_prompts_path=write_lines(tmp_path / "odd.jsonl", odd))
    few = [{"name": "single-v1", "system_prompt": "", "prompt_template": "{question}"}]
    with pytest.raises(DatasetError, match="has no prompt single-v1-multi-turn"):
        rows_of(files, judge_prompts_path=write_lines(tmp_path / "few.jsonl", few))


def test_answers_of_a_run_are_judged_from_its_directory_as_from_fastchats_file(
    files: dict[str, Any], tmp_path: Path
) -> None:
    asked = DatasetConfig(kind=DatasetKind.mtbench, path=files["path"])
    config = GenerateConfig(
        dataset=asked, output_root=str(tmp_path), run="mine", sampling=SamplingConfig(max_new_tokens=4)
    )
    run = str(generate(config, lambda: False).directory)
    out = tmp_path / "written" / "mine.jsonl"
    for _ in range(2):
        before = out.read_bytes() if out.exists() else None
        export(ExportConfig(run=run, out=str(out), format=ExportFormat.fastchat))
    assert out.read_bytes() == before
    rows = [
        [(row.id, row.columns["user_prompt"]) for row in rows_of(files, answers_path=place).values()]
        for place in (run, str(out))
    ]
    assert rows[0] == rows[1]
    assert [id for id, _ in rows[0]] == ["mine/81/1", "mine/101/1", "mine/102/1"]
    with pytest.raises(ConfigError, match="ratings are read from runs of dataset=mtbench_judge"):
        grade_judgments(MetricsConfig(run=run, metric=Metric.judge))
    Path(run, "_SUCCESS.json").unlink()
    with pytest.raises(DatasetError, match="is not finished"):
        rows_of(files, answers_path=run)
