"""An evaluation is measured beside the harness' own model: the same requests, the same scores, or an error."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
pytest.importorskip("accelerate", reason="the extra `bench` is not installed")

from lm_eval.tasks import TaskManager

from benchmarks.config import BenchConfig, Suite
from benchmarks.evaluation import BATCH_SIZES, TASK, run_evaluation, write_task
from benchmarks.harness_scores import HarnessContender, HarnessTask, Scores, measure
from benchmarks.task import Result
from runtime.errors import WeightstreamError
from runtime.units import MIB
from tests.support import synthesize

SECONDS_PER_REQUEST = {
    HarnessContender.weightstream: 1.0,
    HarnessContender.unshared: 1.5,
    HarnessContender.hf: 2.0,
    HarnessContender.hf_disk: 4.0,
}
BEST = {HarnessContender.hf: 4, HarnessContender.hf_disk: 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize("llama", tmp_path_factory.mktemp("evaluated") / "model")


def double(asked: HarnessTask, *, off: float = 0.0) -> Scores:
    """Takes half as long again in batches that are not the best."""
    entrant, count = HarnessContender(asked.contender), asked.num_documents
    slower = 1.0 if asked.batch_size in (None, BEST.get(entrant)) else 1.5
    seconds = 4 * count * SECONDS_PER_REQUEST[entrant] * slower
    result = Result(
        seconds=seconds, prefill_seconds=seconds, rate=4 * count / seconds, peak_bytes=3 * MIB, baseline_bytes=MIB,
        bytes_read=MIB, tokens=[], batch_size=asked.batch_size,
    )  # fmt: skip
    return Scores(result=result, logprobs=[[-1.0, -2.0 - off, -3.0, -4.0]] * count, is_right=[True] * count)


def config(model: Path) -> BenchConfig:
    return BenchConfig(suite=Suite.evaluation, checkpoints=[str(model)], num_prompts=80, rounds=2, peer_minutes=1)


def test_peers_get_their_best_batch_and_as_many_requests_as_their_minutes_hold(model: Path) -> None:
    asked: list[HarnessTask] = []
    found = run_evaluation(config(model), lambda line: None, lambda each: (asked.append(each), double(each))[1])
    rounds = [(HarnessContender(each.contender), each.num_documents, each.batch_size) for each in asked[-8:]]
    expected = [
        (HarnessContender.weightstream, 20, None),
        (HarnessContender.unshared, 7, None),
        (HarnessContender.hf, 7, 4),
        (HarnessContender.hf_disk, 8, 32),
    ]
    assert rounds == expected * 2
    tried = {each.batch_size for each in asked[:-8] if HarnessContender(each.contender) is HarnessContender.hf}
    assert tried == set(BATCH_SIZES[HarnessContender.hf])
    assert "| lm-eval hf, in memory | 4 | 28 | 0.500 (0.500-0.500) | 2.00x | 2 MiB | 100% |" in found.table
    assert found.peers == ["lm-eval hf, in memory", "lm-eval hf, disk offload"]


def test_scores_that_differ_end_the_measurement(model: Path) -> None:
    def differing(asked: HarnessTask) -> Scores:
        return double(asked, off=0.01 if HarnessContender(asked.contender) is HarnessContender.weightstream else 0.0)

    with pytest.raises(WeightstreamError, match=r"weightstream, nvme: log-probabilities are up to 0\.01 from"):
        run_evaluation(config(model), lambda line: None, differing)


def test_answers_that_are_right_to_one_alone_end_it_too(model: Path) -> None:
    def wrong(asked: HarnessTask) -> Scores:
        scores = double(asked)
        is_right = HarnessContender(asked.contender) is not HarnessContender.hf_disk
        return replace(scores, is_right=[is_right] * len(scores.is_right))

    with pytest.raises(WeightstreamError, match="disk offload: log-probabilities are up to inf"):
        run_evaluation(config(model), lambda line: None, wrong)


def test_all_questions_stand_behind_the_same_examples(model: Path, tmp_path: Path) -> None:
    write_task(tmp_path, model, 3, 120)
    task = TaskManager(include_path=str(tmp_path), include_defaults=False).load([TASK])["tasks"][TASK]
    task.build_all_requests()
    contexts = {instance.args[0] for instance in task.instances}
    assert len(contexts) == 3
    assert len({context.rpartition("\n\n")[0] for context in contexts}) == 1


def test_every_entrant_scores_the_same_requests_alike(model: Path, tmp_path: Path) -> None:
    write_task(tmp_path, model, 2, 120)
    found = {}
    for entrant in HarnessContender:
        asked = HarnessTask(
            contender=entrant.value, path=str(model), tasks=str(tmp_path), task=TASK, num_documents=2, weight_share=200,
            num_threads=1, batch_size=BATCH_SIZES[entrant][0] if BATCH_SIZES[entrant] else None,
        )  # fmt: skip
        found[entrant] = measure(asked)
        assert found[entrant].result.seconds > 0
        assert [len(each) for each in found[entrant].logprobs] == [4, 4]
    for scores in found.values():
        assert scores.is_right == found[HarnessContender.hf].is_right
        for ours, theirs in zip(scores.logprobs, found[HarnessContender.hf].logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)
