import json
from collections import Counter
from pathlib import Path

import pytest

from jobs.datasets import DatasetConfig, DatasetKind, read_rows
from jobs.datasets.kinds.questions import SAMPLE_PATH
from runtime.errors import DatasetError

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def shared_file(name):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {path}")
    return str(path)


def test_the_sample_is_mt_bench_shaped():
    questions = [json.loads(line) for line in SAMPLE_PATH.read_text(encoding="utf-8").splitlines()]
    assert [question["question_id"] for question in questions] == list(range(1, 41))
    assert set(Counter(question["category"] for question in questions).values()) == {5}
    assert all(len(question["turns"]) == 2 for question in questions)
    assert len({turn for question in questions for turn in question["turns"]}) == 80


def test_the_sample_asks_turn_one_of_every_question():
    rows = read_rows(DatasetConfig(kind=DatasetKind["sample"]))
    assert len(rows) == 40
    assert all(row.error is None and row.messages is None for row in rows)
    assert [row.prompt for row in rows] == [row.columns["turns"][0] for row in rows]  # pyright: ignore
    lengths = [len(row.prompt) for row in rows]
    assert min(lengths) < 30
    assert max(lengths) > 500


@pytest.mark.parametrize("turns", [None, [], "text", [5], [""]])
def test_a_question_without_a_first_turn_is_an_error_row(tmp_path, turns):
    (tmp_path / "q.jsonl").write_text(json.dumps({"question_id": 81, "turns": turns}))
    (row,) = read_rows(DatasetConfig(kind=DatasetKind.mtbench, path=str(tmp_path / "q.jsonl")))
    assert row.id == "81"
    assert (row.error or "").startswith("q.jsonl, line 1, byte 0: ")


def test_a_missing_question_file_names_the_key(tmp_path):
    with pytest.raises(DatasetError, match=r"dataset\.path=.*question\.jsonl does not exist"):
        read_rows(DatasetConfig(kind=DatasetKind.mtbench, path=str(tmp_path / "question.jsonl")))


def test_mt_bench_itself():
    path = shared_file("mt_bench/question.jsonl")
    rows = read_rows(DatasetConfig(kind=DatasetKind.mtbench, path=path, repeat=2))
    assert [row.id for row in rows] == [*map(str, range(81, 161)), *(f"{number}#1" for number in range(81, 161))]
    assert all(row.error is None for row in rows)


@pytest.mark.parametrize(
    ("name", "settings", "num_rows"),
    [
        ("gsm8k/test.jsonl", {"prompt_field": "question"}, 1319),
        ("bbh/date_understanding.json", {"prompt_field": "input", "json_field": "examples"}, 250),
        ("humaneval/HumanEval.jsonl.gz", {"id_field": "task_id"}, 164),
    ],
)
def test_well_known_files_are_read_without_an_error_row(name, settings, num_rows):
    rows = read_rows(DatasetConfig(kind=DatasetKind.jsonl, path=shared_file(name), **settings))
    assert len(rows) == num_rows
    assert all(row.error is None for row in rows)


@pytest.mark.parametrize(("prompt", "why"), [("a\udcff", "lone surrogate"), ("a\0", "NUL character")])
def test_a_prompt_that_no_tokenizer_takes_is_refused_by_its_key(prompt, why):
    with pytest.raises(DatasetError, match=rf"^dataset\.prompt has a {why}"):
        read_rows(DatasetConfig(kind=DatasetKind.prompt, prompt=prompt))
