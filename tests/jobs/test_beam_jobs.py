"""Runs whose rows are searched: as many rows as are asked for, the same however often the run was stopped or killed."""

import random
from itertools import count
from pathlib import Path

import pytest

from jobs.config.settings import EncodeConfig, GenerateConfig, ScoreConfig, run_directory
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.record.run_dir import RunDirectory
from jobs.run.tasks.generate import generate
from runtime.config.settings import PolicyConfig, PolicyKind, SamplingConfig
from runtime.errors import ConfigError, Interrupted
from tests.generations import read_generations
from tests.jobs.killing import run_and_kill

NUM_ROWS, NUM_BEAMS = 6, 3
SEARCH = SamplingConfig(num_beams=NUM_BEAMS, n=2, max_new_tokens=16, ignore_eos=True, logprobs=1)


def config(output_root: Path, run: str) -> GenerateConfig:
    return GenerateConfig(
        run=run,
        output_root=str(output_root),
        dataset=DatasetConfig(kind=DatasetKind["sample"], limit=NUM_ROWS),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=NUM_BEAMS, num_micro_batches=2),
        sampling=SEARCH,
        checkpoint_seconds=0,
    )


def rows(config: GenerateConfig) -> list[dict[str, object]]:
    return read_generations(RunDirectory(path=run_directory(config))).to_pylist()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The rows of a run that was never stopped."""
    asked = config(tmp_path_factory.mktemp("whole"), "whole")
    generate(asked, lambda: False)
    return rows(asked)


def test_a_search_leaves_the_rows_that_are_asked_for_the_best_first(whole: list[dict[str, object]]) -> None:
    assert len(whole) == 2 * NUM_ROWS
    for first, second in zip(whole[::2], whole[1::2], strict=True):
        assert (first["id"], first["sample_index"], second["sample_index"]) == (second["id"], 0, 1)
        assert first["token_ids"] != second["token_ids"]
        assert isinstance(first["beam_score"], float)
        assert isinstance(second["beam_score"], float)
        assert first["beam_score"] > second["beam_score"]
        assert sum(first["logprobs"]) / 16 == pytest.approx(first["beam_score"], abs=1e-4)  # pyright: ignore


@pytest.mark.slow("jobs/test_beam_jobs.py::test_killed_inside_its_searches_a_run_ends_with_the_same_rows")
def test_stopped_again_and_again_inside_its_searches_a_run_ends_with_the_same_rows(
    tmp_path: Path, whole: list[dict[str, object]]
) -> None:
    asked, num_stops = config(tmp_path, "stopped"), 0
    for stages in count(60, 30):
        left = iter(range(stages))
        try:
            generate(asked, lambda left=left: next(left, None) is None)
            break
        except Interrupted:
            num_stops += 1
    assert num_stops > 2
    found = rows(asked)
    for row, expected in zip(found, whole, strict=True):
        assert row["token_ids"] == expected["token_ids"]
        assert row["beam_score"] == pytest.approx(expected["beam_score"], abs=1e-4)


def test_killed_inside_its_searches_a_run_ends_with_the_same_rows(
    tmp_path: Path, whole: list[dict[str, object]]
) -> None:
    asked, moments = config(tmp_path, "killed"), random.Random(3)
    directory = run_directory(asked)
    run_and_kill(asked, lambda: bool(list(directory.glob("running*"))), after_seconds=moments.uniform(0, 0.05))
    generate(asked, lambda: False)
    assert [row["token_ids"] for row in rows(asked)] == [row["token_ids"] for row in whole]


@pytest.mark.parametrize("kind", [ScoreConfig, EncodeConfig])
def test_where_nothing_is_generated_beams_are_refused(kind: type[GenerateConfig]) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.num_beams=4 has no effect in weightstream"):
        kind(sampling=SamplingConfig(num_beams=4))
