"""Ended inside one long block, a run in waves comes to the rows and tokens of one that nothing ended."""

from pathlib import Path

from tests.jobs.kill_case import Case
from tests.jobs.kill_loop import loop


def test_a_kill_costs_what_was_not_saved_and_a_stop_a_pass(tmp_path: Path) -> None:
    case = Case(home=tmp_path, num_rows=6, num_new_tokens=60, checkpoint_seconds=0.1, begin_alike=True)
    tally = loop(case, num_kills=1, num_stops=1)
    assert (tally.num_kills, tally.num_stops) == (1, 1)
