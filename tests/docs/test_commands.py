"""Runs every command of the pages in docs/start and docs/how-to: `make docs-check`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import RUN, blocks_of
from tests.docs.test_pages import named

LIMIT_SECONDS = 300


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every page may use: `my-model`, `prompts.jsonl` and `questions.csv`."""
    folder = tmp_path_factory.mktemp("pages")
    prompts = [f'{{"id": "p{i}", "prompt": "Question {i}: what is {i} plus {i}?"}}\n' for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(prompts))
    questions = [f"q{i},What is {i} plus {i}?,{2 * i}\n" for i in range(12)]
    (folder / "questions.csv").write_text("id,question,gold\n" + "".join(questions))
    made = run_bash("weightstream synthesize model=tiny out=my-model", folder)
    assert made.returncode == 0, made.stderr
    shutil.rmtree(folder / "outputs", ignore_errors=True)
    return folder


def run_bash(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-e", "-o", "pipefail", "-c", text]
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=LIMIT_SECONDS, check=False
    )


@pytest.mark.slow("docs/test_pages.py::test_every_note_to_the_checker_is_one_that_it_knows")
@pytest.mark.parametrize("page", RUN, ids=named)
def test_the_commands_of_a_page_run(page: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom in one directory; Python blocks share one namespace."""
    folder = tmp_path / "page"
    shutil.copytree(files, folder)
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    for block in blocks_of(page):
        where = f"{named(page)}, line {block.line}"
        if block.title is not None:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.is_run and block.language == "bash":
            ended = run_bash(block.text, folder)
            assert ended.returncode == block.exit_code, f"{where}:\n{block.text}\n{ended.stdout}\n{ended.stderr}"
        elif block.is_run:
            exec(compile(block.text, where, "exec"), names)
