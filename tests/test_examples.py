"""Each script of examples/ prints what stands beside it."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".py"))
SLOW = [path for path in SCRIPTS if path.suffix == ".sh" and "slurm" not in path.name]  # several starts each
SBATCH = """#!/usr/bin/env bash
printf '%s\\n' "$@" >> sbatch.words
echo "Submitted batch job $(grep -c '^--job-name' sbatch.words)"
"""


def without_sizes(text: str) -> str:
    """Memory of a plan, and bytes read, depend on the processor."""
    return re.sub(r"[\d.,]+( +[KMG]iB)", r"N\1", text)


def output_of(script: Path) -> str:
    return script.with_suffix(".out").read_text(encoding="utf-8")


def run_script(script: Path, folder: Path, *first: Path) -> str:
    """What a script prints in a folder of its own, with the programs of this environment."""
    path = ":".join([*map(str, first), str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = subprocess.run(
        ["bash", script], cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_every_example_has_its_output_beside_it_and_a_line_in_the_list() -> None:
    assert len(SCRIPTS) >= 6
    outputs = {path.with_suffix(".out") for path in SCRIPTS}
    assert {path for path in EXAMPLES.iterdir() if path.suffix == ".out"} == outputs
    listed = re.findall(r"\]\((\d\d_\w+\.\w+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert listed == [path.name for path in SCRIPTS]
    assert [path.name for path in SCRIPTS if len(path.read_text().splitlines()) > 40] == []


@pytest.mark.slow("test_examples.py::test_the_slurm_array")
def test_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [script] = EXAMPLES.glob("*.py")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))
    assert capsys.readouterr().out == output_of(script)


def test_the_slurm_array(tmp_path: Path) -> None:
    """With an `sbatch` that only writes down how it was called; tests/test_slurm_cluster.py has real daemons."""
    [script] = EXAMPLES.glob("*slurm*.sh")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sbatch").write_text(SBATCH)
    (programs / "sbatch").chmod(0o755)
    assert run_script(script, tmp_path, programs) == output_of(script)
    words = (tmp_path / "sbatch.words").read_text().splitlines()
    assert {"generate.sbatch", "run=sums", "export.sbatch", "run=outputs/generate/sums"} <= {*words}
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 100


@pytest.mark.slow("test_examples.py::test_every_example_has_its_output_beside_it_and_a_line_in_the_list")
@pytest.mark.parametrize("script", SLOW, ids=lambda path: path.stem)
def test_commands(script: Path, tmp_path: Path) -> None:
    assert without_sizes(run_script(script, tmp_path)) == without_sizes(output_of(script))
