"""A row's own settings: read strictly, absent or null means the run's, and the input digest sees them."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.datasets import DatasetConfig, DatasetKind, Row, input_digest, read_rows
from runtime.config.settings import SamplingOverrides
from runtime.errors import ConfigError, DatasetError

FIELDS = {
    "max_new_tokens_field": "limit", "temperature_field": "heat", "stop_field": "until",
    "json_schema_field": "schema", "regex_field": "pattern", "choice_field": "choices",
}  # fmt: skip
NUMBERS = {key: FIELDS[key] for key in ("max_new_tokens_field", "temperature_field", "stop_field")}


def rows_of(path: Path, *objects: dict[str, object], **asked: str) -> list[Row]:
    """The rows of these, in a file that has each field in one more row."""
    lines = [{"prompt": "p", **fields} for fields in (*objects, dict.fromkeys(FIELDS.values()))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_rows(DatasetConfig(kind=DatasetKind.jsonl, path=str(path), **(asked or FIELDS)))[:-1]  # pyright: ignore


@pytest.mark.parametrize(
    ("fields", "overrides"),
    [
        ({}, {}),
        ({"limit": None, "heat": None, "until": None}, {}),
        ({"limit": "", "heat": "", "until": ""}, {}),
        ({"limit": 0, "heat": 0, "until": []}, {"max_new_tokens": 0, "temperature": 0.0, "stop": []}),
        ({"limit": 7, "heat": 1, "until": "\n"}, {"max_new_tokens": 7, "temperature": 1.0, "stop": ["\n"]}),
        ({"limit": 7.0, "until": ["a", "b"]}, {"max_new_tokens": 7, "stop": ["a", "b"]}),
        ({"limit": "12", "heat": "0.25"}, {"max_new_tokens": 12, "temperature": 0.25}),
        ({"schema": {"type": "object", "b": 1, "a": 2}}, {"json_schema": '{"type":"object","b":1,"a":2}'}),
        ({"schema": '{"type": "null"}', "pattern": None}, {"json_schema": '{"type": "null"}'}),
        ({"pattern": "a+", "choices": ""}, {"regex": "a+"}),
        ({"choices": ["yes", "no"]}, {"choice": ["yes", "no"]}),
    ],
)  # fmt: skip
def test_a_row_may_have_its_own(fields: dict[str, object], overrides: dict[str, object], tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path / "in.jsonl", fields)
    assert row.error is None
    assert row.overrides == SamplingOverrides(**overrides)  # pyright: ignore[reportArgumentType]
    assert row.columns == {"prompt": "p", **fields}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("limit", value) for value in (-1, 1.5, "many", "1.5", True, [3], {"a": 1}, 10**400, "nan")),
        *(("heat", value) for value in (-0.1, "hot", False, [1.0], "inf", 10**400)),
        *(("schema", value) for value in (3, ["a"], "a\0b", True)),
        *(("pattern", value) for value in (3, ["a"], {"a": "b"})),
        *(("choices", value) for value in (3, "yes", ["a", 3], [""], {"a": "b"})),
        *(("until", value) for value in (3, [""], ["a", None], [["a"]], {"a": "b"}, "a\0b", True)),
    ],
)
def test_a_bad_value_is_an_error_row_that_names_the_column_and_the_key(
    field: str, value: object, tmp_path: Path
) -> None:
    bad, good = rows_of(tmp_path / "in.jsonl", {field: value}, {})
    key = next(key for key, name in FIELDS.items() if name == field)
    assert bad.error is not None
    assert bad.error.startswith("in.jsonl, line 1, byte 0: ")
    assert f"'{field}' (dataset.{key})" in bad.error
    assert good.error is None


def test_csv_takes_text_and_nothing_as_the_runs_own(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("prompt,limit,heat,until\np,5,0.5,###\np,,,\np,five,,\n")
    rows = read_rows(DatasetConfig(kind=DatasetKind.csv, path=str(path), **NUMBERS))  # pyright: ignore
    assert rows[0].overrides == SamplingOverrides(max_new_tokens=5, temperature=0.5, stop=["###"])
    assert rows[1].overrides == SamplingOverrides()
    assert rows[2].error == "in.csv, row 2: the field 'limit' (dataset.max_new_tokens_field) is 'five', not a number"


def test_parquet_takes_what_pandas_makes_of_numbers_beside_nulls(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["p", "p"], "limit": [3.0, float("nan")], "until": [["a"], None], "heat": [None, 1.0]})
    pq.write_table(table, tmp_path / "in.parquet")
    for keep_columns in (True, False):
        config = DatasetConfig(
            kind=DatasetKind.parquet,
            path=str(tmp_path / "in.parquet"),
            keep_columns=keep_columns,
            **NUMBERS,  # pyright: ignore
        )
        first, second = read_rows(config)
        assert first.overrides == SamplingOverrides(max_new_tokens=3, stop=["a"])
        assert second.overrides == SamplingOverrides(temperature=1.0)


def test_a_field_that_no_row_has_is_refused_and_one_that_is_null_in_all_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pq.write_table(pa.table({"prompt": ["p"]}), tmp_path / "in.parquet")
    with pytest.raises(DatasetError, match=r"no column 'limit' \(dataset\.max_new_tokens_field\)"):
        read_rows(DatasetConfig(kind=DatasetKind.parquet, path=str(tmp_path / "in.parquet"), **NUMBERS))  # pyright: ignore
    with pytest.raises(DatasetError, match=r"no row has the field 'warmth' .*\(dataset\.temperature_field\); its"):
        rows_of(tmp_path / "in.jsonl", {"limit": 3}, temperature_field="warmth")
    rows_of(tmp_path / "in.jsonl", {"limit": 3, "Heat": 1.0})
    assert "dataset.temperature_field=heat has no effect" in caplog.text
    assert "dataset.max_new_tokens_field" not in caplog.text


def test_the_digest_sees_them_and_a_row_without_any_keeps_its_own(tmp_path: Path) -> None:
    def digest(**fields: object) -> str:
        return input_digest(rows_of(tmp_path / "in.jsonl", fields))

    plain = digest()
    digests = [plain, digest(limit=1), digest(limit=2), digest(heat=1), digest(until="a"), digest(until=[])]
    assert len(set(digests)) == len(digests)
    assert digest(limit=None) == digest(limit="") == plain
    assert digest(until="a") == digest(until=["a"])
    assert digest(limit=1) == digest(limit="1")
    config = DatasetConfig(kind=DatasetKind.jsonl, path=str(tmp_path / "in.jsonl"))
    assert input_digest(read_rows(config)[:-1]) == plain


@pytest.mark.parametrize("key", FIELDS)
def test_data_sets_without_fields_take_no_such_key(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"dataset\.{key} is not supported by dataset.kind=tasks"):
        DatasetConfig(**{key: "x"})  # pyright: ignore
    with pytest.raises(ConfigError, match=rf"dataset\.{key} is empty"):
        DatasetConfig(kind=DatasetKind.jsonl, path="x", **{key: ""})  # pyright: ignore
