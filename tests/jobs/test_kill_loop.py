"""Ended inside a block or between two, a run in waves comes to the rows of one that nothing ended."""

from pathlib import Path

import pytest

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
