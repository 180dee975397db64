import bz2
import gzip
import json
import lzma
import random
import re

import pyarrow as pa
import pytest

from jobs.datasets import BadRowPolicy, DatasetConfig, DatasetKind, read_rows
from runtime.errors import DatasetError

GOOD = b'{"id": "good", "prompt": "p"}'


def read(path, **settings):
    return read_rows(DatasetConfig(kind=DatasetKind.jsonl, path=str(path), **{"id_field": "id", **settings}))


def put(tmp_path, content, name="in.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


BAD_LINES = {
    "bad JSON": (b'{"id": "x", "prompt": ', "not JSON"),
    "trailing text": (GOOD + b" x", "not JSON"),
    "not an object": (b'["p"]', "not a JSON object"),
    "missing prompt": (b'{"id": "x", "text": "p"}', r"no field 'prompt' \(dataset.prompt_field\).*'id', 'text'"),
    "prompt is a number": (b'{"id": "x", "prompt": 5}', "a number, not text"),
    "prompt is null": (b'{"id": "x", "prompt": null}', "null, not text"),
    "empty prompt": (b'{"id": "x", "prompt": ""}', "is empty"),
    "missing id": (b'{"prompt": "p"}', r"no field 'id' \(dataset.id_field\)"),
    "id is a list": (b'{"id": [], "prompt": "p"}', "the id 'id' is a list"),
    "id is a boolean": (b'{"id": true, "prompt": "p"}', "a boolean"),
    "not UTF-8": (b'{"id": "x", "prompt": "\xff"}', "not UTF-8: byte 0xff at byte 23 of the line"),
    "raw NUL": (b'{"id": "x", "prompt": "a\x00"}', "not JSON"),
    "escaped NUL": (b'{"id": "x", "prompt": "a\\u0000"}', "NUL character at position 1"),
    "lone surrogate": (b'{"id": "x", "prompt": "\\ud800"}', "lone surrogate"),
    "lone surrogate in a column": (b'{"id": "x", "prompt": "p", "more": ["\\udc00"]}', "lone surrogate"),
    "deep nesting": (b'{"id": "x", "prompt": ' + b"[" * 100_000, "nested deeper"),
    "rather deep nesting": (b'{"id": "x", "prompt": "p", "c": ' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper"),
    "NaN": (b'{"id": "x", "prompt": "p", "score": NaN}', "NaN is not JSON"),
    "infinity": (b'{"id": "x", "prompt": "p", "score": -Infinity}', "-Infinity is not JSON"),
    "overflow": (b'{"id": "x", "prompt": "p", "score": 1e999}', "out of range"),
    "endless integer": (b'{"id": "x", "prompt": "p", "score": ' + b"1" * 5000 + b"}", "limit"),
    "duplicate keys": (b'{"id": "x", "prompt": "p", "prompt": "q"}', "duplicate key 'prompt'"),
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_an_error_row_that_says_where_and_the_rest_is_read(tmp_path, line, reason):
    rows = read(put(tmp_path, GOOD + b"\n\n" + line + b'\n{"id": "last", "prompt": "z"}\n'))
    assert [row.error is None for row in rows] == [True, False, True]
    assert [row.id for row in rows][::2] == ["good", "last"]
    error = rows[1].error or ""
    assert error.startswith(f"in.jsonl, line 3, byte {len(GOOD) + 2}: ")
    assert re.search(reason, error), error


@pytest.mark.parametrize("case", ["bad JSON", "missing id", "id is a list", "not UTF-8"])
def test_an_unreadable_id_becomes_file_and_line(tmp_path, case):
    assert read(put(tmp_path, GOOD + b"\n" + BAD_LINES[case][0]))[1].id == "bad-row-1"


def test_a_bad_row_keeps_its_id_and_columns_where_they_can_be_read(tmp_path):
    (row,) = read(put(tmp_path, b'{"id": 7, "prompt": "", "tag": "t"}'))
    assert (row.id, row.columns, row.prompt) == ("7", {"prompt": "", "tag": "t"}, "")


def test_on_bad_row_fail_names_the_first_and_the_count(tmp_path):
    path = put(tmp_path, GOOD + b"\nx\ny\n")
    with pytest.raises(DatasetError, match=r"2 of 3 rows.*in\.jsonl, line 2, byte 30.*dataset\.on_bad_row=error_row"):
        read(path, on_bad_row=BadRowPolicy.fail)


@pytest.mark.parametrize(
    "content",
    [
        b'{"id": "a", "prompt": "1"}\n{"id": "b", "prompt": "2"}\n',
        b'{"id": "a", "prompt": "1"}\n{"id": "b", "prompt": "2"}',
        b'{"id": "a", "prompt": "1"}\r\n{"id": "b", "prompt": "2"}\r\n',
        b'\xef\xbb\xbf{"id": "a", "prompt": "1"}\n{"id": "b", "prompt": "2"}\n',
        b'\n  \n{"id": "a", "prompt": "1"}\n\r\n\t\n{"id": "b", "prompt": "2"}\n\n',
        b'\xef\xbb\xbf\n{"id": "a", "prompt": "1"}\n{"id": "b", "prompt": "2"}\n',
    ],
    ids=["plain", "no last newline", "CRLF", "BOM", "blank lines", "BOM on a blank line"],
)
def test_line_ends_bom_and_blank_lines_do_not_matter(tmp_path, content):
    assert [(row.id, row.prompt, row.error) for row in read(put(tmp_path, content))] == [
        ("a", "1", None),
        ("b", "2", None),
    ]


def test_only_byte_10_ends_a_line(tmp_path):
    text = "a\u2028b\u0085c\u000bd"
    content = json.dumps({"id": "a", "prompt": text}, ensure_ascii=False)
    (row,) = read(put(tmp_path, content.encode() + b"\n"))
    assert row.prompt == text


def test_a_bom_later_in_the_file_is_a_bad_line(tmp_path):
    rows = read(put(tmp_path, GOOD + b"\n\xef\xbb\xbf" + GOOD.replace(b"good", b"other") + b"\n"))
    assert [row.error is None for row in rows] == [True, False]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_gzip_reads_the_same_with_the_same_offsets(tmp_path, suffix):
    content = GOOD + b"\nbroken\n"
    rows = read(put(tmp_path, gzip.compress(content) if suffix.endswith("gz") else content, f"in{suffix}"))
    assert rows[0].prompt == "p"
    assert (rows[1].error or "").startswith(f"in{suffix}, line 2, byte 30: ")


def test_a_directory_is_read_by_file_name(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "_skipped.jsonl", ".hidden.jsonl", "notes.txt"):
        put(tmp_path, b'{"id": "%s", "prompt": "p"}\n' % name.encode(), name)
    rows = read(tmp_path)
    assert [(row.id, row.index, row.source_file) for row in rows] == [
        ("a.jsonl", 0, "a.jsonl"),
        ("b.jsonl", 1, "b.jsonl"),
    ]


@pytest.mark.parametrize(
    ("document", "json_field"),
    [
        ([{"id": "a", "prompt": "1"}], None),
        ({"examples": [{"id": "a", "prompt": "1"}]}, "examples"),
        ({"data": {"rows": [{"id": "a", "prompt": "1"}]}}, "data.rows"),
    ],
)
def test_a_json_document_holds_its_rows_at_json_field(tmp_path, document, json_field):
    (row,) = read(put(tmp_path, json.dumps(document).encode(), "in.json"), json_field=json_field)
    assert (row.id, row.prompt) == ("a", "1")


def test_a_bad_item_of_a_document_is_an_error_row(tmp_path):
    rows = read(put(tmp_path, json.dumps([{"id": "a", "prompt": "1"}, 5]).encode(), "in.json"))
    assert rows[1].id == "bad-row-1"
    assert rows[1].error == "in.json, item 1: not a JSON object"


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        ("in.json", b'{"rows": []}', {}, r"no list of rows at dataset\.json_field=null; its fields: 'rows'"),
        ("in.json", b'{"rows": 1}', {"json_field": "data"}, r"no field 'data' of dataset\.json_field=data"),
        ("in.json", b"5", {}, "single value"),
        ("in.json", GOOD + b" " + GOOD[:9], {}, r"not one JSON document"),
        ("in.json", b"\xff", {}, "not one JSON document"),
        ("in.jsonl", b"\n\n", {}, "has no rows"),
        ("in.jsonl", b"", {}, "has no rows"),
        ("in.jsonl.gz", gzip.compress(GOOD * 50, mtime=0)[:-12], {}, r"cannot read .*in\.jsonl\.gz"),
        ("in.jsonl.gz", GOOD, {}, r"cannot read .*in\.jsonl\.gz"),
    ],
)
def test_a_file_that_cannot_be_used_as_a_whole_raises(tmp_path, name, content, settings, message):
    with pytest.raises(DatasetError, match=message):
        read(put(tmp_path, content, name), **settings)


def test_a_missing_file_and_an_empty_directory_name_the_key(tmp_path):
    with pytest.raises(DatasetError, match=r"dataset\.path=.*nowhere\.jsonl does not exist"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(DatasetError, match=r"dataset\.path=.* is a directory without files ending in \.jsonl"):
        read(tmp_path)


def test_limit_stops_reading(tmp_path):
    path = put(tmp_path, GOOD + b"\n" + b"broken\n" * 3)
    assert [row.error for row in read(path, limit=1)] == [None]


def test_any_bytes_give_one_row_per_line_that_is_not_blank(tmp_path):
    rng = random.Random(0)
    pieces = [
        b'{"id":',
        b'"prompt"',
        b":",
        b'"x"',
        b"{",
        b"}",
        b"[",
        b",",
        b"\\u",
        b"d800",
        b"NaN",
        b"\xff",
        b"\xef\xbb\xbf",
    ]
    pieces += [b"\n", b"\r", b"\x00", b" ", b"1e999", GOOD, GOOD + b"\n", b"\x0b", b"\xe2\x80\xa8"]
    for _ in range(300):
        content = GOOD + b"\n" + b"".join(rng.choices(pieces, k=rng.randrange(1, 40)))
        num_lines = sum(bool(line.strip()) for line in content.split(b"\n"))
        rows = read(put(tmp_path, content), id_field=None)
        assert len(rows) == num_lines
        assert all((row.error is None) == bool(row.prompt) for row in rows)


def zstd(content):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


ROWS = [{"id": f"r{n}", "prompt": 'é {"[\\" ☃ ' * (1 + n % 3), "more": {"a": [n, {"b": None}]}} for n in range(300)]
PLAIN = "".join(json.dumps(row) + "\n" for row in ROWS)
TWICE = [ROWS[:150], ROWS[150:]]
FORMS = {
    "gzip": ("in.jsonl.gz", gzip.compress(PLAIN.encode())),
    "bzip2": ("in.jsonl.bz2", bz2.compress(PLAIN.encode())),
    "xz": ("in.jsonl.xz", lzma.compress(PLAIN.encode())),
    "zstd": ("in.jsonl.zst", zstd(PLAIN.encode())),
    "gzip without its name": ("in.jsonl", gzip.compress(PLAIN.encode())),
    "zstd without its name": ("in.jsonl", zstd(PLAIN.encode())),
    "two zstd frames": ("in.jsonl.zst", zstd(PLAIN[:9000].encode()) + zstd(PLAIN[9000:].encode())),
    "two gzip members": ("in.jsonl.gz", gzip.compress(PLAIN[:9000].encode()) + gzip.compress(PLAIN[9000:].encode())),
    "UTF-16": ("in.jsonl", PLAIN.encode("utf-16")),
    "UTF-16 of the other order": ("in.jsonl", b"\xfe\xff" + PLAIN.encode("utf-16-be")),
    "UTF-16 and packed": ("in.jsonl.xz", lzma.compress(PLAIN.encode("utf-16"))),
    "objects of several lines": ("in.jsonl", "".join(json.dumps(row, indent=2) + "\n" for row in ROWS).encode()),
    "objects that are not indented": ("in.jsonl", "\n\n".join(json.dumps(row, indent=0) for row in ROWS).encode()),
    "objects, named .json": ("in.json", "\r\n".join(json.dumps(row, indent=1) for row in ROWS).encode()),
    "objects, packed": ("in.jsonl.zst", zstd("".join(json.dumps(row, indent="\t") + "\n" for row in ROWS).encode())),
    "a list": ("in.jsonl", json.dumps(ROWS).encode()),
    "a list of several lines": ("in.jsonl", json.dumps(ROWS, indent=2).encode()),
    "a list with a row a line": ("in.jsonl", ("[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n").encode()),
    "a list, packed": ("in.json.bz2", bz2.compress(json.dumps(ROWS).encode())),
    "lines, named .json": ("in.json", PLAIN.encode()),
    "lines, named .json and packed": ("in.json.gz", gzip.compress(PLAIN.encode())),
}


@pytest.mark.parametrize(("name", "content"), FORMS.values(), ids=FORMS)
def test_rows_are_read_from_any_form_that_tells_what_it_is(tmp_path, name, content):
    rows = read(put(tmp_path, content, name))
    assert [(row.error, row.id, row.prompt, row.columns["more"]) for row in rows] == [
        (None, row["id"], row["prompt"], row["more"]) for row in ROWS
    ]


@pytest.mark.parametrize("name", ["utf16.jsonl", "lines.jsonl.zst"])
def test_one_bad_line_of_an_unpacked_file_costs_that_line(tmp_path, name):
    lines = '{"id": "a", "prompt": "1"}\n{"id": "b", "prompt": "\ud800"}\n{"id": "c", "prompt": "3"}\n'
    coded = lines.encode("utf-16", "surrogatepass") if "16" in name else zstd(lines.encode("utf-8", "surrogatepass"))
    rows = read(put(tmp_path, coded, name))
    assert [row.id for row in rows] == ["a", "bad-row-1", "c"]
    assert (rows[1].error or "").startswith(f"{name}, line 2, byte 27: not UTF-8: byte 0xed")


def test_a_bad_first_line_makes_no_other_form_of_json_lines(tmp_path):
    for first in (
        b"[",
        b'["p"]',
        b'["a", {',
        b"[[[[",
        b'{"a": 1',
        b'{"a": [{',
        b"{}}",
        b"}",
        b'{"id": "x"} {',
        b"[{",
        b'"',
        b"[]",
    ):
        rows = read(put(tmp_path, first + b"\n" + GOOD + b'\n{"id": "last", "prompt": "p"}\n'))
        assert [row.error is None for row in rows] == [False, True, True], first
        assert [row.id for row in rows[1:]] == ["good", "last"]


def test_a_bad_object_of_several_lines_is_an_error_row_that_says_where(tmp_path):
    good = json.dumps({"id": "a", "prompt": "p"}, indent=2)
    bad = '{\n  "id": "x",\n  "prompt": oh no\n}'
    rows = read(put(tmp_path, f"{good}\n{bad}\n\n{good.replace('a', 'c')}\n".encode()))
    assert [row.id for row in rows] == ["a", "bad-row-1", "c"]
    assert rows[1].error == f"in.jsonl, line 5, byte {len(good) + 1}: not JSON: Expecting value, line 3 column 13"


@pytest.mark.parametrize("max_row_bytes", [200, 1 << 20])
@pytest.mark.parametrize("broken", ['{\n  "id": "x",\n  "prompt": {', "{", '{\n  "id": "x\n}', "{\n" * 50, "[\n[", "}"])
def test_an_object_that_does_not_end_costs_no_other(tmp_path, broken, max_row_bytes):
    good = [json.dumps({"id": f"g{n}", "prompt": "{p", "more": [{"a": 1}]}, indent=2) + "\n" for n in range(9)]
    text = "".join([*good[:3], broken + "\n", *good[3:8], broken + "\n", good[8]])
    rows = read(put(tmp_path, text.encode()), max_row_bytes=max_row_bytes)
    assert [row.id for row in rows if row.error is None] == [f"g{n}" for n in range(9)]
    assert len(rows) > 9


FOREIGN = {
    "Parquet: set dataset=parquet": b"PAR1" + b"\0" * 99,
    "a zip archive or a spreadsheet": b"PK\x03\x04" + b"\0" * 99,
    "compressed by lz4": b"\x04\x22\x4d\x18" + b"\0" * 99,
    "a tar archive": b"a.jsonl".ljust(257, b"\0") + b"ustar\x0000",
    "a tar archive: unpack it": gzip.compress(b"a.jsonl".ljust(257, b"\0") + b"ustar\x0000"),
}


@pytest.mark.parametrize(("what", "content"), FOREIGN.items(), ids=FOREIGN)
@pytest.mark.parametrize("kind", [DatasetKind.jsonl, DatasetKind.csv])
def test_what_is_no_text_is_refused_once_by_what_it_is(tmp_path, kind, what, content):
    with pytest.raises(DatasetError, match=f"in.jsonl is {what}"):
        read_rows(DatasetConfig(kind=kind, path=str(put(tmp_path, content))))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("in.jsonl.zst", zstd(PLAIN.encode())[:-40], "in.jsonl.zst"),
        ("in.jsonl.xz", lzma.compress(PLAIN.encode())[:-40], "in.jsonl.xz"),
        ("in.jsonl.bz2", bz2.compress(PLAIN.encode())[:-40], "in.jsonl.bz2"),
        ("in.jsonl.zst", b"\x28\xb5\x2f\xfd" + b"garbage" * 9, "in.jsonl.zst"),
        ("in.jsonl", PLAIN.encode("utf-16")[:-1], "UTF-16 text that ends inside a character"),
        (
            "in.jsonl.zst",
            PLAIN.encode(),
            r"its name ends in \.zst, but its content is not compressed that way: rename it",
        ),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, name, content, why):
    with pytest.raises(DatasetError, match=f"cannot read .*{why}"):
        read(put(tmp_path, content, name))
