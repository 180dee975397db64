"""Whole files are read once for their SHA-256, and again when they were written."""

import hashlib
import json
import logging
import os
from pathlib import Path

import pytest

from runtime.errors import CheckpointError, Interrupted
from runtime.store import file_digests
from runtime.store.file_digests import BUFFER_BYTES, digest_files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(BUFFER_BYTES + 5))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if all files had been written long ago."""
    monkeypatch.setattr(file_digests, "SETTLED_SECONDS", 0.0)
    return tmp_path / "cache"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: object) -> str:
        raise AssertionError("a file was read again")

    monkeypatch.setattr(file_digests, "_digest_file", read)


def test_a_kept_digest_is_used_again_and_not_when_the_file_was_written(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=file_digests.__name__):
        assert digest_files([str(file)], cache) == {str(file): sha256(file)}
    begun, ended = (record.getMessage() for record in caplog.records)
    assert begun.endswith("of 1 file, 0.01 GiB")
    assert ended.endswith(" s")
    with monkeypatch.context() as patch:
        forbid_reading(patch)
        assert digest_files([str(file)], cache) == {str(file): sha256(file)}
    before = file.stat()
    with file.open("r+b") as handle:
        handle.seek(1000)
        handle.write(b"another")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # a date that was set back deceives nobody: ctime
    assert digest_files([str(file)], cache) == {str(file): sha256(file)}


def test_a_digest_is_kept_by_path_size_dates_and_inode(file: Path, cache: Path) -> None:
    digest_files([str(file)], cache)
    (kept,) = (cache / "digests").iterdir()
    values = json.loads(kept.read_text())
    assert set(values["file"]) == {"path", "size", "mtime_ns", "ctime_ns", "inode"}
    for key, value in values["file"].items():
        other = {"file": values["file"] | {key: f"{value}0"}, "sha256": "0" * 64}
        kept.write_text(json.dumps(other))
        assert digest_files([str(file)], cache) == {str(file): sha256(file)}, key


def test_a_file_that_was_written_just_now_is_read_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests, "SETTLED_SECONDS", 3600.0)
    digest_files([str(file)], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"file": {}, "sha256": 5}', "\x00"])
def test_a_kept_digest_that_is_broken_counts_as_none(text: str, file: Path, cache: Path) -> None:
    digest_files([str(file)], cache)
    (kept,) = (cache / "digests").iterdir()
    kept.write_text(text)
    assert digest_files([str(file)], cache) == {str(file): sha256(file)}
    assert json.loads(kept.read_text())["sha256"] == sha256(file)


def test_where_nothing_can_be_kept_files_are_read_all_the_same(
    file: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("no directory")
    assert digest_files([str(file)], cache) == {str(file): sha256(file)}
    assert "the next start reads" in caplog.text


def linked(file: Path, name: str) -> Path:
    blob = file.parent / "blobs" / name
    blob.parent.mkdir()
    file.rename(blob)
    link = file.parent / "snapshots" / file.name
    link.parent.mkdir()
    link.symlink_to(Path("..") / "blobs" / name)
    return link


def test_a_blob_that_is_not_the_one_of_its_name_is_refused(file: Path, cache: Path) -> None:
    digest, name = sha256(file), "a" * 64
    link = linked(file, name)
    for _ in range(2):  # of a kept digest too
        with pytest.raises(CheckpointError, match=f"{link}: .*expected sha256 {name} .*got {digest}"):
            digest_files([str(link)], cache)


@pytest.mark.parametrize("is_digest", [True, False])
def test_a_blob_of_its_name_or_of_a_name_of_another_kind_is_taken(is_digest: bool, file: Path, cache: Path) -> None:
    digest = sha256(file)
    link = linked(file, digest if is_digest else "a" * 40)
    assert digest_files([str(link)], cache) == {str(link): digest}


def test_a_stop_ends_the_reading_and_keeps_nothing_of_it(file: Path, cache: Path) -> None:
    with pytest.raises(Interrupted):
        digest_files([str(file)], cache, lambda: True)
    assert not cache.exists()


def test_a_file_that_is_written_meanwhile_is_refused(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = file_digests._digest_file

    def read(name: str, should_stop: object, asked_by: str) -> str:
        digest = real(name, lambda: False, asked_by)
        file.write_bytes(b"another")
        return digest

    monkeypatch.setattr(file_digests, "_digest_file", read)
    with pytest.raises(CheckpointError, match=f"{file}: was written while"):
        digest_files([str(file)], cache)
