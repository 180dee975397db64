"""What nobody foresaw ends in an error of ours, and its traceback is in a file."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch

from jobs.config.error_log import log_errors, to_user_error
from runtime.errors import BudgetError, ConfigError, InternalError, MemoryShortage

TOO_MUCH = 1 << 60  # bytes


def allocated() -> None:
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def mapped() -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def threaded() -> None:
    raise RuntimeError("can't start new thread")


def in_python() -> None:
    bytearray(TOO_MUCH)


def loaded() -> None:
    try:
        raise OSError("library.so: failed to map segment from shared object")
    except OSError as error:
        raise ValueError("a library cannot be loaded") from error


@pytest.mark.parametrize("run_out", [allocated, mapped, threaded, in_python, loaded])
def test_memory_that_ran_out_is_refused_before_a_run_begins_and_resumable_behind(
    run_out: object, tmp_path: Path
) -> None:
    assert callable(run_out)
    with pytest.raises(BudgetError, match="out of memory"), log_errors():
        run_out()
    with pytest.raises(MemoryShortage, match="out of memory") as ended, log_errors(tmp_path / "run.log"):
        run_out()
    assert ended.value.exit_code == 75
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_of_ours_names_the_log_that_has_its_traceback(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("before\n")
    for number in (1, 2):
        line = f"ValueError: mistake {number}; the traceback is in {path}"
        with pytest.raises(InternalError, match=line), log_errors(path):
            raise ValueError(f"mistake {number}\nmore")
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.count("Traceback") == 2
    assert "test_error_log.py" in text
    assert InternalError.exit_code == 70


def test_a_log_that_is_a_link_or_cannot_be_written_leaves_the_traceback_in_the_jobs_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other, link = tmp_path / "precious", tmp_path / "run.log"
    other.write_text("mine")
    link.symlink_to(other)
    assert "the log above" in str(to_user_error(ValueError("a mistake"), link))
    assert other.read_text() == "mine"
    assert "ValueError: a mistake" in caplog.text


def test_a_home_that_nobody_has_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="write the full path"), log_errors():
        Path("~nobody-of-this-name/prompts.jsonl").expanduser()


def test_a_machine_without_room_for_temporary_files_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(ConfigError, match="Set TMPDIR"), log_errors():
        tempfile.gettempdir()


def test_a_path_that_no_file_can_have_is_refused_by_its_beginning(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"path too long: '.*' \.\.\."), log_errors():
        (tmp_path / ("x" * 5000)).exists()
