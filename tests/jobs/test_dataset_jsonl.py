import gzip
import json
import random
import re

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
    "duplicate keys": (b'{"id": "x", "prompt": "p", "prompt": "q"}', "'prompt' occurs twice"),
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
        ("in.json", b'{"rows": 1}', {"json_field": "data"}, r"nothing at 'data' of dataset\.json_field=data"),
        ("in.json", b"5", {}, "single value"),
        ("in.json", GOOD + b"\n" + GOOD, {}, r"not one JSON document.*\.jsonl"),
        ("in.json", b"\xff", {}, "not one JSON document"),
        ("in.jsonl", b"\n\n", {}, "holds no rows"),
        ("in.jsonl", b"", {}, "holds no rows"),
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
