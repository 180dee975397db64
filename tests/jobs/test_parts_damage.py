"""Damaged, foreign and missing parts: kept aside, remade, never read as good."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.files.publishing import file_sha256
from jobs.record.parts import PartStore
from jobs.record.success import is_finished
from runtime.errors import DamagedRunError, OutputError
from tests.generations import read_generations
from tests.jobs.part_support import (
    MANIFEST,
    PASSES,
    PLAN,
    committed_store,
    parts,
    quarantined,
    rows_of,
    store_at,
)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "text"])
def test_a_corrupt_part_is_kept_aside_and_its_block_is_open_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = committed_store(tmp_path)
    before, path = parts(store), store.directory.generations_part(1)
    whole = path.read_bytes()
    at = whole.index(b"text [")
    damaged = {
        "flip": whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :],
        "cut": whole[:-9],
        "empty": b"",
        "text": b"hello",
    }[damage]
    path.write_bytes(damaged)
    assert list(store.committed_parts()) == [0, 2]
    assert [kept.read_bytes() for kept in quarantined(store)] == [damaged]
    assert "part-00001.parquet was moved to" in caplog.text
    assert store.commit(1, rows_of(1), PASSES)
    assert parts(store) == before
    assert list(store.committed_parts()) == [0, 1, 2]


def _foreign_part(store: PartStore, folder: Path) -> None:
    other = store_at(folder, manifest=replace(MANIFEST, semantic={"model.name": "other"}))
    other.commit(1, rows_of(1), PASSES)
    store.directory.generations_part(1).write_bytes(other.directory.generations_part(1).read_bytes())


def _other_rows(store: PartStore, folder: Path) -> None:
    other = store_at(folder, plan=list(reversed(PLAN)))
    other.commit(1, rows_of(1), PASSES)
    store.directory.generations_part(1).write_bytes(other.directory.generations_part(1).read_bytes())


def _plain_parquet(store: PartStore, folder: Path) -> None:
    pq.write_table(pa.table({"id": ["row 2"]}), store.directory.generations_part(1))


def _copy_over(store: PartStore, folder: Path) -> None:
    store.directory.generations_part(1).write_bytes(store.directory.generations_part(0).read_bytes())


def _folder(store: PartStore, folder: Path) -> None:
    store.directory.generations_part(1).unlink()
    store.directory.generations_part(1).mkdir()


@pytest.mark.parametrize("spoil", [_foreign_part, _other_rows, _plain_parquet, _copy_over, _folder])
def test_a_part_that_is_not_this_blocks_is_quarantined(tmp_path: Path, spoil) -> None:
    store = committed_store(tmp_path / "run")
    spoil(store, tmp_path / "other")
    assert list(store.committed_parts()) == [0, 2]
    assert len(quarantined(store)) == 1


@pytest.mark.parametrize(
    "name", ["part-00001 (copy).parquet", "part-00007.parquet", "notes.txt", "part-00001.parquet.bak"]
)
def test_a_stray_file_is_quarantined_and_costs_no_block(tmp_path: Path, name: str) -> None:
    store = committed_store(tmp_path)
    data = store.directory.generations_part(1).read_bytes()
    (store.directory.generations / name).write_bytes(data)
    assert list(store.committed_parts()) == [0, 1, 2]
    assert [path.read_bytes() for path in quarantined(store)] == [data]
    assert read_generations(store.directory).num_rows == len(PLAN)


def test_quarantine_never_overwrites(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    for data in (b"one", b"two"):
        store.directory.generations_part(0).write_bytes(data)
        store.committed_parts()
    assert sorted(path.read_bytes() for path in quarantined(store)) == [b"one", b"two"]


def test_a_damaged_throughput_part_costs_numbers_and_no_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = committed_store(tmp_path)
    store.directory.throughput_part(1).write_bytes(b"x")
    assert list(store.committed_parts()) == [0, 1, 2]
    assert store.read_passes() == PASSES * 2
    assert "the summary does not include block 1" in caplog.text


def test_an_unreadable_disk_is_no_verdict_on_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = committed_store(tmp_path)

    def fail(_: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OutputError, match="EIO"):
        store.committed_parts()
    monkeypatch.undo()
    assert quarantined(store) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("step", ["fsync", "link", "replace"])
def test_a_fault_in_a_commit_keeps_earlier_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    store = store_at(tmp_path)
    store.commit(0, rows_of(0), PASSES)
    before = parts(store)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OutputError, match=errno.errorcode[number]) as caught:
        store.commit(1, rows_of(1), PASSES)
    monkeypatch.undo()
    assert caught.value.exit_code == 75
    assert parts(store) == before
    assert store.commit(1, rows_of(1), PASSES)
    assert list(store.committed_parts()) == [0, 1]


def test_a_directory_deleted_during_the_run_is_an_output_error(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.commit(0, rows_of(0), PASSES)
    store.directory.throughput.rename(tmp_path / "gone")
    with pytest.raises(OutputError, match="ENOENT"):
        store.commit(1, rows_of(1), PASSES)
    with pytest.raises(OutputError, match="ENOENT"):
        store.committed_parts()


def test_parts_that_a_plan_seats_otherwise_are_left_alone_and_need_a_person(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    store.require_same_plan()
    others = [replace(request, block=(request.block + 1) % 3) for request in PLAN]
    with pytest.raises(DamagedRunError, match="does not fit 3 existing parts") as refused:
        store_at(tmp_path, plan=others).require_same_plan()
    assert refused.value.exit_code == 4
    store.directory.generations_part(0).write_bytes(b"torn")
    with pytest.raises(DamagedRunError, match="does not fit 2 existing parts"):
        store_at(tmp_path, plan=others).require_same_plan()
    store.require_same_plan()


# --- finish


def test_success_lists_every_part_with_its_digest(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    assert not is_finished(store.directory)
    store.publish_success()
    success = json.loads(store.directory.success.read_text())
    assert success["rows"] == {"ok": 10, "error": 2}
    assert [(part["file"], part["sha256"]) for part in success["parts"]] == [
        (path.name, file_sha256(path)) for path in sorted(store.directory.generations.iterdir())
    ]
    assert is_finished(store.directory)


def test_finish_refuses_while_a_block_is_missing(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.commit(0, rows_of(0), PASSES)
    with pytest.raises(OutputError, match=r"2 of 3 blocks are missing \(first: 1\)"):
        store.publish_success()
    assert not store.directory.success.exists()


@pytest.mark.parametrize("damage", ["flip", "missing", "extra", "torn success"])
def test_a_finished_run_that_was_touched_is_not_finished_and_heals(tmp_path: Path, damage: str) -> None:
    store = committed_store(tmp_path)
    store.publish_success()
    before, path = parts(store), store.directory.generations_part(2)
    if damage == "flip":
        path.write_bytes(path.read_bytes().replace(b"text [", b"tExt ["))
    elif damage == "missing":
        path.unlink()
    elif damage == "extra":
        (store.directory.generations / "more.parquet").write_bytes(path.read_bytes())
    else:
        store.directory.success.write_text("{")
    assert not is_finished(store.directory)
    for block in set(store.blocks) - set(store.committed_parts()):
        assert not store.directory.success.exists()
        store.commit(block, rows_of(block), PASSES)
    store.publish_success()
    assert is_finished(store.directory)
    assert parts(store) == before


def test_reading_a_damaged_part_is_an_error_and_never_other_text(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    path = store.directory.generations_part(1)
    path.write_bytes(path.read_bytes().replace(b"text [", b"tExt [", 1))
    with pytest.raises(DamagedRunError, match=r"part-00001\.parquet"):
        read_generations(store.directory)
