"""A rank that is killed ends all, and the same command goes on with any number of ranks, to the rows of one process."""

from pathlib import Path

import pytest

from runtime.config.settings import DevicesConfig, Parallelism
from tests.jobs.rank_loop import MOMENTS, RESUMABLE, Case, end_of, kill_one, require_equal

SHARDED = DevicesConfig(way=Parallelism.sharded)


KILLED = dict(zip(MOMENTS, [(2, 1), (2, 0), (2, 1), (3, 2), (3, 0)], strict=True))


@pytest.mark.parametrize(
    "moments",
    [pytest.param(["a pass has ended"], id="one"), pytest.param([*MOMENTS], marks=pytest.mark.slow, id="all")],
)
def test_whoever_is_killed_whenever_all_end_with_75_and_another_number_of_ranks_goes_on(
    moments: list[str], tmp_path: Path
) -> None:
    case = Case(home=tmp_path, num_new_tokens=24)
    for turn, moment in enumerate(moments):
        size, victim = KILLED[moment]
        codes = kill_one(case, size, victim, MOMENTS[moment], helped=moment == "it has started", apart=turn % 2 == 1)
        assert codes == [RESUMABLE] * (size - 1), moment
    assert end_of(case.start(2)) == [0, 0]
    require_equal(case)


@pytest.mark.slow(
    "runtime/test_pipeline.py::test_one_rank_that_is_stopped_stops_the_pipeline_and_so_does_one_that_fails"
)
def test_a_pipeline_of_which_one_is_killed_ends_with_75_and_goes_on_to_the_rows_of_one_process(tmp_path: Path) -> None:
    case = Case(home=tmp_path, way=Parallelism.pipeline)
    assert kill_one(case, 2, 1, MOMENTS["a pass has ended"]) == [RESUMABLE]
    assert end_of(case.start(2)) == [0, 0]
    require_equal(case)
