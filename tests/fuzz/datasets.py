"""Data sets: JSON lines, CSV and Parquet, read with settings of all kinds."""

import io
import json
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.datasets import DatasetConfig, DatasetKind, DuplicatePolicy, read_rows
from jobs.record.input_digests import digest_input
from jobs.record.output_rows import generation_schema, infer_column_schema
from tests.fuzz.target import Files, OutsideError, Target

MAX_ROW_BYTES = 1 << 20
SETTINGS: tuple[Mapping[str, object], ...] = (
    {}, {"id_field": "id"}, {"id_field": "id", "dedupe": DuplicatePolicy.first}, {"keep_columns": False},
    {"id_field": "id", "max_new_tokens_field": "m", "temperature_field": "t", "stop_field": "s"},
    {"id_field": "id", "repeat": 2},
)  # fmt: skip
LINES = b"""{"id":"a","prompt":"hi","x":1,"y":[1,2],"z":{"k":null}}
{"id":7,"prompt":"caf\\u00e9 \\ud83d\\ude00","x":2.5}
{"id":"b","prompt":"line\\nsecond","x":"s","m":5,"t":0.5,"s":["a"]}
{"id":"c","prompt":"","x":null}
"""
CSV = """id,prompt,x,m,t,s
1,hello,2,5,0.5,a
2,"quo ""ted"", multi
line",3,,,
3,café,z,7,0,
""".encode()


def parquet() -> bytes:
    columns = {
        "id": ["a", "b", "c"], "prompt": ["x", "y", "z"], "x": [1, None, 3], "l": [[1], [2, 3], None],
        "m": [1, 2, None], "t": [0.5, None, 1.0], "s": ["a", None, "b"],
    }  # fmt: skip
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def check(kind: DatasetKind, directory: Path, rng: random.Random) -> None:
    path = directory / f"in.{kind.value}"
    settings = rng.choice(SETTINGS)
    config = DatasetConfig(kind=kind, path=str(path), max_row_bytes=MAX_ROW_BYTES, **settings)  # pyright: ignore
    rows = read_rows(config)
    ids = [row.id for row in rows]
    if len(set(ids)) != len(ids):
        raise OutsideError(f"{len(ids)} rows share {len(set(ids))} ids")
    if kind is DatasetKind.jsonl and not {"repeat", "dedupe"} & set(settings):
        lines = [line for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
        if len(lines) != len(rows) and (len(lines) < len(rows) or is_row(lines[0])):
            raise OutsideError(f"{len(lines)} lines gave {len(rows)} rows")
    columns = infer_column_schema([row.columns for row in rows], generation_schema(has_logprobs=False))
    digest_input(rows, columns)


def is_row(line: bytes) -> bool:
    """Whether a file that begins with this line is JSON lines, and none of objects or lists of several lines."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return not line.lstrip().startswith((b"{", b"["))


def bad_lines(home: Path) -> list[Files]:
    good = b'{"id":"g","prompt":"p"}\n'
    bad = [
        b"[" * 100_000, b'{"id":"a","prompt":"' + b"x" * 5_000_000 + b'"}', b"9" * 5000, b'{"prompt":1e999}',
        b"\0" * 100, b'{"id":"\\ud800","prompt":"a"}', b"\xff\xfe", b'{"id":"a","id":"b","prompt":"c"}',
        b'{"prompt":NaN}', b"", b'{"a":' * 1000, "{\u2028}".encode(),
    ]  # fmt: skip
    return [{"in.jsonl": good + line + b"\n" + good.replace(b"g", b"h", 1)} for line in bad]


def bad_csv(home: Path) -> list[Files]:
    bad = [
        b"2,wor\xfe,extra,,,\n", b"\xfe\n", b'"' + b"x" * 3_000_000, b'a"b"c,"d"e,,,,\n', b"\r\r\r",
        b"\0,\0,\0,\0,\0,\0\n", b"," * 100_000 + b"\n", b"1,2\n" * 10_000,
    ]  # fmt: skip
    headers = [b"", b"\n", b"id,id\n", b"\xff,prompt\n1,2\n", b'"id\n', b"\xef\xbb\xbfid,prompt\n1,\xff\n"]
    return [*({"in.csv": CSV + row} for row in bad), *({"in.csv": header} for header in headers)]


def bad_parquet(home: Path) -> list[Files]:
    good = parquet()
    file = io.BytesIO()
    pq.write_table(pa.table({"id": ["a", "b"], "prompt": ["x" * 3_000_000, "y"]}), file, compression="zstd")
    return [{"in.parquet": content} for content in (b"", b"PAR1", b"PAR1" * 100, good[:-20], good * 2, file.getvalue())]


TARGETS = (
    Target(
        name="jsonl",
        seeds=lambda home: [{"in.jsonl": LINES}],
        corpus=bad_lines,
        check=partial(check, DatasetKind.jsonl),
    ),
    Target(name="csv", seeds=lambda home: [{"in.csv": CSV}], corpus=bad_csv, check=partial(check, DatasetKind.csv)),
    Target(
        name="parquet",
        seeds=lambda home: [{"in.parquet": parquet()}],
        corpus=bad_parquet,
        check=partial(check, DatasetKind.parquet),
    ),
)
