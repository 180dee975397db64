import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.io.files import file_sha256
from jobs.io.parts import PartStore, is_finished, read_generations
from jobs.io.plan_file import (
    GENERATION_SCHEMA,
    GenerationRow,
    PlannedRequest,
    encode_columns,
    fix_plan,
    infer_column_schema,
    plan_digest,
    read_plan,
)
from jobs.io.run_dir import RunDirectory, RunManifest
from jobs.io.summary import PassRow
from runtime.errors import DamagedRunError, MillraceError, OutputError, RunMismatchError

ROOT = Path(__file__).resolve().parents[3]
MANIFEST = RunManifest(
    semantic={"model.name": "tiny"}, operational={"offload.tier": "nvme"}, versions={"torch": "2.13"}
)
PLAN = [
    PlannedRequest(
        row_id=f"row {index}",
        row_index=index,
        sample_index=sample,
        block=(2 * index + sample) // 4,
        micro_batch=sample,
        position=index,
        num_prompt_tokens=10 + index,
        status="rejected" if index == 5 else "planned",
    )
    for index in (2, 0, 1, 4, 5, 3)
    for sample in (0, 1)
]
PASSES = [
    PassRow(
        pass_index=index,
        phase="decode" if index else "prefill",
        num_sequences=4,
        real_tokens=4,
        padded_tokens=4,
        issued_tokens=4,
        useful_tokens=3,
        seconds=0.5,
    )
    for index in range(2)
]


def columns_of(request: PlannedRequest) -> dict[str, object]:
    score = math.nan if request.row_index == 1 else 0.5
    return {
        "id": f"own {request.row_index}",
        "score": score,
        "turns": ["a", {"b": request.row_index}],
        "text": "ä\ud800",
    }


def row_of(request: PlannedRequest) -> GenerationRow:
    if request.status == "rejected":
        return GenerationRow(
            id=request.row_id, sample_index=request.sample_index, status="error", error="line 5: no JSON"
        )
    tokens = [request.row_index, request.sample_index, 2]
    return GenerationRow(
        id=request.row_id,
        sample_index=request.sample_index,
        status="ok",
        completion=f"text {tokens}",
        token_ids=tokens,
        finish_reason="eos",
        columns=columns_of(request),
    )


def rows_of(block: int) -> list[GenerationRow]:
    return [row_of(request) for request in PLAN if request.block == block]


def store_at(path: Path, *, manifest: RunManifest = MANIFEST, plan: Sequence[PlannedRequest] = PLAN) -> PartStore:
    run = RunDirectory(path=path)
    for folder in (run.generations, run.throughput):
        folder.mkdir(parents=True, exist_ok=True)
    columns = infer_column_schema(columns_of(request) for request in plan)
    return PartStore(directory=run, manifest=manifest, plan=plan, columns=columns)


def committed_store(path: Path) -> PartStore:
    store = store_at(path)
    for block in store.blocks:
        assert store.commit(block, rows_of(block), PASSES)
    return store


def parts(store: PartStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.directory.generations.iterdir())}


def quarantined(store: PartStore) -> list[Path]:
    return sorted(store.directory.quarantine.iterdir()) if store.directory.quarantine.exists() else []


# --- what a part holds


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
    assert {name: part.num_rows for name, part in store.committed().items()} == {0: 4, 1: 4, 2: 4}
    assert store.committed()[2].rows == {"ok": 2, "error": 2}


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
    assert store.passes() == PASSES * 3
    row = pq.read_table(store.directory.throughput_part(1)).to_pylist()[1]
    assert (row["block"], row["phase"]) == (1, "decode")
    assert json.loads(row["operational"]) == {"offload.tier": "nvme", "versions": {"torch": "2.13"}}


def test_data_folders_hold_only_parquet_that_reads_as_one_table(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    store.finish()
    for folder in (store.directory.generations, store.directory.throughput):
        assert sorted(path.name for path in folder.iterdir()) == [f"part-{block:05d}.parquet" for block in range(3)]
        assert pq.read_table(folder).num_rows > 0


def test_an_empty_run_can_finish(tmp_path: Path) -> None:
    store = store_at(tmp_path, plan=[])
    assert not is_finished(store.directory)
    store.finish()
    assert is_finished(store.directory)
    assert read_generations(store.directory).num_rows == 0


# --- first commit wins


def test_second_committer_discards(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    before = parts(store)
    other = [replace(row, completion="other") for row in rows_of(0)]
    assert not store.commit(0, other, PASSES[:1])
    assert parts(store) == before
    assert store.passes() == PASSES * 3


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


def test_every_flipped_bit_is_harmless_or_sends_the_part_to_quarantine(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    path = store.directory.generations_part(1)
    whole, table = path.read_bytes(), pq.ParquetFile(path).read()
    rejected = 0
    for position in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        try:
            read = store._read(bytes(flipped), 1, store._schema)
        except (pa.ArrowException, OSError, ValueError):
            rejected += 1
        else:
            assert str(read.to_pylist()) == str(table.to_pylist()), position
    assert rejected > len(whole) / 3 / 4


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
    assert list(store.committed()) == [0, 2]
    assert [kept.read_bytes() for kept in quarantined(store)] == [damaged]
    assert "part-00001.parquet was moved to" in caplog.text
    assert store.commit(1, rows_of(1), PASSES)
    assert parts(store) == before
    assert list(store.committed()) == [0, 1, 2]


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
    assert list(store.committed()) == [0, 2]
    assert len(quarantined(store)) == 1


@pytest.mark.parametrize(
    "name", ["part-00001 (copy).parquet", "part-00007.parquet", "notes.txt", "part-00001.parquet.bak"]
)
def test_a_stray_file_is_quarantined_and_costs_no_block(tmp_path: Path, name: str) -> None:
    store = committed_store(tmp_path)
    data = store.directory.generations_part(1).read_bytes()
    (store.directory.generations / name).write_bytes(data)
    assert list(store.committed()) == [0, 1, 2]
    assert [path.read_bytes() for path in quarantined(store)] == [data]
    assert read_generations(store.directory).num_rows == len(PLAN)


def test_quarantine_never_overwrites(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    for data in (b"one", b"two"):
        store.directory.generations_part(0).write_bytes(data)
        store.committed()
    assert sorted(path.read_bytes() for path in quarantined(store)) == [b"one", b"two"]


def test_a_damaged_throughput_part_costs_numbers_and_no_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = committed_store(tmp_path)
    store.directory.throughput_part(1).write_bytes(b"x")
    assert list(store.committed()) == [0, 1, 2]
    assert store.passes() == PASSES * 2
    assert "the summary lacks block 1" in caplog.text


def test_an_unreadable_disk_is_no_verdict_on_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = committed_store(tmp_path)

    def fail(_: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OutputError, match="EIO"):
        store.committed()
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
    assert list(store.committed()) == [0, 1]


def test_a_directory_deleted_during_the_run_is_an_output_error(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.commit(0, rows_of(0), PASSES)
    store.directory.throughput.rename(tmp_path / "gone")
    with pytest.raises(OutputError, match="ENOENT"):
        store.commit(1, rows_of(1), PASSES)
    with pytest.raises(OutputError, match="ENOENT"):
        store.committed()


# --- finish


def test_success_lists_every_part_with_its_digest(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    assert not is_finished(store.directory)
    store.finish()
    success = json.loads(store.directory.success.read_text())
    assert success["rows"] == {"ok": 10, "error": 2}
    assert [(part["file"], part["sha256"]) for part in success["parts"]] == [
        (path.name, file_sha256(path)) for path in sorted(store.directory.generations.iterdir())
    ]
    assert is_finished(store.directory)


def test_finish_refuses_while_a_block_is_missing(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.commit(0, rows_of(0), PASSES)
    with pytest.raises(OutputError, match=r"lacks 2 of 3 blocks \(first: 1\)"):
        store.finish()
    assert not store.directory.success.exists()


@pytest.mark.parametrize("damage", ["flip", "missing", "extra", "torn success"])
def test_a_finished_run_that_was_touched_is_not_finished_and_heals(tmp_path: Path, damage: str) -> None:
    store = committed_store(tmp_path)
    store.finish()
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
    for block in set(store.blocks) - set(store.committed()):
        assert not store.directory.success.exists()
        store.commit(block, rows_of(block), PASSES)
    store.finish()
    assert is_finished(store.directory)
    assert parts(store) == before


def test_reading_a_damaged_part_is_an_error_and_never_other_text(tmp_path: Path) -> None:
    store = committed_store(tmp_path)
    path = store.directory.generations_part(1)
    path.write_bytes(path.read_bytes().replace(b"text [", b"tExt [", 1))
    with pytest.raises(DamagedRunError, match=r"part-00001\.parquet"):
        read_generations(store.directory)


# --- kill -9

KILLER = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_parts as case
from jobs.io import files

STEPS = ("fsync", "link", "unlink", "replace", "rename", "mkdir")

def die_at(number, before):
    count = 0
    def wrap(real):
        def step(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == number and before:
                os.kill(os.getpid(), signal.SIGKILL)
            mine = count == number
            try:
                return real(*arguments, **keywords)
            finally:
                if mine:
                    os.kill(os.getpid(), signal.SIGKILL)
        return step
    for name in STEPS:
        setattr(os, name, wrap(getattr(os, name)))

def child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def work(store):
    for block in sorted(set(store.blocks) - set(store.committed())):
        store.commit(block, case.rows_of(block), case.PASSES)
    store.finish()

def visible(store):
    return sorted(n for n in os.listdir(store.directory.generations) if not n.startswith("."))

def audit(store, reference):
    whole = case.parts(reference)
    for name in visible(store):
        data = (store.directory.generations / name).read_bytes()
        assert data == whole[name] or data == b"corrupt", name
    assert not store.directory.success.exists() or case.is_finished(store.directory), "success over missing parts"

base = Path(sys.argv[1])
reference = case.committed_store(base / "reference")
reference.finish()
kills = 0
for before in (True, False):
    number, code = 0, None
    while code != 0:
        number += 1
        store = case.store_at(base / f"{{before}}{{number}}")
        store.commit(0, case.rows_of(0), case.PASSES)
        store.directory.generations_part(0).write_bytes(b"corrupt")
        code = child(lambda: (die_at(number, before), work(store)))
        assert code in (0, -signal.SIGKILL), code
        kills += code != 0
        audit(store, reference)
        assert child(lambda: (die_at(number + 1, before), work(store))) in (0, -signal.SIGKILL)  # killed while resuming
        audit(store, reference)
        work(store)
        assert case.parts(store) == case.parts(reference)
        assert case.is_finished(store.directory)
        assert [p.read_bytes() for p in case.quarantined(store)] == [b"corrupt"]
        left = [p.name for p in store.directory.path.rglob(".*")]
        assert left == [], left
print(kills)
"""


def test_kill_at_every_commit_step_and_again_while_resuming_gives_the_same_bytes(tmp_path: Path) -> None:
    script = KILLER.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 60


def test_a_file_size_limit_of_the_kernel_commits_nothing(tmp_path: Path) -> None:
    script = f"""if True:
        import resource, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_parts as case
        from runtime.errors import OutputError
        store = case.store_at(Path({str(tmp_path)!r}))
        store.commit(0, case.rows_of(0), case.PASSES)
        before = case.parts(store)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            store.commit(1, case.rows_of(1), case.PASSES)
        except OutputError as error:
            assert "EFBIG" in str(error), error
        else:
            raise SystemExit("committed more than the limit allows")
        assert case.parts(store) == before
    """
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# --- the plan


def test_plan_is_written_once_and_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.parquet"
    fix_plan(path, PLAN)
    before = path.read_bytes()
    fix_plan(path, list(PLAN))
    assert read_plan(path) == PLAN
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (PLAN[:-1], "12 requests -> 11"),
        ([*PLAN[:3], replace(PLAN[3], micro_batch=7), *PLAN[4:]], "request 3: micro_batch 1 -> 7"),
        ([*PLAN[1::-1], *PLAN[2:]], "request 0: sample_index 0 -> 1"),
        ([], "12 requests -> 0"),
    ],
)
def test_another_plan_is_refused_and_the_first_one_kept(
    tmp_path: Path, plan: list[PlannedRequest], message: str
) -> None:
    path = tmp_path / "plan.parquet"
    fix_plan(path, PLAN)
    before = path.read_bytes()
    with pytest.raises(RunMismatchError, match=message):
        fix_plan(path, plan)
    assert path.read_bytes() == before
    assert plan_digest(plan) != plan_digest(PLAN)


@pytest.mark.parametrize("damage", [b"", b"text", "flip"])
def test_a_damaged_plan_needs_a_person(tmp_path: Path, damage: bytes | str) -> None:
    path = tmp_path / "plan.parquet"
    fix_plan(path, PLAN)
    whole = path.read_bytes()
    at = whole.index(b"row 2")
    path.write_bytes(damage if isinstance(damage, bytes) else whole[:at] + b"Row 2" + whole[at + 5 :])
    with pytest.raises(MillraceError) as caught:
        fix_plan(path, PLAN)
    assert isinstance(caught.value, DamagedRunError)


# --- the columns passed through


@pytest.mark.parametrize(
    ("values", "column_type", "stored"),
    [
        (["a", None, "b"], pa.string(), ["a", None, "b"]),
        ([1, None, 2], pa.int64(), [1, None, 2]),
        ([True, False, None], pa.bool_(), [True, False, None]),
        ([1, 2.5, None], pa.float64(), [1.0, 2.5, None]),
        ([2**62, 1, None], pa.int64(), [2**62, 1, None]),
        ([2**62, 0.5, None], pa.string(), [str(2**62), "0.5", None]),
        ([2**70, 1, None], pa.string(), [str(2**70), "1", None]),
        ([True, 1, None], pa.string(), ["true", "1", None]),
        (["a", 1, None], pa.string(), ['"a"', "1", None]),
        ([None, None, None], pa.string(), [None, None, None]),
        ([["a"], {"b": math.nan}, {1: math.inf}], pa.string(), ['["a"]', '{"b": null}', '{"1": null}']),
        (["\ud800", "\0", "\u2028"], pa.string(), ["\\ud800", "\0", "\u2028"]),
    ],
)
def test_a_column_is_typed_where_all_rows_agree_and_json_otherwise(
    values: list[object], column_type: pa.DataType, stored: list[object]
) -> None:
    rows = [{"value": value} for value in values]
    schema = infer_column_schema(rows)
    assert schema.field("value").type == column_type
    table = pa.Table.from_pylist([encode_columns(schema, row) for row in rows], schema=schema)
    assert table["value"].to_pylist() == stored


def test_a_column_that_some_rows_lack_is_null_there() -> None:
    schema = infer_column_schema([{"a": 1}, {"b": "x"}])
    assert schema.names == ["a", "b"]
    assert [encode_columns(schema, row) for row in ({"a": 1}, {})] == [{"a": 1, "b": None}, {"a": None, "b": None}]


def test_names_never_collide_with_ours_nor_with_each_other() -> None:
    row = {"row_id": 1, "id": 2, "row_row_id": 3, "block": 4, "row_status": 5, "status": 6}
    schema = infer_column_schema([row])
    assert len({*schema.names, *GENERATION_SCHEMA.names}) == len(row) + len(GENERATION_SCHEMA)
    assert encode_columns(schema, row) == {
        "row_id": 1, "row_row_row_id": 2, "row_row_id": 3, "row_block": 4, "row_status": 5, "row_row_status": 6
    }  # fmt: skip
