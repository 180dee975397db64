"""Ranks come to the scores and embeddings of one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest

from runtime import Runtime, RuntimeConfig
from runtime.config.settings import DevicesConfig, Parallelism
from runtime.errors import ConfigError
from runtime.ranks.ranks import Ranks
from tests.rank_processes import in_ranks
from tests.runtime.test_families import config_for
from tests.support import Reference

References = Callable[[str], Reference]
Found: TypeAlias = tuple[list[float], list[bool], list[list[float]]]
DOCUMENTS = [("the cat sat", ["on the mat", "under it", "at"]), ("a b c", ["d"]), ("seven", ["eight", "nine"])]


def read_off(runtime: Runtime) -> Found:
    """Scores of targets, whether they are greedy, and vectors."""
    scores = runtime.score([(prompt, targets) for prompt, targets in DOCUMENTS])
    vectors = runtime.embed([prompt for prompt, _ in DOCUMENTS], normalize=True)
    found = [each.vector.tolist() for each in vectors if each.vector is not None]
    return [each.logprob or 0.0 for each in scores], [bool(each.is_greedy) for each in scores], found


def in_each_way(ranks: Ranks, config: RuntimeConfig) -> list[Found | str]:
    found = list[Found | str]()
    for way in (Parallelism.sharded, Parallelism.tensor, Parallelism.pipeline):
        ranks.devices = DevicesConfig(way=way)
        try:
            found.append(read_off(Runtime(config, ranks=ranks)))
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.mark.slow("runtime/test_ranks_features.py::test_every_way_comes_to_the_completions_of_one_process")
def test_scores_and_embeddings_are_those_of_one_process_or_refused_by_name(
    reference: References, opened: Callable[[RuntimeConfig], Runtime]
) -> None:
    config = config_for(reference("llama"))
    config = replace(config, sampling=replace(config.sampling, logprobs=1))
    logprobs, are_greedy, vectors = read_off(opened(config))
    assert len(logprobs) == 6
    assert all(each < 0 for each in logprobs)
    for sharded, tensor, pipeline in in_ranks(2, in_each_way, config):
        for found in (sharded, tensor):
            assert found[0] == pytest.approx(logprobs, rel=1e-5)
            assert found[1] == are_greedy
            assert [pytest.approx(each, abs=1e-5) for each in vectors] == found[2]
        assert "devices=pipeline does not support scores and embeddings" in pipeline
