"""Of the command that runs every model type: some of its rows, of each kind of answer, and that it would notice."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests import model_type_verdict
from tests.dealt import with_slow_others
from tests.model_type_verdict import Outcome, judge
from tests.model_types import main
from tests.tiny_checkpoints import Answers, answers

EXACT = ("gemma4", "video_llama_3", "git", "youtu")
REFUSED = {"xlm": "XLMWithLMHeadModel takes no cache"}


@pytest.mark.parametrize("name", with_slow_others(EXACT, ["gemma4"]))
def test_greedy_tokens_and_scores_equal_transformers(name: str) -> None:
    verdict = judge(name)
    assert verdict.outcome is Outcome.exact, verdict
    assert verdict.note.startswith("scores within")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_in_one_line(name: str) -> None:
    verdict = judge(name)
    assert verdict.outcome is Outcome.refused, verdict
    assert REFUSED[name] in verdict.note


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("spoils", ["token", "score"])
def test_one_wrong_token_or_score_is_noticed(monkeypatch: pytest.MonkeyPatch, spoils: str) -> None:
    def spoilt(model: PreTrainedModel, vocab_size: int) -> Answers:
        true = answers(model, vocab_size)
        expected = [*true.expected[:-1], [*true.expected[-1][:-1], 0]] if spoils == "token" else true.expected
        scored = [replace(each, logprobs=[*each.logprobs[:-1], each.logprobs[-1] - 2e-4]) for each in true.scored]
        return Answers(prompts=true.prompts, expected=expected, scored=scored)

    monkeypatch.setattr(model_type_verdict, "answers", spoilt)
    verdict = judge("llama")
    assert verdict.outcome is Outcome.wrong
    assert verdict.outcome.is_failure
    assert ("from token" if spoils == "token" else "scores within 2.0e-04") in verdict.note


def test_a_slow_machine_is_no_crash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["types=llama", "seconds=0"]) == 0
    assert "1 no answer, 0 WRONG, 0 CRASH" in capsys.readouterr().out


def test_answers_of_an_earlier_call_are_kept_and_failures_show_in_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    lines = ['{"name": "a", "outcome": "exact", "lanes": "packed", "note": ""}']
    results.write_text("\n".join(lines))
    assert main(["types=a", f"results={results}"]) == 0
    results.write_text("\n".join([*lines, '{"name": "b", "outcome": "WRONG", "lanes": "packed", "note": "all"}']))
    assert main(["types=a,b", f"results={results}"]) == 1
    assert "1 exact, 0 refused, 0 no tiny config, 0 no answer, 1 WRONG, 0 CRASH" in capsys.readouterr().out
