"""A part is committed once, and what it holds follows from the plan."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.record.output_rows import GenerationRow
from jobs.record.success import is_finished
from tests.generations import read_generations
from tests.jobs.part_support import (
    MANIFEST,
    PASSES,
    PLAN,
    committed_store,
    parts,
    rows_of,
    store_at,
)


def test_every_planned_request_comes_out_once_in_plan_order(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    for block in (2, 0, 1):
        assert store.commit(block, list(reversed(rows_of(block))), PASSES)
    table = read_generations(store.directory)
    ordered = sorted(PLAN, key=lambda request: request.block)
    assert list(zip(table["id"].to_pylist(), table["sample_index"].to_pylist(), strict=True)) == [
        r.key for r in ordered
    ]
    assert table["num_prompt_tokens"].to_pylist() == [request.num_prompt_tokens for request in ordered]
    assert table["block"].to_pylist() == [request.block for request in ordered]
    assert {name: part.num_rows for name, part in store.committed_parts().items()} == {0: 4, 1: 4, 2: 4}
    assert store.committed_parts()[2].rows == {"ok": 2, "error": 2}


def test_a_row_carries_its_own_columns_and_our_names_win(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    row = pq.ParquetFile(store.directory.generations_part(0)).read().to_pylist()[0]
    assert (row["id"], row["row_id"], row["score"], row["text"]) == ("row 0", "own 0", 0.5, "ä\\ud800")
    assert json.loads(row["turns"]) == ["a", {"b": 0}]
    assert (row["token_ids"], row["num_completion_tokens"], row["finish_reason"]) == ([0, 0, 2], 3, "eos")


def test_generations_are_the_same_bytes_whatever_the_tier_and_machine(tmp_path: Path) -> None:
    first = committed_store(tmp_path / "first")
    second = store_at(tmp_path / "second", manifest=replace(MANIFEST, operational={"offload.tier": "cpu"}, versions={}))
    for block in (1, 2, 0):
        second.commit(block, rows_of(block), PASSES[:1])
    assert parts(first) == parts(second)


def test_throughput_parts_record_passes_and_operational_keys(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    assert store.read_passes() == PASSES * 3
    row = pq.read_table(store.directory.throughput_part(1)).to_pylist()[1]
    assert (row["block"], row["phase"]) == (1, "decode")
    assert json.loads(row["operational"]) == {"offload.tier": "nvme", "versions": {"torch": "2.13"}}


def test_data_folders_hold_only_parquet_that_reads_as_one_table(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    store.publish_success()
    for folder in (store.directory.generations, store.directory.throughput):
        assert sorted(path.name for path in folder.iterdir()) == [f"part-{block:05d}.parquet" for block in range(3)]
        assert pq.read_table(folder).num_rows > 0


def test_an_empty_run_can_finish(tmp_path: Path) -> None:
    store = store_at(tmp_path, plan=[])
    assert not is_finished(store.directory)
    store.publish_success()
    assert is_finished(store.directory)
    assert read_generations(store.directory).num_rows == 0


# --- first commit wins


def test_second_committer_discards(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    before = parts(store)
    other = [replace(row, completion="other") for row in rows_of(0)]
    assert not store.commit(0, other, PASSES[:1])
    assert parts(store) == before
    assert store.read_passes() == PASSES * 3


def test_a_committer_overtaken_at_the_link_discards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    winner, loser, link = store_at(tmp_path), store_at(tmp_path), os.link

    def overtaken(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        assert winner.commit(0, rows_of(0), PASSES)
        link(source, target)

    monkeypatch.setattr(os, "link", overtaken)
    assert not loser.commit(0, [replace(row, completion="other") for row in rows_of(0)], PASSES)
    assert "other" not in read_generations(loser.directory)["completion"].to_pylist()
    assert list(parts(loser)) == ["part-00000.parquet"]


@pytest.mark.parametrize(
    "rows",
    [rows_of(0)[:-1], rows_of(0) + rows_of(0)[:1], rows_of(1), rows_of(0)[:-1] + rows_of(1)[:1]],
    ids=["missing", "twice", "other block", "stranger"],
)
def test_rows_that_are_not_the_plans_are_never_committed(tmp_path: Path, rows: list[GenerationRow]) -> None:
    store = store_at(tmp_path)
    with pytest.raises((AssertionError, KeyError)):
        store.commit(0, rows, PASSES)
    assert parts(store) == {}


# --- damage
