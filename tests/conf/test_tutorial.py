"""What the tutorial shows is what its commands print: only data sheets and sizes go in, so it is the same anywhere."""

import contextlib
import io
import os
import runpy
import shlex
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.dealt import with_slow_others
from tests.processes import alone

ROOT = Path(__file__).resolve().parents[2]


def shown() -> list[tuple[list[str], list[str]]]:
    """The arguments of each command, and the lines below it."""
    text = (ROOT / "conf" / "README.md").read_text(encoding="utf-8")
    blocks = [part for part in text.split("\n\n") if part.startswith("    $ python")]
    found = []
    for block in blocks:
        command, _, output = dedent(block).replace("\\\n", "").partition("\n")
        found.append((shlex.split(command)[2:], [line.strip() for line in output.splitlines() if line != "..."]))
    return found


def printed(module: str, *arguments: str) -> str:
    """What `python -m module arguments` prints that ends well, in a process of its own."""
    os.chdir(ROOT)
    sys.argv[1:] = arguments
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert not ended.value.code
    return out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "lines"),
    with_slow_others(shown(), shown()[:2]),
    ids=["fits in memory", "fits nowhere", "with more memory"],
)
def test_a_command_prints_what_is_shown(arguments: list[str], lines: list[str], tmp_path: Path) -> None:
    if any("sweep" in argument for argument in arguments):
        arguments, lines = [*arguments, "plan.sweep_points=[12]", f"plan.directory={tmp_path}"], lines[:2]
    option, module, *settings = arguments
    assert option == "-m"
    assert lines
    assert set(lines) <= {line.strip() for line in alone(printed, module, *settings).splitlines()}
