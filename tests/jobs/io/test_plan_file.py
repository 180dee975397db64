"""The plan is fixed once."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs.io.plan_file import PlannedRequest, fix_plan, plan_digest, read_plan
from runtime.errors import DamagedRunError, MillraceError, RunMismatchError
from tests.jobs.io.part_support import PLAN


def test_plan_is_written_once_and_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.parquet"
    fix_plan(path, PLAN)
    before = path.read_bytes()
    fix_plan(path, list(PLAN))
    assert read_plan(path) == PLAN
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (PLAN[:-1], "12 requests -> 11"),
        ([*PLAN[:3], replace(PLAN[3], micro_batch=7), *PLAN[4:]], "request 3: micro_batch 1 -> 7"),
        ([*PLAN[1::-1], *PLAN[2:]], "request 0: sample_index 0 -> 1"),
        ([], "12 requests -> 0"),
    ],
)
def test_another_plan_is_refused_and_the_first_one_kept(
    tmp_path: Path, plan: list[PlannedRequest], message: str
) -> None:
    path = tmp_path / "plan.parquet"
    fix_plan(path, PLAN)
    before = path.read_bytes()
    with pytest.raises(RunMismatchError, match=message):
        fix_plan(path, plan)
    assert path.read_bytes() == before
    assert plan_digest(plan) != plan_digest(PLAN)


@pytest.mark.parametrize("damage", [b"", b"text", "flip"])
def test_a_damaged_plan_needs_a_person(tmp_path: Path, damage: bytes | str) -> None:
    path = tmp_path / "plan.parquet"
    fix_plan(path, PLAN)
    whole = path.read_bytes()
    at = whole.index(b"row 2")
    path.write_bytes(damage if isinstance(damage, bytes) else whole[:at] + b"Row 2" + whole[at + 5 :])
    with pytest.raises(MillraceError) as caught:
        fix_plan(path, PLAN)
    assert isinstance(caught.value, DamagedRunError)
