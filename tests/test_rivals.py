"""The table of what others publish, as docs/project/benchmarks-predictions.md shows it."""

from pathlib import Path

import pytest

from tests.rivals import HEADER, Rival, rivals

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "project" / "benchmarks-predictions.md").read_text(encoding="utf-8")
SHORT = [rival for rival in rivals() if "opt-30b" in rival.settings]  # plans of well under a second


def test_the_page_has_a_row_for_each_rival_with_what_was_published_and_what_to_type() -> None:
    rows = PAGE.partition(HEADER)[2].partition("\n\n")[0].splitlines()[1:]
    assert len(rows) == len(list(rivals()))
    for row, rival in zip(rows, rivals(), strict=True):
        assert row.startswith(f"| {rival.name} | {rival.machine} | {rival.model} | {rival.published:.4g} |")
        assert row.endswith(f"| `{rival.settings}` |")


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("rival", SHORT, ids=lambda rival: rival.name)
def test_the_table_is_what_is_planned_today(rival: Rival) -> None:
    assert rival.row in PAGE
