"""The command at the end of a run: it runs once, however the run ends, and never changes how."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jobs.config.logs import RunLog
from jobs.config.settings import DevicesConfig, GenerateConfig, Workers
from jobs.files.locks import RunLock
from jobs.record.run_dir import RunDirectory
from jobs.tracking import follower, on_end
from jobs.tracking.follower import RunFollower
from jobs.tracking.on_end import run_on_end
from runtime.config.settings import Parallelism
from runtime.errors import ConfigError, Interrupted, StorageError

ROOT = Path(__file__).resolve().parents[2]
WRITE = 'printf "%s|%s|%s|%s\\n" "$WEIGHTSTREAM_EXIT_CODE" "$WEIGHTSTREAM_STATUS" "$WEIGHTSTREAM_RUN" '
WRITE += '"$WEIGHTSTREAM_ERROR" >> {file}'


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "written"


def config(written: Path, **changes: object) -> GenerateConfig:
    return GenerateConfig(**({"on_end": WRITE.format(file=written)} | changes))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (0, "0|finished|{run}|"),
        (3, "3|errors|{run}|"),
        (Interrupted("stopped"), "75|interrupted|{run}|stopped"),
        (StorageError("no disk"), "75|interrupted|{run}|no disk"),
        (ConfigError("$(touch /tmp/never) 'x'"), "2|failed|{run}|$(touch /tmp/never) 'x'"),
        (KeyboardInterrupt(), "75|interrupted|{run}|KeyboardInterrupt: "),
        (ZeroDivisionError("by 0"), "70|failed|{run}|ZeroDivisionError: by 0"),
    ],
)
def test_it_gets_exit_code_status_run_and_error(
    end: int | BaseException, told: str, written: Path, tmp_path: Path
) -> None:
    try:
        with RunFollower(config(written), tmp_path / "run") as following:
            if isinstance(end, BaseException):
                raise end
            following.exit_code = end
    except BaseException as error:
        ended_by = error
    else:
        ended_by = end
    assert ended_by is end, "the run ends as it would have"
    assert written.read_text() == told.format(run=tmp_path / "run") + "\n"


def test_its_failure_is_logged_and_its_output_goes_to_stderr(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    run_on_end("echo out; exit 5", {}, 10)
    run_on_end("kill -9 $$", {}, 10)
    run_on_end("true \0", {}, 10)
    assert capfd.readouterr() == ("", "out\n")
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "on_end ended with exit code 5; the run is not affected",
        "on_end ended with SIGKILL; the run is not affected",
        "on_end could not be started: embedded null byte",
    ]


def test_one_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(on_end, "TERM_SECONDS", 0.2)
    begin = time.monotonic()
    run_on_end(f"trap '' TERM; sleep 300 & echo $! > {tmp_path}/child; wait; sleep 300", {}, 0.5)
    assert time.monotonic() - begin < 60
    assert "did not end within 0.5 s (on_end_seconds) and was stopped" in caplog.text
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the child lives"
        time.sleep(0.02)


def test_a_signal_stops_it_and_not_the_exit_code(caplog: pytest.LogCaptureFixture) -> None:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    run_on_end("sleep 300", {}, 100)
    assert "on_end was stopped by SIGTERM" in caplog.text


def test_of_several_ranks_the_first_runs_it(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with RunFollower(config(written, devices=DevicesConfig(way=Parallelism.sharded)), tmp_path):
            pass
        assert written.exists() is (rank == "0")


def test_a_worker_of_a_command_leaves_it_to_the_command(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic = config(written, workers=Workers.elastic)
    monkeypatch.setenv("WEIGHTSTREAM_WORKER", "3 2 1")
    with RunFollower(elastic, tmp_path):
        pass
    assert not written.exists()
    monkeypatch.delenv("WEIGHTSTREAM_WORKER")
    with RunFollower(elastic, tmp_path):
        pass
    assert written.exists()


def test_of_elastic_workers_the_last_that_leaves_runs_it(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "NUM_LOOKS", 2)
    run = RunDirectory(path=tmp_path / "run")
    run.leases.mkdir(parents=True)
    other = RunLock(run.lock, is_shared=True)
    for is_last in (False, True):
        if is_last:
            other.release()
        with RunFollower(config(written, workers=Workers.elastic), run.path):
            pass
        assert written.exists() is is_last


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"on_end": " "}, "on_end is empty"), ({"on_end_seconds": 0.0}, "on_end_seconds must be above")],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GenerateConfig(**changes)  # pyright: ignore[reportArgumentType]


def test_the_log_of_a_run_does_not_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "-m", "jobs.generate", "run=mine", "on_end=curl secret", "++on_end=x"]
    )
    log = RunLog()
    log.open(tmp_path / "run.log")
    assert (tmp_path / "run.log").read_text().endswith(": -m jobs.generate run=mine on_end=... on_end=...\n")


@pytest.mark.slow("jobs/test_on_end.py::test_it_gets_exit_code_status_run_and_error")
@pytest.mark.parametrize("words", [[], ["workers=elastic", "num_workers=2"]], ids=["one", "workers"])
def test_a_command_line_runs_it_once_after_each_start_with_the_code_of_the_run(
    words: list[str], written: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    command = [
        *(sys.executable, "-m", "jobs.generate", f"output_root={tmp_path}", "run=mine", f"dataset.path={rows}"),
        *("sampling.max_new_tokens=2", f"on_end={WRITE.format(file=written)}; exit 9", *words),
        *("policy=fixed", "policy.micro_batch_size=1", f"metrics_file={tmp_path}/ws.prom"),
    ]
    num_starts = 1 if words else 2
    for _ in range(num_starts):
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 3, ended.stderr
        assert "on_end ended with exit code 9" in ended.stderr
    assert written.read_text() == num_starts * f"3|errors|{tmp_path / 'generate' / 'mine'}|\n"
    files = [path for path in (tmp_path / "generate").rglob("*") if path.is_file()]
    assert [path for path in files if b"exit 9" in path.read_bytes()] == []
    names = ["ws-0.prom", "ws-1.prom"] if words else ["ws.prom"]
    assert sorted(path.name for path in tmp_path.glob("*.prom")) == names
    texts = [(tmp_path / name).read_text() for name in names]
    assert all('weightstream_run_rows_planned{run="mine",job="generate"' in text for text in texts)
