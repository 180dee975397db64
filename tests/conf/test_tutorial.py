"""docs/how-to/plan-a-run.md shows what its commands print. Only data sheets and sizes go in: the same anywhere."""

import contextlib
import io
import itertools
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.dealt import with_slow_others
from tests.docs.pages import DOCS, blocks_of
from tests.processes import alone

ROOT = Path(__file__).resolve().parents[2]


def shown() -> list[tuple[list[str], list[str]]]:
    """The settings of each plan on the page, and the lines that it shows, with `...` for what it leaves out."""
    blocks = list(blocks_of(DOCS / "how-to" / "plan-a-run.md"))
    found = []
    for command, output in itertools.pairwise(blocks):
        words = shlex.split(command.text.replace("\\\n", ""))
        if words[:2] == ["weightstream", "plan"] and output.language == "text":
            lines = [" ".join(line.split()) for line in output.text.splitlines()]
            found.append(
                (words[2:], [line for line in lines if line not in ("", "...") and not line.startswith("in ")])
            )
    return found


def is_printed(line: str, output: str) -> bool:
    pattern = ".*".join(map(re.escape, re.split(r" ?\.\.\. ?", line)))
    return any(re.fullmatch(pattern, " ".join(each.split())) for each in output.splitlines())


def printed(module: str, *arguments: str) -> str:
    """What `python -m module arguments` prints that ends well, in a process of its own."""
    os.chdir(ROOT)
    sys.argv[1:] = arguments
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert not ended.value.code
    return out.getvalue()


@pytest.mark.parametrize(
    ("settings", "lines"),
    with_slow_others(shown(), shown()[:1]),
    ids=["fits in memory", "fits nowhere", "own load", "with more memory"],
)
def test_a_command_prints_what_is_shown(settings: list[str], lines: list[str], tmp_path: Path) -> None:
    if any("sweep" in setting for setting in settings):
        settings, lines = [*settings, "plan.sweep_points=[12]", f"plan.directory={tmp_path}"], lines[:2]
    assert lines
    output = alone(printed, "jobs.plan", *settings)
    assert [line for line in lines if not is_printed(line, output)] == []
