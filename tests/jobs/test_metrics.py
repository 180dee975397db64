"""What completions are worth: by metric, with intervals, over a finished run."""

import json
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.config.settings import GenerateConfig
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.grading.config import Metric, MetricsConfig
from jobs.grading.grading import (
    format_grading,
    grade,
    grade_tables,
    is_bbh_match,
    is_exact_match,
    is_gsm8k_match,
    make_scorers,
    parse_gsm8k_answer,
)
from jobs.grading.intervals import estimate, wilson_interval
from jobs.run.tasks.generate import generate
from runtime.config.settings import SamplingConfig
from runtime.errors import ConfigError

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She has 3, then 4.\n#### 1,234", "1234"),
        ("#### $-7.50 and then 9", "-7.5"),
        ("first 12, so the total is $18.00.", "18"),
        ("no number at all", None),
    ],
)
def test_a_gsm8k_answer_is_the_marked_or_the_last_number(text: str, answer: str | None) -> None:
    assert parse_gsm8k_answer(text) == (None if answer is None else Decimal(answer))


def test_answers_are_equal_as_their_benchmarks_say() -> None:
    assert is_gsm8k_match("so 18.00", "#### 18")
    assert not is_gsm8k_match("no number", "no number")
    assert is_bbh_match("Let us think.\nSo the answer is (B).\nQ:", "(B)")
    assert not is_bbh_match("So the answer is (A).", "(B)")
    assert is_exact_match(" a b\n", "a b")
    assert not is_exact_match("A b", "a b")


@pytest.mark.parametrize(("name", "field", "is_equal"), [("gsm8k/test.jsonl", "answer", is_gsm8k_match)])
def test_published_references_are_right_and_the_next_ones_are_mostly_wrong(name, field, is_equal) -> None:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {path}")
    answers = [json.loads(line)[field] for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(is_equal(answer, answer) for answer in answers)
    assert sum(is_equal(one, other) for one, other in pairwise(answers)) < len(answers) / 20


def test_bbhs_own_targets_are_found_behind_its_phrase() -> None:
    path = SHARED / "bbh" / "date_understanding.json"
    if not path.exists():
        pytest.skip(f"needs {path}")
    targets = [example["target"] for example in json.loads(path.read_text(encoding="utf-8"))["examples"]]
    assert all(is_bbh_match(f"Think. So the answer is {target}.\n\nQ: more", target) for target in targets)


@pytest.mark.parametrize(("share", "count"), [(0.2, 10), (0.75, 36), (0.5, 1319)])
def test_wilsons_interval_ends_where_the_share_would_be_just_as_far_as_allowed(share: float, count: int) -> None:
    for end in wilson_interval(share, count):
        assert abs(share - end) == pytest.approx(1.959964 * (end * (1 - end) / count) ** 0.5)


def test_wilsons_interval_of_all_or_none_stays_within_what_a_share_can_be() -> None:
    assert wilson_interval(1.0, 5)[1] == pytest.approx(1.0)
    assert wilson_interval(0.0, 5)[0] == pytest.approx(0.0)
    assert wilson_interval(0.0, 5)[0] >= 0.0
    assert wilson_interval(0.0, 5)[1] > 0.3


def test_an_interval_of_shares_is_drawn_by_rows_and_the_same_each_time() -> None:
    found = estimate([0.25, 0.5, 0.75] * 20)
    assert found.mean == pytest.approx(0.5)
    assert found == estimate([0.25, 0.5, 0.75] * 20)
    assert found.low is not None
    assert found.high is not None
    assert 0.4 < found.low < 0.5 < found.high < 0.6
    assert estimate([]).mean is None


def part(completions: list[str], references: list[object], statuses: list[str] | None = None) -> pa.Table:
    ids = [str(place // 2) for place in range(len(completions))]
    return pa.table(
        {
            "id": ids,
            "sample_index": [place % 2 for place in range(len(completions))],
            "status": statuses or ["ok"] * len(completions),
            "completion": completions,
            "reference": references,
        }
    )


def test_samples_of_a_row_count_as_one_and_what_cannot_be_compared_is_counted() -> None:
    table = part(
        ["a", "b", "a", "a", "a", "a"], ["a", "a", "a", "a", None, "a"], ["ok", "ok", "ok", "ok", "ok", "error"]
    )
    graded = grade_tables([table], "reference", make_scorers([Metric.exact_match]))
    assert (graded.num_samples, graded.num_errors, graded.num_without_reference) == (4, 1, 1)
    found = graded.estimates()["exact_match"]
    assert (found.num_rows, found.mean) == (2, 0.75)
    assert "4 completions compared, 1 with an error left out, 1 without a reference left out" in format_grading(graded)


def test_the_best_of_several_references_counts() -> None:
    table = part(["b", "c"], [["a", "b"], ["a", "b"]])
    assert grade_tables([table], "reference", make_scorers([Metric.exact_match])).estimates()["exact_match"].mean == 0.5


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"reference_field=answer: no such column; columns: .*reference"):
        grade_tables([part(["a"], ["a"])], "answer", make_scorers([Metric.exact_match]))


def test_rouge_is_that_of_the_library() -> None:
    pytest.importorskip("rouge_score", reason="needs the extra eval")
    [score] = make_scorers([Metric.rouge])
    found = score("the cat sat", "the cat lay")
    assert found["rouge1"] == pytest.approx(2 / 3)
    assert found["rouge2"] == pytest.approx(1 / 2)


def test_a_finished_run_of_the_bundled_model_is_graded_well_above_chance(tmp_path: Path) -> None:
    """The bound is far below what training measured, and far above what guessing brings (7 %)."""
    config = GenerateConfig(
        run="graded",
        output_root=str(tmp_path),
        dataset=DatasetConfig(kind=DatasetKind["tasks"]),
        sampling=SamplingConfig(max_new_tokens=16),
    )
    outcome = generate(config, lambda: False)
    graded = grade(MetricsConfig(run=str(outcome.directory)))
    found = graded.estimates()["exact_match"]
    assert (found.num_rows, graded.num_without_reference) == (36, 4)
    assert found.low is not None
    assert found.low > 0.3
    scores = pq.read_table(outcome.directory / "metrics.parquet")
    assert scores.num_rows == 40
    assert sum(filter(None, scores["exact_match"].to_pylist())) == pytest.approx(36 * (found.mean or 0))
    with pytest.raises(ConfigError, match="no such column"):
        grade(MetricsConfig(run=str(outcome.directory), reference_field="answer"))
