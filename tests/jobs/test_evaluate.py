"""What a harness computes of our answers is what it computes of its own model's, however often a run was killed."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")

from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from jobs.evaluating.config import EvaluateConfig, HarnessConfig, evaluation_directory
from jobs.evaluating.harness import Evaluation, GenerationRequest, RunAnswerer, evaluate
from jobs.evaluating.task_index import find_tasks
from jobs.record.output_rows import GenerationRow
from jobs.record.passes import Start
from jobs.run.block_loop import OpenParts
from runtime.config.settings import ModelConfig, OffloadConfig, PolicyConfig, PolicyKind, Tier
from runtime.errors import ConfigError, EvaluationError, Interrupted
from runtime.sequences.detokenizer import Detokenizer, StopStrings
from runtime.sequences.sequence import Request
from tests.jobs.harness_tasks import TASKS, write_tasks
from tests.jobs.kill_support import Kills
from tests.support import short_bart, synthesize

SEEDS = {"random_seed": 0, "numpy_random_seed": 0, "torch_random_seed": 0, "fewshot_random_seed": 1234}


@pytest.fixture(autouse=True)
def no_report_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness asks pip and others for one with each evaluation, for over a second."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("evaluated")
    (home / "tasks").mkdir()
    write_tasks(home / "tasks")
    synthesize("llama", home / "model")
    return home


def config(home: Path, tasks: list[str], *, tier: Tier = Tier.auto, **changes: Any) -> EvaluateConfig:
    return EvaluateConfig(
        model=ModelConfig(name="hf", path=str(home / "model")),
        offload=OffloadConfig(tier=tier),
        tasks=tasks,
        harness=HarnessConfig(include_path=[str(home / "tasks")], bootstrap_iters=0, **changes),
        output_root=str(home / f"outputs-{tier.value}"),
    )


def evaluated(asked: EvaluateConfig, should_stop: Callable[[], bool] = lambda: False) -> Evaluation:
    return evaluate(asked, find_tasks(asked.tasks, [*asked.harness.include_path]), should_stop, Start())


def numbers(results: Any) -> dict[str, dict[str, float]]:
    found = {task: {k: v for k, v in values.items() if isinstance(v, float)} for task, values in results.items()}
    assert all(found.values()), "a task without a number"
    return found


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("tier", [Tier.none, Tier.nvme])
def test_every_task_gets_the_numbers_that_the_harness_gets_of_transformers(home: Path, tier: Tier) -> None:
    tasks = list(TASKS)
    manager = TaskManager(include_path=str(home / "tasks"), include_defaults=False)
    own = HFLM(pretrained=str(home / "model"), device="cpu", dtype="float32", batch_size=4)
    expected = simple_evaluate(own, tasks=tasks, task_manager=manager, bootstrap_iters=0, **SEEDS)
    assert expected is not None
    found = evaluated(config(home, tasks, tier=tier))
    assert numbers(found.results["results"]) == {
        task: pytest.approx(values, rel=1e-4) for task, values in numbers(expected["results"]).items()
    }
    texts = [[each["resps"] for each in expected["samples"][task]] for task in tasks if task.startswith("until")]
    assert [_answers(found.directory, task) for task in tasks if task.startswith("until")] == texts


@pytest.mark.slow("jobs/test_evaluate.py::test_every_task_gets_the_numbers_that_the_harness_gets_of_transformers")
@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("make", [partial(synthesize, "t5"), partial(short_bart, num_positions=24)])
def test_an_encoder_decoder_gets_the_log_probabilities_that_the_harness_gets_of_it(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    """Contexts are the encoder's, where a short one's lose their beginning, and targets the decoder's."""
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path / "tasks")
    make(tmp_path / "model")
    tasks = ["choice_of_words", "choice_of_letters", "perplexity"]
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    own = HFLM(pretrained=str(tmp_path / "model"), device="cpu", dtype="float32", batch_size=1)
    expected = simple_evaluate(own, tasks=tasks, task_manager=manager, bootstrap_iters=0, **SEEDS)
    assert expected is not None
    found = evaluated(config(tmp_path, tasks, tier=Tier.nvme))
    for task in tasks:
        want = [float(value) for each in expected["samples"][task] for value in _logprobs(each["resps"])]
        got = [float(value) for resps in _answers(found.directory, task) for value in _logprobs(resps)]
        assert got == pytest.approx(want, rel=1e-4)


def _logprobs(resps: list[Any]) -> list[Any]:
    """Of each response, which is a log-probability or begins with one."""
    return [one[0] if isinstance(one, list | tuple) else one for (one,) in resps]


def _answers(directory: Path, task: str) -> list[Any]:
    (file,) = directory.glob(f"harness/*/samples_{task}_*.jsonl")
    return [json.loads(line)["resps"] for line in file.read_text().splitlines()]


def test_a_finished_evaluation_is_read_and_not_asked_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(home, ["until_a_stop", "choice_of_words"])
    first = evaluated(asked)
    monkeypatch.setattr("runtime.engine.engine.Engine.step", None)
    again = evaluated(asked)
    assert again.results == first.results


@pytest.mark.slow("jobs/test_evaluate.py::test_a_killed_evaluation_comes_to_the_same_and_asks_no_committed_row_again")
def test_what_was_stopped_goes_on_with_what_it_has(home: Path) -> None:
    asked = config(home, ["until_the_end"], num_fewshot=3)
    with pytest.raises(Interrupted):
        evaluated(asked, should_stop=iter([False] * 20 + [True] * 1000).__next__)
    undisturbed = replace(asked, output_root=str(home / "undisturbed"))
    assert evaluated(asked).results["results"] == evaluated(undisturbed).results["results"]


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("task", ["choice_of_words", "perplexity", "until_a_stop"])
def test_a_killed_evaluation_comes_to_the_same_and_asks_no_committed_row_again(
    home: Path, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each kind of requests, killed between any two steps of the file system; five of them go on."""
    policy = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=1)
    asked = replace(config(home, [task], limit=4.0), policy=policy, checkpoint_seconds=None, run="whole")
    asked = replace(asked, output_root=str(tmp_path))
    with Kills(monkeypatch).copied(tmp_path / "evaluate" / "whole", tmp_path / "killed") as killed:
        whole = evaluated(asked)
    added = list[GenerationRow]()
    add = OpenParts.add
    monkeypatch.setattr(OpenParts, "add", lambda self, row: (added.append(row), add(self, row)))
    num_rows, kept = _committed(whole.directory), list[int]()
    for number, copy in enumerate(killed[:: max(1, len(killed) // 5)]):
        added.clear()
        kept.append(_committed(copy))
        again = replace(asked, run=str(number))
        copy.rename(tmp_path / "evaluate" / str(number))
        assert evaluated(again).results == whole.results
        assert len(added) == num_rows - kept[-1]
    assert any(0 < num_kept < num_rows for num_kept in kept), "none was killed halfway"


def _committed(evaluation: Path) -> int:
    return sum(pq.read_metadata(part).num_rows for part in evaluation.glob("*/generations/part-*.parquet"))


def test_a_stop_string_that_begins_in_the_context_ends_no_answer(home: Path) -> None:
    """As in the harness' own models, and otherwise than in transformers' `generate`."""
    answerer = RunAnswerer(config(home, ["until"]), home / "begun", lambda: False, Start())
    tokenizer = answerer.model.tokenizer
    assert tokenizer is not None
    context = tuple(tokenizer("It is the EN")["input_ids"])
    (free,) = answerer.generate("free", [GenerationRequest(context_ids=context, max_new_tokens=6, stop=())])
    spellings = Detokenizer(tokenizer)
    stop = b"the EN" + spellings.spelling(free[0]).text
    asked = GenerationRequest(context_ids=context, max_new_tokens=6, stop=(stop.decode(),))
    request = Request(id="0", prompt_ids=context, max_new_tokens=6, stop=asked.stop)
    assert StopStrings(spellings).find(request, free[:1]) == 0
    assert answerer.generate("stopped", [asked]) == [free]


def test_a_task_that_does_not_exist_is_refused_with_the_nearest(home: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean until_a_stop"):
        evaluated(config(home, ["until_a_stopp"]))


def test_what_the_harness_cannot_load_is_said_in_its_words(home: Path) -> None:
    text = (home / "tasks" / "perplexity.yaml").read_text()
    lost = text.replace("perplexity", "lost", 1).replace("rows.jsonl", "gone.jsonl")
    (home / "tasks" / "lost.yaml").write_text(lost)
    with pytest.raises(EvaluationError, match=r"gone\.jsonl"):
        evaluated(config(home, ["lost"]))


def test_other_tasks_and_other_settings_are_other_evaluations(home: Path) -> None:
    one, two = ["until_a_stop"], ["until_the_end"]
    asked = [config(home, one), config(home, two), config(home, one, limit=2.0), config(home, one, num_fewshot=1)]
    assert len({evaluation_directory(each) for each in asked}) == 4
