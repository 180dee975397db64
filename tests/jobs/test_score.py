"""`jobs.score`: a row of scores for each target, the same as the library's, however often the run was stopped."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir

from jobs.config.settings import ScoreConfig, load, run_directory
from jobs.record.plan_file import RowSlot, read_plan
from jobs.run.run import run_task
from jobs.run.summary_table import format_outcome, format_totals
from jobs.run.tasks.score import score, scoring_task
from jobs.run.tasks.task import dataset_rows
from runtime import Runtime
from runtime.errors import ConfigError, Interrupted, RunMismatchError
from runtime.requests.joining import JoinedRequest
from runtime.sequences.sequence import Request

CONF = Path(__file__).resolve().parents[2] / "conf"
ROWS: list[dict[str, object]] = [
    {"id": "one", "prompt": "The capital of France is", "target": " Paris"},
    {"id": "several", "prompt": "Two and two are ", "target": ["four", "five", "x"]},
    {"id": "none", "prompt": "nothing follows"},
    {"id": "wrong", "prompt": "a number follows", "target": 4},
]
LETTERS: list[dict[str, object]] = [
    {"id": "letters", "prompt": "Which of them is it? Answer:", "target": [" A", " B", " C", " AB"]},
    {"id": "other", "prompt": "Yes or no?", "target": " no"},
]
DOCUMENTS: list[dict[str, object]] = [
    {"id": "long", "prompt": "All happy families are alike. " * 5},
    {"id": "short", "prompt": "Yes."},
]


def config_for(folder: Path, rows: list[dict[str, object]] | None = None, *words: str) -> ScoreConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS), encoding="utf-8")
    settings = ["dataset=jsonl", f"dataset.path={path}", "dataset.id_field=id", f"output_root={folder}", "run=mine"]
    fixed = [
        "policy=fixed",
        "policy.micro_batch_size=1",
        "policy.num_micro_batches=2",
        "policy.prefill_chunk_tokens=16",
        "offload=nvme",
    ]
    with initialize_config_dir(str(CONF), version_base=None):
        return load(ScoreConfig, compose("score", overrides=[*settings, *fixed, *words]))


def never() -> bool:
    return False


def once_there_is_a_part(config: ScoreConfig) -> Callable[[], bool]:
    return lambda: any((run_directory(config) / "generations").glob("*.parquet"))


def rows_of(config: ScoreConfig) -> list[dict[str, object]]:
    return pq.read_table(run_directory(config) / "generations").to_pylist()


def test_each_target_has_a_row_with_the_scores_that_the_library_gives(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    outcome = score(config, never)
    found = {(row["id"], row["target_index"]): row for row in rows_of(config)}
    pairs = [("The capital of France is", " Paris"), ("Two and two are ", ["four", "five", "x"])]
    expected = Runtime(config.runtime).score(pairs)
    assert outcome.exit_code == 3
    assert sorted(found) == [
        ("none", 0),
        ("one", 0),
        *(("several", i) for i in range(3)),
        ("wrong", 0),
    ]
    for scored, id in zip(expected, ("one", "several", "several", "several"), strict=True):
        row = found[id, scored.target_index]
        assert row["token_ids"] == list(scored.token_ids)
        assert row["is_greedy"] == scored.is_greedy
        assert row["token_logprobs"] == pytest.approx(scored.token_logprobs, abs=1e-5)
        assert row["logprob"] == pytest.approx(scored.logprob, abs=1e-4)
    assert "score.target_field" in str(found["none", 0]["error"])
    assert found["wrong", 0]["logprob"] is None


def test_a_run_that_is_stopped_comes_to_the_same_rows(tmp_path: Path) -> None:
    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
    whole, stopped = config_for(tmp_path / "whole"), config_for(tmp_path / "stopped")
    score(whole, never)
    with pytest.raises(Interrupted):
        score(stopped, once_there_is_a_part(stopped))
    num_parts = len(list((run_directory(stopped) / "generations").glob("*.parquet")))
    score(stopped, never)
    assert 0 < num_parts < len(list((run_directory(stopped) / "generations").glob("*.parquet")))
    assert rows_of(stopped) == rows_of(whole)


@pytest.mark.slow("jobs/test_score.py::test_a_run_that_is_stopped_comes_to_the_same_rows")
def test_a_run_that_goes_on_computes_as_many_tokens_at_a_time_as_before_whatever_is_measured_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, object]] = [{"id": str(i), "prompt": f"{i} and " * 350, "target": " on"} for i in range(4)]
    words = ("policy.micro_batch_size=2", "policy.num_micro_batches=1", "policy.prefill_chunk_tokens=null")
    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
    whole, stopped = (config_for(tmp_path / folder, rows, *words) for folder in ("whole", "stopped"))
    with monkeypatch.context() as measured:
        measured.setattr("runtime.plan.search.candidate._best_chunk", lambda *_: 1024)
        once = score(whole, never).summary
        with pytest.raises(Interrupted):
            score(stopped, once_there_is_a_part(stopped))
    monkeypatch.setattr("runtime.plan.search.candidate._best_chunk", lambda *_: 512)
    assert score(stopped, never).summary.num_passes == once.num_passes
    assert rows_of(stopped) == rows_of(whole)


def test_other_targets_are_another_run(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    with pytest.raises(Interrupted):
        score(config, once_there_is_a_part(config))
    with pytest.raises(RunMismatchError):
        score(config_for(tmp_path, [{**ROWS[0], "target": " Lyon"}, *ROWS[1:]]), never)


def test_it_is_said_why_rows_have_errors_the_commonest_reason_first(tmp_path: Path) -> None:
    rows = [{"id": str(i), "prompt": "a b", "target": [" c"] if i == 0 else 1 if i > 3 else None} for i in range(9)]
    told = format_outcome(score(config_for(tmp_path, rows), never))
    first, second = told.splitlines()[-2:]
    assert first.endswith("5 x the field 'target' (score.target_field) is neither a text nor a list of texts")
    assert second.endswith("3 x there is no field 'target' (score.target_field)")


def test_documents_are_scored_in_windows_whose_sum_is_theirs(tmp_path: Path) -> None:
    config = config_for(tmp_path, [*DOCUMENTS], "score.rolling=true", "score.window_tokens=32")
    outcome = score(config, never)
    expected = Runtime(config.runtime).score_documents([str(row["prompt"]) for row in DOCUMENTS], max_tokens=32)
    rows = rows_of(config)
    for document, one in zip(DOCUMENTS, expected, strict=True):
        mine = [row for row in rows if row["id"] == document["id"]]
        assert math.fsum(float(str(row["logprob"])) for row in mine) == pytest.approx(one.logprob, rel=1e-5)
        assert len(mine) == -(-one.num_tokens // 32)
    told = outcome.summary.totals
    assert told is not None
    loss = -sum(one.logprob for one in expected)
    assert json.loads((outcome.directory / "summary.json").read_text())["totals"] == told
    for count, name in (("num_tokens", "token"), ("num_words", "word"), ("num_bytes", "byte")):
        number = sum(getattr(one, count) for one in expected)
        assert told[count] == number
        assert told[f"{name}_perplexity"] == pytest.approx(math.exp(loss / number), rel=1e-5)


def test_a_document_without_tokens_is_an_error_row_and_no_perplexity_counts_it(tmp_path: Path) -> None:
    config = config_for(tmp_path, [DOCUMENTS[1]], "score.rolling=true")
    [row] = dataset_rows(config, None)
    rows = [row, replace(row, index=1, id="empty", prompt="", prompt_ids=())]
    task, asked = scoring_task(config)
    totals = run_task(replace(task, rows=lambda *_: rows), asked, never).summary.totals
    assert [each["error"] for each in rows_of(config)] == [None, "the document has no tokens"]
    assert totals is not None
    assert (totals["num_rows"], totals["num_words"], totals["num_bytes"]) == (1, 1, 4)


def slots_of(config: ScoreConfig) -> dict[tuple[str, int], RowSlot]:
    return {each.key: each.slot for each in read_plan(run_directory(config) / "plan.parquet")}


def test_targets_that_end_behind_the_same_tokens_are_computed_once_and_have_a_row_each(tmp_path: Path) -> None:
    config = config_for(tmp_path, LETTERS)
    outcome = score(config, never)
    expected = Runtime(config.runtime).score([(str(row["prompt"]), row["target"]) for row in LETTERS])  # pyright: ignore
    computed = {(one.prompt_index, one.num_prompt_tokens, one.token_ids[:-1]) for one in expected}
    assert len(set(slots_of(config).values())) == len(computed) < len(expected)
    assert outcome.summary.prompt_tokens == sum(num_prompt + len(known) for _, num_prompt, known in computed)
    found = {(row["id"], row["target_index"]): row for row in rows_of(config)}
    assert len(found) == len(expected)
    for one in expected:
        row = found[str(LETTERS[one.prompt_index]["id"]), one.target_index]
        assert row["token_ids"] == list(one.token_ids)
        assert row["is_greedy"] == one.is_greedy
        assert row["token_logprobs"] == pytest.approx(one.token_logprobs, abs=1e-5)


def test_a_run_that_was_begun_with_a_seat_for_each_target_goes_on_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(tmp_path, LETTERS)
    with monkeypatch.context() as before:
        before.setattr("jobs.run.requests.join_requests", _apart)
        with pytest.raises(Interrupted):
            score(config, once_there_is_a_part(config))
    begun = slots_of(config)
    score(config, never)
    assert slots_of(config) == begun
    assert len(set(begun.values())) == len(begun) == len(rows_of(config))
    assert [len(str(row["error"] or "")) for row in rows_of(config)] == [0] * len(begun)


def _apart(requests: list[Request], slots: object) -> list[JoinedRequest]:
    return [JoinedRequest(request=request, members=[i]) for i, request in enumerate(requests)]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("sampling.n=2", "sampling.n"),
        ("dataset.keep_columns=false", "keep_columns"),
        ("score.window_tokens=8", "rolling"),
        ("score.target_field=''", "target_field"),
    ],
)
def test_settings_that_mean_nothing_here_are_refused(word: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_for(tmp_path, None, word)


def test_defaults_of_yaml_and_code_are_the_same() -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        assert load(ScoreConfig, compose("score")) == ScoreConfig()


def test_a_perplexity_that_nobody_can_count_the_digits_of_has_an_exponent() -> None:
    totals = {"num_rows": 1, "num_tokens": 2, "num_greedy": 0, "logprob": -69.0}
    said = format_totals({**totals, "token_perplexity": 12_345.67894, "word_perplexity": 6.3022e27})
    assert said.endswith("perplexity 12,345.6789 per token, 6.302e+27 per word")
