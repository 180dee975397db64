"""A part is the one that was written, by a digest of its rows, and the one that was recorded, by its SHA-256."""

import io
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.files.publishing import PARQUET_PROBLEMS, file_sha256, write_parquet
from jobs.files.row_digest import DIGEST_KEY, sign, values_digest
from jobs.record.parts import PartStore
from jobs.record.success import is_finished
from runtime.errors import DamagedRunError
from tests.generations import read_generations
from tests.jobs.part_support import PASSES, committed_store, parts, quarantined, rows_of


def test_the_digest_of_rows_sees_every_value_and_not_how_they_lie_in_memory() -> None:
    columns = {
        "text": pa.array(["a", None, ""]),
        "flag": pa.array([True, None, False]),
        "number": pa.array([1.5, float("nan"), None], pa.float32()),
        "tops": pa.array([[[1.0], []], [], None], pa.list_(pa.list_(pa.float32()))),
    }
    table = pa.table(columns)
    digest = values_digest(table)
    assert values_digest(pa.concat_tables([table.slice(0, 1), table.slice(1)])) == digest
    others = [
        table.set_column(0, "text", pa.array(["a", "", None])),
        table.set_column(0, "text", pa.array(["", "a", None])),
        table.set_column(1, "flag", pa.array([True, False, None])),
        table.set_column(2, "number", pa.array([1.5, 0.0, None], pa.float32())),
        table.set_column(3, "tops", pa.array([[[1.0, 2.0], []], [], None], columns["tops"].type)),
        table.set_column(3, "tops", pa.array([[[], [1.0]], [], None], columns["tops"].type)),
        table.set_column(3, "tops", pa.array([[[1.0], []], None, []], columns["tops"].type)),
        table.rename_columns(["text", "flag", "number", "other"]),
        table.replace_schema_metadata({b"a": b"b"}),
        table.slice(0, 2),
    ]
    assert len({digest, *map(values_digest, others)}) == 1 + len(others)


@pytest.mark.parametrize("stride", [32, pytest.param(2, marks=pytest.mark.slow)])
def test_no_flipped_bit_is_accepted_with_other_values(stride: int, tmp_path: Path) -> None:
    """A sixteenth of all, or fewer except where the footer begins: there Parquet's own checksums let some pass with
    other values."""
    store = committed_store(tmp_path)
    path = store.directory.generations_part(1)
    whole, table = path.read_bytes(), pq.ParquetFile(path).read()
    rejected, footer = 0, len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    positions = sorted({*range(0, len(whole), stride), *range(footer, footer + 500, 2)})
    for position in positions:
        flipped = bytearray(whole)
        flipped[position] ^= 2
        try:
            read = store._parse_table(bytes(flipped), 1, store._schema)
        except PARQUET_PROBLEMS:
            rejected += 1
        else:
            assert str(read.to_pylist()) == str(table.to_pylist()), position
    assert rejected > len(positions) / 2


def _changed_row(store: PartStore) -> bytes:
    """Part 1 with other tokens in a row, whole in every way that Parquet knows of."""
    table = pq.ParquetFile(store.directory.generations_part(1)).read()
    rows = table.to_pylist()
    rows[2]["token_ids"] = rows[2]["token_ids"][:-1]
    buffer = io.BytesIO()
    write_parquet(pa.Table.from_pylist(rows, schema=table.schema), buffer)
    return buffer.getvalue()


def test_other_values_under_the_right_footer_are_noticed_before_and_after_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = committed_store(tmp_path)
    before, path = parts(store), store.directory.generations_part(1)
    path.write_bytes(_changed_row(store))
    with pytest.raises(DamagedRunError, match="their digest differs"):
        read_generations(store.directory)
    assert list(store.committed_parts()) == [0, 2]
    assert "its rows were changed after they were written" in caplog.text
    store.commit(1, rows_of(1), PASSES)
    store.publish_success()
    assert parts(store) == before
    assert is_finished(store.directory)


def test_a_part_without_its_digest_is_not_believed(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    path = store.directory.generations_part(1)
    table = pq.ParquetFile(path).read()
    metadata = {key: value for key, value in table.schema.metadata.items() if key != DIGEST_KEY}
    with path.open("wb") as file:
        write_parquet(table.replace_schema_metadata(metadata), file)
    assert list(store.committed_parts()) == [0, 2]


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def _harmless_flip(store: PartStore) -> int:
    """A position in part 1 where a flipped bit changes no value and that no checksum covers."""
    data = store.directory.generations_part(1).read_bytes()
    for position in range(len(data) - 1, 0, -1):
        flipped = bytearray(data)
        flipped[position] ^= 1
        with suppress(*PARQUET_PROBLEMS):
            store._parse_table(bytes(flipped), 1, store._schema)
            return position
    pytest.fail("every flip is noticed")


def test_a_part_that_is_not_the_recorded_one_is_made_again_and_never_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    store = committed_store(tmp_path)
    store.publish_success()
    before, recorded = parts(store), store.directory.success.read_bytes()
    _flip(store.directory.generations_part(1), _harmless_flip(store))
    assert not is_finished(store.directory)
    assert list(store.committed_parts()) == [0, 2]
    assert "its SHA-256 differs from _SUCCESS.json" in caplog.text
    store.commit(1, rows_of(1), PASSES)
    store.publish_success()
    assert (parts(store), store.directory.success.read_bytes()) == (before, recorded)
    assert "byte for byte those listed" in caplog.text


def test_a_remade_part_that_comes_out_otherwise_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = committed_store(tmp_path)
    store.publish_success()
    store.directory.generations_part(1).unlink()
    store.committed_parts()
    store.commit(1, [replace(row, completion="other") for row in rows_of(1)], PASSES)
    store.publish_success()
    assert "regenerated parts differ from those listed in" in caplog.text
    assert "part-00001.parquet" in caplog.text.splitlines()[-1]


def test_what_a_damaged_success_records_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = committed_store(tmp_path)
    store.publish_success()
    good = store.directory.success.read_text()
    sha256 = file_sha256(store.directory.generations_part(1))
    store.directory.success.write_text(good.replace(sha256, sha256[::-1]))
    assert not is_finished(store.directory)
    assert list(store.committed_parts()) == [0, 1, 2]
    assert "is ignored" in caplog.text
    store.publish_success()
    assert store.directory.success.read_text() == good


def test_a_link_in_the_place_of_a_part_is_put_aside_and_what_it_leads_to_is_left(tmp_path: Path) -> None:
    store = committed_store(tmp_path / "run")
    store.publish_success()
    path, elsewhere = store.directory.generations_part(1), tmp_path / "mine.parquet"
    elsewhere.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(elsewhere)
    assert not is_finished(store.directory)
    assert list(store.committed_parts()) == [0, 2]
    assert quarantined(store)[0].is_symlink()
    assert store.commit(1, rows_of(1), PASSES)
    assert not path.is_symlink()
    assert elsewhere.read_bytes() == path.read_bytes()


def test_rows_of_another_plan_under_the_right_footer_are_refused(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    path = store.directory.generations_part(1)
    table = pq.ParquetFile(path).read()
    path.unlink()
    store._publish(path, table, 1, exclusive=True)
    assert list(store.committed_parts()) == [0, 1, 2]
    for others in (table.take([1, 0, 2, 3]), table.set_column(0, table.schema.field(0), pa.array(["x"] * 4))):
        buffer = io.BytesIO()
        write_parquet(sign(others, store._footer(1)), buffer)
        with pytest.raises(ValueError, match="its rows differ from the plan"):
            store._parse_table(buffer.getvalue(), 1, store._schema)
