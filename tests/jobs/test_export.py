"""A run's output as one file: every row once, in the order of the input, with what the input brought along."""

import csv
import io
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from fcntl import LOCK_EX, flock
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir

from jobs.config.settings import load
from jobs.exporting import export as exporting
from jobs.exporting.columns import write_csv
from jobs.exporting.config import ErrorRows, ExportConfig, ExportFormat
from jobs.exporting.export import ExportResult, export
from jobs.files.locks import RunLock
from runtime.errors import ConfigError, DamagedRunError, OutputError
from runtime.units import MIB
from tests.jobs.sharded_run import COLUMNS, NUM_SHARDS, ShardedRun
from tests.odd_files import limited_file_size

ROOT = Path(__file__).resolve().parents[2]


def exported(case: ShardedRun, name: str, **settings: object) -> ExportResult:
    values = {"run": str(case.folder / "x-*"), "out": str(case.folder / name)} | settings
    return export(ExportConfig(**values))  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ShardedRun:
    return ShardedRun(folder=tmp_path_factory.mktemp("runs")).finish(*range(NUM_SHARDS))


@pytest.fixture
def case(whole: ShardedRun, tmp_path: Path) -> ShardedRun:
    """A copy to do damage to."""
    shutil.copytree(whole.folder, tmp_path / "runs", ignore=shutil.ignore_patterns("*.jsonl", "*.csv", "all.parquet"))
    return ShardedRun(folder=tmp_path / "runs")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]]


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_json_lines_have_every_row_in_input_order_with_all_values_as_they_were(whole: ShardedRun) -> None:
    done = exported(whole, "all.jsonl")
    rows = lines(done.out)
    assert [(row["row_index"], row["sample_index"]) for row in rows] == [(i, n) for i in range(24) for n in (0, 1)]
    for row in rows:
        i = row["row_index"]
        assert isinstance(i, int)
        own = {name: row["row_completion" if name == "completion" else name] for name in COLUMNS[i]}
        assert own == COLUMNS[i]
        assert (row["id"], row["source_file"]) == (f"ä{i}", "a.jsonl" if i < 10 else "b.jsonl")
        assert row["completion"] == ("" if i == 5 else f'ünï, "{i}"\n\u2028')
        assert (row["status"], row["error"]) == (("error", "line 5: no JSON") if i == 5 else ("ok", None))
    assert "日本" in done.out.read_text(encoding="utf-8"), "text stays readable"
    assert (done.num_rows, done.num_errors, done.num_shards) == (48, 2, 3)
    assert not {"block", "micro_batch"} & set(rows[0])


def test_parquet_has_lists_and_objects_as_such_and_text_where_there_is_no_one_type(whole: ShardedRun) -> None:
    done = exported(whole, "all.parquet")
    table = pq.read_table(done.out)
    types = {name: str(table.schema.field(name).type).replace("item:", "element:") for name in COLUMNS[0]}
    assert types == {
        "tags": "list<element: string>",
        "meta": "struct<at: int64, wörter: string>",
        "numbers": "list<element: double>",
        "mixed": "string",
        "empty": "string",  # Parquet has no objects without fields
        "completion": "string",
    }
    assert str(table.schema.field("row_completion").type) == "int64"
    rows = table.to_pylist()
    assert [row["row_index"] for row in rows] == [i for i in range(24) for _ in (0, 1)]
    assert [row["tags"] for row in rows[::2]] == [row["tags"] for row in COLUMNS]
    assert [row["meta"] for row in rows[::2]] == [row["meta"] for row in COLUMNS]
    assert [row["mixed"] for row in rows[:8:2]] == ["5", "5", None, "[1]"]
    assert done.text_columns == ["mixed", "empty"]


def test_csv_has_a_line_of_names_and_lists_as_json(whole: ShardedRun) -> None:
    done = exported(whole, "all.csv", columns=["id", "completion", "tags", "meta", "token_ids"])
    table = pa_csv.read_csv(done.out, parse_options=pa_csv.ParseOptions(newlines_in_values=True))
    assert table.column_names == ["id", "completion", "tags", "meta", "token_ids"]
    rows = table.to_pylist()
    assert len(rows) == 48
    for i, row in enumerate(rows[::2]):
        assert row["completion"] == ("" if i == 5 else f'ünï, "{i}"\n\u2028')
        assert json.loads(row["meta"]) == COLUMNS[i]["meta"]
        assert json.loads(row["token_ids"]) == ([] if i == 5 else [i, 2])


CELLS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "a=1", "'=1", "", None, "\n=1"]


@pytest.mark.parametrize("is_safe", [False, True])
def test_csv_cells_that_a_spreadsheet_would_run_have_a_quote_in_front_if_asked(is_safe: bool) -> None:
    table, file = pa.table({"=id": CELLS, "n": pa.array([-1] * len(CELLS))}), io.BytesIO()
    write_csv([table], table.schema, file, is_safe=is_safe)
    head, *rows = list(csv.reader(io.StringIO(file.getvalue().decode(), newline="")))
    mark = "'" if is_safe else ""
    assert head == [f"{mark}=id", "n"]
    assert rows == [[f"{mark}{cell}", "-1"] for cell in CELLS[:6]] + [[cell or "", "-1"] for cell in CELLS[6:]]


def test_a_safe_csv_is_asked_for_by_its_setting(whole: ShardedRun) -> None:
    plain, safe = (exported(whole, f"{key}.csv", csv_safe=key).out.read_bytes() for key in (False, True))
    assert plain == safe, "no cell of this run begins so"
    with pytest.raises(ConfigError, match="csv_safe=true needs format=csv, got format=jsonl"):
        exported(whole, "all.jsonl", csv_safe=True)


@pytest.mark.parametrize("name", ["all.jsonl", "all.csv", "all.parquet"])
def test_rows_that_do_not_fit_into_memory_give_the_same_file(
    whole: ShardedRun, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = exported(whole, name, out=str(tmp_path / f"at-once-{name}")).out
    monkeypatch.setattr(exporting, "SORT_BYTES", 2000)
    dealt = exported(whole, name, out=str(tmp_path / f"dealt-{name}")).out
    if name.endswith("parquet"):
        assert pq.ParquetFile(dealt).num_row_groups > 3
        assert pq.read_table(dealt) == pq.read_table(at_once)
    else:
        assert dealt.read_bytes() == at_once.read_bytes()
    assert hidden(tmp_path) == []


def test_a_killed_export_leaves_no_folder_and_the_next_one_clears_its_half_a_file(
    whole: ShardedRun, tmp_path: Path
) -> None:
    program = f"""
import os, signal
from jobs.exporting import export
from jobs.exporting.config import ExportConfig

def killed(tables, *_):
    next(iter(tables))
    assert not [name for name in os.listdir({str(tmp_path)!r}) if os.path.isdir(name)]
    os.kill(os.getpid(), signal.SIGKILL)

export.SORT_BYTES, export.WRITERS[export.ExportFormat.jsonl] = 2000, killed
export.export(ExportConfig(run={str(whole.folder / "x-*")!r}, out={str(tmp_path / "all.jsonl")!r}))
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".all.jsonl.")
    (tmp_path / ".other.jsonl.1-ab.tmp").touch()
    with (tmp_path / ".all.jsonl.1-ab.tmp").open("xb") as file:
        flock(file, LOCK_EX)
        exported(whole, "all.jsonl", out=str(tmp_path / "all.jsonl"))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".all.jsonl.1-ab.tmp", ".other.jsonl.1-ab.tmp", "all.jsonl"], "others' stay, and what is written"


@pytest.mark.parametrize(("keeps", "says"), [(False, True), (True, False)])
def test_a_column_of_an_input_that_was_not_kept_is_refused_with_that_reason(
    tmp_path: Path, keeps: bool, says: bool
) -> None:
    case = ShardedRun(folder=tmp_path, identity={"dataset.keep_columns": keeps}).finish(0)
    with pytest.raises(ConfigError, match="columns: the run has no prompt, but row_index, ") as refused:
        exported(case, "all.jsonl", columns=["id", "prompt"], partial=True)
    assert ("because of dataset.keep_columns=false" in str(refused.value)) == says


def test_error_rows_can_be_left_out(whole: ShardedRun) -> None:
    done = exported(whole, "ok.jsonl", errors=ErrorRows.drop)
    assert {row["row_index"] for row in lines(done.out)} == set(range(24)) - {5}
    assert (done.num_rows, done.num_errors, done.num_dropped) == (46, 0, 2)
    assert "46 rows of 3 shards; 2 with an error omitted" in done.lines[0]


def test_an_unfinished_and_an_absent_shard_are_named_by_index_with_their_rows_and_refused(case: ShardedRun) -> None:
    unfinish(case, 1)
    shutil.rmtree(case.directory(2).path)
    with pytest.raises(ConfigError) as refused:
        exported(case, "never.jsonl")
    message = str(refused.value)
    assert "shard 2 of 3 is missing" in message
    assert "(shard 1 of 3) is not finished: 12 of 16 rows are done, missing: rows" in message
    assert not (case.folder / "never.jsonl").exists()

    done = exported(case, "all.jsonl", partial=True)
    rows = {row["row_index"] for row in lines(done.out)}
    absent = sorted({i for i in range(24) if i % 3 != 2} - rows)
    assert f"missing: rows {', '.join(map(str, absent))}" in message
    assert len(done.missing) == 2
    assert done.num_rows == 28


def unfinish(case: ShardedRun, index: int) -> None:
    directory = case.directory(index)
    directory.success.unlink()
    directory.generations_part(2).unlink()


def test_a_run_that_another_process_works_on_is_said_to_be(case: ShardedRun) -> None:
    unfinish(case, 0)
    lock = RunLock(case.directory(0).lock)
    with pytest.raises(ConfigError, match=r"shard 0 of 3\) is in use by another process"):
        exported(case, "all.jsonl")
    lock.release()


def test_a_damaged_part_is_refused_with_4_and_left_out_only_if_asked(
    case: ShardedRun, caplog: pytest.LogCaptureFixture
) -> None:
    path = case.directory(1).generations_part(0)
    data = bytearray(path.read_bytes())
    data[data.index("ünï".encode())] ^= 1
    path.write_bytes(data)
    (case.folder / "all.jsonl").write_text("of before")
    with pytest.raises(DamagedRunError, match=r"part-00000\.parquet is damaged"):
        exported(case, "all.jsonl", overwrite=True)
    assert (case.folder / "all.jsonl").read_text() == "of before"
    assert hidden(case.folder) == []
    assert exported(case, "all.jsonl", partial=True, overwrite=True).num_rows == 44
    assert "skipped: " in caplog.text


def test_a_part_of_another_shard_is_damage(case: ShardedRun) -> None:
    shutil.copy(case.directory(0).generations_part(0), case.directory(1).generations_part(0))
    with pytest.raises(DamagedRunError, match="belongs to another run or block"):
        exported(case, "all.jsonl")


def test_one_run_is_exported_at_a_time(case: ShardedRun, tmp_path: Path) -> None:
    other = ShardedRun(folder=tmp_path / "other", identity={"model.name": "tiny", "sampling.n": 3}).finish(1)
    with pytest.raises(ConfigError, match=r"are different runs: sampling\.n differ"):
        exported(case, "all.jsonl", run=[str(case.directory(0).path), str(other.directory(1).path)])
    shutil.copytree(case.directory(0).path, tmp_path / "copy")
    with pytest.raises(ConfigError, match="are both shard 0 of 3"):
        exported(case, "all.jsonl", run=[str(case.folder / "x-*"), str(tmp_path / "copy")])


def test_a_run_that_is_named_twice_is_exported_once(case: ShardedRun) -> None:
    (case.folder / "link").symlink_to(case.directory(0).path)
    names = [str(case.folder / "x-*"), str(case.directory(1).path), str(case.folder / "link")]
    assert exported(case, "all.jsonl", run=names).num_rows == 48


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"run": "nowhere"}, "run=nowhere does not exist"),
        ({"run": None}, "run is not set"),
        ({"out": None}, "out is not set"),
        ({"out": "a.txt"}, r"out=a.txt does not end in \.jsonl, \.csv, \.parquet"),
        ({"columns": ["id", "nope"]}, "columns: the run has no nope, but row_index, source_file, id"),
        ({"columns": ["id", "id"]}, "contains a column twice"),
        ({"columns": []}, "columns is empty"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_a_sentence(
    whole: ShardedRun, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        exported(whole, "all.jsonl", **settings)


def test_a_directory_of_runs_is_no_run_and_says_which_are_in_it(whole: ShardedRun) -> None:
    with pytest.raises(ConfigError, match=r"there is no run\.json in .*; it contains 3 runs"):
        exported(whole, "all.jsonl", run=str(whole.folder))


def test_the_file_never_lies_among_the_parts(case: ShardedRun) -> None:
    with pytest.raises(ConfigError, match="is in a folder of parts"):
        exported(case, "x", out=str(case.directory(0).generations / "part-00009.parquet"))
    with pytest.raises(ConfigError, match="is a directory"):
        exported(case, "x", out=str(case.folder), format=ExportFormat.jsonl)


def test_a_file_that_no_export_wrote_is_replaced_only_if_asked(case: ShardedRun) -> None:
    (case.folder / "mine.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"mine\.jsonl exists, and was not written by .*overwrite=true"):
        exported(case, "mine.jsonl")
    assert (case.folder / "mine.jsonl").read_text() == "mine"
    assert exported(case, "mine.jsonl", overwrite=True).num_rows == 48
    assert exported(case, "mine.jsonl", errors=ErrorRows.drop).num_rows == 46, "an earlier export wrote it"


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("key", ["dataset.path", "dataset.few_shot_path", "model.tokenizer"])
@pytest.mark.parametrize("kind", ["a file", "a link to it", "a file of its directory", "relative to elsewhere"])
def test_an_input_of_the_run_is_never_replaced(tmp_path: Path, key: str, kind: str) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "prompts.jsonl"
    path.write_text("mine")
    named, out = str(path), path
    if kind == "a link to it":
        out = tmp_path / "link.jsonl"
        out.symlink_to(path)
    elif kind == "a file of its directory":
        named = str(tmp_path / "data")
    elif kind == "relative to elsewhere":
        named = "data/prompts.jsonl"
    case = ShardedRun(folder=tmp_path / "runs", identity={key: named}).finish(*range(NUM_SHARDS))
    with pytest.raises(ConfigError, match=f"is an input of .*{key}={named}.*never replaced"):
        exported(case, "x", out=str(out), overwrite=True)
    assert path.read_text() == "mine"
    assert exported(case, "x", out=str(tmp_path / "data" / "answers.jsonl")).num_rows == 48
    assert exported(case, "x", out=str(tmp_path / "data" / "answers.jsonl")).num_rows == 48


def test_a_file_of_the_run_itself_is_never_replaced(case: ShardedRun) -> None:
    plan = case.directory(0).plan
    before = plan.read_bytes()
    with pytest.raises(ConfigError, match="is a file of the run"):
        exported(case, "x", out=str(plan), overwrite=True)
    assert plan.read_bytes() == before
    for _ in range(2):
        assert exported(case, "x", out=str(case.directory(0).path / "answers.jsonl")).num_rows == 48


def test_a_directory_that_was_not_there_is_made_with_a_word(case: ShardedRun) -> None:
    done = exported(case, "no/such/all.jsonl")
    assert done.lines[0] == f"created directory {case.folder / 'no' / 'such'}"
    assert done.out.exists()


@pytest.mark.parametrize("folder", ["/proc/nope", "/proc/self", "{tmp_path}/file"])
def test_a_path_that_can_never_be_written_is_refused(whole: ShardedRun, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    folder = folder.format(tmp_path=tmp_path)
    with pytest.raises(ConfigError, match=str(folder)):
        exported(whole, "x", out=f"{folder}/all.jsonl")


@pytest.mark.parametrize("bytes_at_once", [64 * MIB, 2000])
def test_a_full_disk_is_an_error_of_the_output(
    whole: ShardedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_at_once: int
) -> None:
    """Also where it is met by the files that rows are sorted in."""
    monkeypatch.setattr(exporting, "SORT_BYTES", bytes_at_once)
    with limited_file_size(1000), pytest.raises(OutputError, match=r"all\.jsonl cannot be written: File too large"):
        exported(whole, "all.jsonl", out=str(tmp_path / "all.jsonl"))
    assert list(tmp_path.iterdir()) == []


def test_the_settings_are_those_of_the_yaml() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        composed = compose("export", ["run=[a,b]", "out=c.csv"])
    assert set(composed) == {each.name for each in fields(ExportConfig)}
    assert load(ExportConfig, composed) == ExportConfig(run=["a", "b"], out="c.csv")
