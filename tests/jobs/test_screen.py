"""What a run shows: a few lines on stderr, everything in its `run.log`, and tables or JSON on stdout."""

import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.config import logs
from jobs.config.logs import OWN_LOGGERS, RECORDS, log_start, run_log
from jobs.config.settings import GenerateConfig, LogLevel, SummaryFormat
from jobs.datasets import DatasetConfig, DatasetKind
from jobs.generate import _load_task, _print_results
from jobs.run.command import run_command
from runtime.config.settings import PolicyConfig, SamplingConfig
from runtime.errors import DatasetError

Start = Callable[[GenerateConfig], tuple[str, str]]


def config_in(root: Path) -> GenerateConfig:
    return GenerateConfig(
        run="case",
        output_root=str(root),
        dataset=DatasetConfig(kind=DatasetKind["prompt"], prompt="What is 2 + 3?"),
        policy=PolicyConfig(),
        sampling=SamplingConfig(max_new_tokens=3),
    )


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Runs `jobs.generate` in this process; returns stderr and stdout."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def start(config: GenerateConfig) -> tuple[str, str]:
        errors, output = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stderr", errors)
        monkeypatch.setattr(sys, "stdout", output)
        log_start(logging.getLogger("jobs.generate"), config)
        run_command(config, _load_task, lambda outcome: _print_results(config, outcome), at=0.0, clock=0.0)
        return errors.getvalue(), output.getvalue()

    yield start
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_stderr_has_a_few_lines_and_the_run_log_all_details(start: Start, tmp_path: Path) -> None:
    errors, output = start(config_in(tmp_path))
    lines = [re.sub(r"^\S+ \S+ INFO ", "", line) for line in errors.splitlines()]
    shown = "\n".join(line for line in lines if not line.startswith("compiling kernels"))
    assert len(lines) <= 7, lines
    assert f"results go to {tmp_path}/generate/case" in shown
    assert re.search(r"^plan: 1 block of up to 1 row; all weights resident$", shown, re.M)
    assert re.search(r"^memory: [\d.]+ MiB of [\d.]+ GiB host memory$", shown, re.M)
    logged = (tmp_path / "generate" / "case" / "run.log").read_text()
    first, *details = logged.splitlines()
    assert first.startswith("# weightstream ")
    assert "results go to" in details[0], "records before the directory was known"
    for part in ("schedule  zigzag", "resident weights", "opening files", "summary:", "generating 1 completion"):
        assert part in logged, part
    assert "rows ok" in output


def test_quiet_prints_the_answer_alone(start: Start, tmp_path: Path) -> None:
    errors, output = start(replace(config_in(tmp_path), quiet=True))
    assert (errors, len(output.splitlines())) == ("", 1)
    assert "plan:" in (tmp_path / "generate" / "case" / "run.log").read_text()


def test_a_summary_in_json_is_all_of_stdout(start: Start, tmp_path: Path) -> None:
    config = replace(config_in(tmp_path), summary=SummaryFormat.json)
    first, again = (json.loads(start(config)[1]) for _ in range(2))
    directory = tmp_path / "generate" / "case"
    assert (first["run"], first["exit_code"], first["was_finished"]) == (str(directory), 0, False)
    assert first["summary"] == json.loads((directory / "summary.json").read_text())
    assert (again["was_finished"], again["summary"]["rows"]) == (True, {"ok": 1, "error": 0, "skipped": 0})


@pytest.mark.usefixtures("start")
def test_a_run_log_says_why_its_run_ended_early(tmp_path: Path) -> None:
    logs.setup_logging(LogLevel.error)
    with suppress(DatasetError), run_log(tmp_path / "run.log"):
        raise DatasetError("no rows")
    assert "DatasetError: no rows" in (tmp_path / "run.log").read_text()


def test_a_log_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(logs, "MAX_BUFFERED", 10)
    record = logging.LogRecord("jobs", logging.INFO, "", 0, "line", None, None)
    for path in (tmp_path / "link", tmp_path / "no" / "run.log"):
        with run_log(path):
            RECORDS.emit(record)
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize(("level", "shown"), [(LogLevel.debug, ["a", "b"]), (LogLevel.info, ["b"])])
@pytest.mark.usefixtures("start")
def test_the_level_is_that_of_the_screen(level: LogLevel, shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging(level)
    logging.getLogger("runtime.x").debug("a")
    logging.getLogger("runtime.x").info("b")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == shown
