"""Ended inside a block or between two, a run in waves comes to the rows of one that nothing ended."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.run.block_loop import OpenParts
from runtime.config.settings import Admission
from runtime.errors import InternalError
from tests.jobs.kill_case import Case
from tests.jobs.kill_loop import loop


@pytest.mark.slow("jobs/test_generate.py::test_killed_three_times_a_run_ends_with_the_rows_of_an_uninterrupted_one")
def test_a_kill_costs_what_was_not_saved_and_a_stop_a_pass(tmp_path: Path) -> None:
    case = Case(home=tmp_path, num_rows=6, num_new_tokens=60, checkpoint_seconds=0.1, begin_alike=True)
    tally = loop(case, num_kills=1, num_stops=1)
    assert (tally.num_kills, tally.num_stops) == (1, 1)


@pytest.mark.slow("jobs/test_generate.py::test_killed_three_times_a_run_ends_with_the_rows_of_an_uninterrupted_one")
@pytest.mark.parametrize(("job", "window_rows"), [("score", 4), ("encode", None)])
def test_prompts_that_are_only_read_come_to_the_same_rows_when_it_is_killed(
    tmp_path: Path, job: str, window_rows: int | None
) -> None:
    tally = loop(
        Case(home=tmp_path, job=job, window_rows=window_rows, checkpoint_seconds=0.05), num_kills=2, num_stops=0
    )
    assert tally.num_kills == 2


def test_a_crash_after_a_part_counts_no_token_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses let rows of one block end while those of another one run."""
    case = Case(
        home=tmp_path,
        num_rows=6,
        num_new_tokens=120,
        begin_alike=True,
        checkpoint_seconds=1e6,
        admission=Admission.continuous,
        draft_tokens=4,
    )
    case.make_inputs()
    commit, num_left = OpenParts.commit_complete, list[int]()

    def crash_after_first(parts: OpenParts) -> list[int]:
        if done := commit(parts):
            num_left.append(len(parts))
            raise KeyError("a crash")
        return done

    with monkeypatch.context() as patched:
        patched.setattr(OpenParts, "commit_complete", crash_after_first)
        with pytest.raises(InternalError, match="a crash"):
            case.run("ended", lambda: False)
    assert num_left[0] > 0, "rows of another block were running"
    case.run("ended", lambda: False)
    passes = pq.read_table(case.directory("ended").throughput)
    assert sum(passes["useful_tokens"].to_pylist()) == 6 * 120
    assert sum(passes["accepted_tokens"].to_pylist()) > 0
