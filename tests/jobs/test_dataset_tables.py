import bz2
import datetime
import decimal
import gzip
import json
import lzma
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.datasets import DatasetConfig, DatasetKind, read_rows
from runtime.errors import DatasetError

COLUMNS = {"id": ["a", "b", "c"], "prompt": ["1", "", None], "score": [0.5, float("nan"), None]}


def read_csv(path, **settings):
    return read_rows(DatasetConfig(kind=DatasetKind.csv, path=str(path), **{"id_field": "id", **settings}))


def read_parquet(path, **settings):
    return read_rows(DatasetConfig(kind=DatasetKind.parquet, path=str(path), **{"id_field": "id", **settings}))


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table(COLUMNS), path)
    return path


def test_parquet_rows_keep_their_order_and_bad_prompts_are_error_rows(parquet):
    rows = read_parquet(parquet)
    assert [(row.id, row.prompt) for row in rows] == [("a", "1"), ("b", ""), ("c", "")]
    assert rows[0].columns == {"prompt": "1", "score": 0.5}
    assert rows[1].columns["score"] is None
    assert rows[1].error == "in.parquet, row 1: the prompt 'prompt' is empty"
    assert rows[2].error == "in.parquet, row 2: the prompt 'prompt' is null, not text"


def test_without_columns_only_what_is_needed_is_read(parquet):
    rows = read_parquet(parquet, keep_columns=False)
    assert [(row.id, row.prompt, row.columns) for row in rows] == [("a", "1", {}), ("b", "", {}), ("c", "", {})]


def test_a_directory_of_parquet_files_counts_rows_through(tmp_path):
    for name in ("part-1.parquet", "part-0.parquet"):
        pq.write_table(pa.table({"prompt": [f"{name} x", f"{name} y"]}), tmp_path / name)
    rows = read_parquet(tmp_path, id_field=None)
    assert [row.id for row in rows] == ["0", "1", "2", "3"]
    assert rows[0].prompt == "part-0.parquet x"
    assert [row.source_file for row in rows] == ["part-0.parquet"] * 2 + ["part-1.parquet"] * 2


def test_values_of_any_arrow_type_pass_through_as_json(tmp_path):
    values = {
        "day": [datetime.date(2026, 1, 2)],
        "at": [datetime.datetime(2026, 1, 2, 3, 4)],
        "price": [decimal.Decimal("1.50")],
        "blob": [b"\xff\x00"],
        "nested": [{"x": [1, None], "y": float("inf")}],
        "gap": pa.array([datetime.timedelta(seconds=90)]),
        "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())),
    }
    pq.write_table(pa.table({"prompt": ["p"], **values}), tmp_path / "in.parquet")
    (row,) = read_parquet(tmp_path / "in.parquet", id_field=None)
    assert json.loads(json.dumps(row.columns, allow_nan=False)) == {
        "prompt": "p",
        "day": "2026-01-02",
        "at": "2026-01-02T03:04:00",
        "price": "1.50",
        "blob": "/wA=",
        "nested": {"x": [1, None], "y": None},
        "gap": "0:01:30",
        "map": [["k", 1]],
    }


def test_chats_in_parquet_are_read_though_keys_are_null(tmp_path):
    chat = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "u", "name": "Ann"}]
    pq.write_table(pa.table({"chat": [chat]}), tmp_path / "in.parquet")
    (row,) = read_parquet(tmp_path / "in.parquet", id_field=None, chat_template=True, messages_field="chat")
    assert row.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "Ann"}]


def test_a_replaced_file_with_its_old_time_gives_the_new_rows(parquet):
    before = parquet.stat()
    assert read_parquet(parquet, limit=1)[0].prompt == "1"
    pq.write_table(pa.table({**COLUMNS, "prompt": ["new", "x", "y"]}), parquet)
    os.utime(parquet, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_parquet(parquet, limit=1)[0].prompt == "new"


def test_csv_values_stay_text(tmp_path):
    (tmp_path / "in.csv").write_text('id,prompt,n\n007,42,1.0\nx,"two\nlines, ""quoted""",\n')
    rows = read_csv(tmp_path / "in.csv")
    assert [(row.id, row.prompt, row.columns["n"]) for row in rows] == [
        ("007", "42", "1.0"),
        ("x", 'two\nlines, "quoted"', ""),
    ]


def test_bad_csv_rows_are_error_rows_in_their_places(tmp_path):
    (tmp_path / "in.csv").write_bytes(b"\xef\xbb\xbfid,prompt\r\na,1\r\nb\r\n\r\nc,\xff\r\nd,4\r\ne,5,6\r\nf,\r\n")
    rows = read_csv(tmp_path / "in.csv")
    assert [row.id for row in rows] == ["a", "bad-row-1", "bad-row-2", "d", "bad-row-4", "f"]
    assert [row.error for row in rows] == [
        None,
        "in.csv, row 1: 1 fields, but the header has 2",
        "in.csv, row 2: not UTF-8: byte 0xff",
        None,
        "in.csv, row 4: 3 fields, but the header has 2",
        "in.csv, row 5: the prompt 'prompt' is empty",
    ]


@pytest.mark.parametrize("lead", ["", "\n\n"], ids=["header first", "blank lines first"])
def test_bad_csv_rows_are_counted_in_rows_not_lines(tmp_path, lead):
    (tmp_path / "in.csv").write_text(lead + 'id,prompt\na,"1\n2\n3"\nbad\nb,4\n')
    assert [row.id for row in read_csv(tmp_path / "in.csv")] == ["a", "bad-row-1", "b"]


def test_a_csv_value_may_be_larger_than_any_default_block(tmp_path):
    prompt = "line\n" * 500_000
    (tmp_path / "in.csv").write_text(f'id,prompt\na,1\nb,"{prompt}"\n')
    assert read_csv(tmp_path / "in.csv")[1].prompt == prompt


def test_csv_with_another_delimiter_and_gzip(tmp_path):
    (tmp_path / "in.tsv.gz").write_bytes(gzip.compress(b"id\tprompt\na\tx,y\n"))
    assert read_csv(tmp_path / "in.tsv.gz", csv_delimiter="\t")[0].prompt == "x,y"


CSV = b'id,prompt\na,"x\ny"\nb,\xc3\xa9\n'
TSV = CSV.replace(b",", b"\t")
CSV_FORMS = {
    "gzip without its name": ("in.csv", gzip.compress(CSV)),
    "bzip2": ("in.csv.bz2", bz2.compress(CSV)),
    "xz": ("in.csv.xz", lzma.compress(CSV)),
    "UTF-16, as spreadsheets save it": ("in.csv", CSV.decode().encode("utf-16")),
    "tabs": ("in.tsv", TSV),
    "tabs in UTF-16, packed": ("in.tsv.gz", gzip.compress(TSV.decode().encode("utf-16"))),
    "commas, named .tsv": ("in.tsv", CSV),
    "any name": ("in.txt", CSV),
}


@pytest.mark.parametrize(("name", "content"), CSV_FORMS.values(), ids=CSV_FORMS)
def test_csv_is_read_from_any_form_that_tells_what_it_is(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    rows = read_csv(tmp_path / name)
    assert [(row.id, row.prompt, row.error) for row in rows] == [("a", "x\ny", None), ("b", "é", None)]


def test_a_pattern_is_no_path(tmp_path):
    (tmp_path / "in.csv").write_bytes(CSV)
    with pytest.raises(
        DatasetError, match=r"does not exist .*; patterns are not supported: set a file, or a directory"
    ):
        read_csv(tmp_path / "*.csv")


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (DatasetKind.csv, b'{"id": "a", "prompt": "p"}\n', "'id'.*; in.data looks like JSON: dataset=jsonl"),
        (DatasetKind.csv, b'\xef\xbb\xbf[{"id": "a"}]', "'id'.*; in.data looks like JSON: dataset=jsonl"),
        (DatasetKind.csv, b"PAR1", "in.data is Parquet: set dataset=parquet"),
        (DatasetKind.parquet, b'{"id": "a", "prompt": "p"}\n', "cannot read.*; in.data looks like JSON: dataset=jsonl"),
        (DatasetKind.parquet, gzip.compress(CSV, mtime=0), "cannot read.*; in.data looks like CSV: dataset=csv"),
        (DatasetKind.parquet, b"id;prompt\r\na;x\r\n", "cannot read.*; in.data looks like CSV: dataset=csv"),
        (DatasetKind.parquet, b"PAR1 but no footer", r"cannot read .*in\.data"),
        (DatasetKind.parquet, b"", r"cannot read .*in\.data"),
        (DatasetKind.csv, b"", "no column 'id'"),
        (DatasetKind.csv, b"id,prompt,id\n1,2,3\n", "two columns with the same name"),
        (
            DatasetKind.csv,
            b"id,text\n1,2\n",
            r"no column 'prompt' \(dataset\.prompt_field\); columns: 'id', 'text'",
        ),
        (DatasetKind.csv, b"id,pr\xff\n1,2\n", r"cannot read .*in\.data"),
        (DatasetKind.csv, b"id,prompt\n", "has no rows"),
    ],
)
def test_a_table_that_cannot_be_used_as_a_whole_raises(tmp_path, kind, content, message):
    (tmp_path / "in.data").write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        read_rows(DatasetConfig(kind=kind, path=str(tmp_path / "in.data"), id_field="id"))


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "folder"
    folder.mkdir()
    for split in ("train", "test"):
        lines = [json.dumps({"key": f"{split}{n}", "prompt": f"p{n}", "n": n}) for n in range(3)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


def read_hub(path, **settings):
    return read_rows(DatasetConfig(kind=DatasetKind.hub, path=str(path), **settings))


def test_a_local_folder_is_read_as_a_hub_data_set(hub_folder):
    rows = read_hub(hub_folder, hub_split="test", id_field="key")
    assert [(row.id, row.prompt, row.columns) for row in rows] == [
        (f"test{n}", f"p{n}", {"prompt": f"p{n}", "n": n}) for n in range(3)
    ]
    assert [row.columns for row in read_hub(hub_folder, hub_split="test[:1]", keep_columns=False)] == [{}]


def test_hub_errors_name_the_keys(hub_folder):
    with pytest.raises(DatasetError, match=r"dataset\.hub_split=validation"):
        read_hub(hub_folder, hub_split="validation")
    with pytest.raises(DatasetError, match=r"no column 'text' \(dataset\.prompt_field\)"):
        read_hub(hub_folder, prompt_field="text")
    with pytest.raises(DatasetError, match=r"cannot load dataset\.path=.*nowhere"):
        read_hub(hub_folder / "nowhere")
