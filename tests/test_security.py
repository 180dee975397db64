"""What SECURITY.md promises names the test that would fail without it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_promise_names_a_test_that_is_there(file: str, name: str) -> None:
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_there_are_promises() -> None:
    assert len(NAMED) > 5
