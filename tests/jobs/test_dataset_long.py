"""One long row costs that row: its bytes are bounded before they cost memory, and the others go on."""

import bz2
import copy
import gzip
import json
import lzma
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.datasets import DatasetConfig, DatasetKind, Row, read_rows
from jobs.datasets.fields import MAX_ROWS
from jobs.run.requests import completion_requests, make_batch
from runtime import Runtime, RuntimeConfig
from runtime.config.settings import SamplingConfig
from runtime.errors import ConfigError, DatasetError
from runtime.requests import prompts as tokens
from runtime.sequences.sequence import Request

MOST = 1000
LONG = "x" * 5 * MOST


def read(path: Path, kind: DatasetKind, most: int = MOST) -> list[Row]:
    return read_rows(DatasetConfig(kind=kind, path=str(path), id_field="id", max_row_bytes=most))


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"id": str(n), "prompt": text}).encode() + b"\n" for n, text in enumerate(texts))


def write_parquet(path: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"id": [str(n) for n in range(len(texts))], "prompt": texts}), path)


def write_csv(path: Path, texts: list[str]) -> None:
    path.write_text("id,prompt\n" + "".join(f"{n},{text}\n" for n, text in enumerate(texts)))


def write_document(path: Path, texts: list[str]) -> None:
    path.write_text(json.dumps([{"id": str(n), "prompt": text} for n, text in enumerate(texts)]))


WRITERS: dict[str, Callable[[Path, list[str]], object]] = {
    "in.jsonl": lambda path, texts: path.write_bytes(lines(texts)),
    "in.jsonl.gz": lambda path, texts: path.write_bytes(gzip.compress(lines(texts))),
    "in.json": write_document,
    "in.csv": write_csv,
    "in.parquet": write_parquet,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_long_row_is_an_error_row_with_both_sizes_and_the_others_are_read(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name, ["a", LONG, "b"])
    kind = DatasetKind.jsonl if "json" in name else DatasetKind[name.rpartition(".")[2]]
    rows = read(tmp_path / name, kind)
    assert [row.prompt for row in rows] == ["a", "", "b"]
    assert "dataset.max_row_bytes=1,000" in (rows[1].error or "")
    assert "the row has 5,0" in (rows[1].error or "")
    assert [row.prompt for row in read(tmp_path / name, kind, most=10 * MOST)] == ["a", LONG, "b"]


def test_the_longest_line_that_may_be_is_read(tmp_path: Path) -> None:
    line = lines(["x"])
    for ending in (b"", b"\n", b"\r\n"):
        path = tmp_path / "in.jsonl"
        path.write_bytes(line.rstrip() + ending)
        assert read(path, DatasetKind.jsonl, most=len(line) - 1)[0].error is None
        assert read(path, DatasetKind.jsonl, most=len(line) - 2)[0].error is not None


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("pack", "coding", "window_bytes"),
    [
        (gzip.compress, "utf-8", 0),
        (bz2.compress, "utf-8", 0),
        (lzma.compress, "utf-8", 8 << 20),  # the format's own
        (zstd, "utf-8", 0),
        (bytes, "utf-16", 0),
        (zstd, "utf-16", 0),
    ],
    ids=["gzip", "bzip2", "xz", "zstd", "UTF-16", "UTF-16 in zstd"],
)
def test_the_bytes_of_a_long_line_are_never_held(
    pack: Callable[[bytes], bytes], coding: str, window_bytes: int, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    text = b'{"id": "a", "prompt": "' + b"x" * 25_000_000 + b'"}\n' + lines(["b"])
    path.write_bytes(pack(text.decode().encode(coding)))
    tracemalloc.start()
    rows = read(path, DatasetKind.jsonl, most=1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [row.error is None for row in rows] == [False, True]
    assert rows[1].id == "0"
    assert peak < 10_000_000 + window_bytes


@pytest.mark.parametrize("num_bytes", [900, 1001, 70_000])
def test_a_long_object_of_several_lines_is_an_error_row_and_those_behind_it_are_read(
    num_bytes: int, tmp_path: Path
) -> None:
    objects = [{"id": id, "prompt": "p", "more": ["x" * 40] * (num_bytes // 48 if id == "b" else 1)} for id in "abc"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each, indent=2) + "\n" for each in objects))
    first, long, last = read(tmp_path / "in.jsonl", DatasetKind.jsonl)
    assert [first.id, last.id, first.error, last.error] == ["a", "c", None, None]
    assert (long.error is None) == (num_bytes < MOST)
    assert long.error is None or long.error.endswith(f"bytes, above dataset.max_row_bytes={MOST:,}")


def test_a_long_document_is_refused_with_what_to_change(tmp_path: Path) -> None:
    write_document(tmp_path / "in.json", ["x" * 90] * 1000)
    with pytest.raises(DatasetError, match=r"more than 64,000 bytes.*dataset\.max_row_bytes.*JSON lines"):
        read(tmp_path / "in.json", DatasetKind.jsonl)


def test_what_may_never_end_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (Path("/dev/zero"), tmp_path / "pipe.jsonl"):
        for kind in (DatasetKind.jsonl, DatasetKind.csv, DatasetKind.parquet):
            with pytest.raises(DatasetError, match="neither a file nor a directory"):
                read(path, kind)


@pytest.mark.parametrize("row", [b"2,wor\xfe,extra", b"2,wor\xfe", b"\xfe,a,b,c", b"2"])
def test_a_csv_row_that_is_wrong_twice_costs_itself(
    row: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes("id,prómpt\n1,héllo\n".encode() + row + "\n3,lást\n".encode())
    config = DatasetConfig(kind=DatasetKind.csv, path=str(path), id_field="id", prompt_field="prómpt")
    rows = read_rows(config)
    assert [(row.id, row.prompt, row.error is None) for row in rows[::2]] == [("1", "héllo", True), ("3", "lást", True)]
    assert rows[1].error is not None
    assert len(rows) == 3
    assert capfd.readouterr().err == ""


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(RuntimeConfig(sampling=SamplingConfig(max_new_tokens=2)))


def row(index: int, prompt: str) -> Row:
    return Row(index=index, id=str(index), prompt=prompt, messages=None, columns={}, error=None)


def test_a_prompt_that_cannot_fit_is_refused_before_all_of_it_is_tokenised(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    tokenize = tokens.tokenize

    def counted(model, texts, **more):
        given.append(sum(map(len, texts)))
        return tokenize(model, texts, **more)

    monkeypatch.setattr(tokens, "tokenize", counted)
    asked = make_batch(runtime, [row(0, "one"), row(1, "x" * 20_000_000), row(2, "two")], completion_requests)
    assert [request.id for request in asked.requests] == ["0", "2"]
    assert "20,000,000 characters and more than" in asked.rejected[0].error
    assert "context of 2,048" in asked.rejected[0].error
    assert sum(given) < 3 * tokens.SEGMENT_CHARACTERS


def test_a_long_prompt_that_fits_has_the_tokens_of_the_whole_text(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["word " * 300, "x" * 2000, "é" * 900]
    whole = [runtime.tokenize([text])[0] for text in texts]
    monkeypatch.setattr(tokens, "SEGMENT_CHARACTERS", 100)
    asked = make_batch(runtime, [row(n, text) for n, text in enumerate(texts)], completion_requests)
    assert [request.prompt_ids for request in asked.requests] == whole


@pytest.mark.parametrize("segment_characters", [2, 1 << 18], ids=["in segments", "whole"])
def test_a_text_that_the_tokenizer_refuses_costs_its_row(
    segment_characters: int, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As the tokenizers library raises it."""

    tokenize = tokens.tokenize

    def panicking(model, texts, **more):
        if {"two", "tw"} & {*texts}:
            raise Panic("called `Option::unwrap()` on a `None` value")
        return tokenize(model, texts, **more)

    monkeypatch.setattr(tokens, "tokenize", panicking)
    monkeypatch.setattr(tokens, "SEGMENT_CHARACTERS", segment_characters)
    asked = make_batch(runtime, [row(0, "one"), row(1, "two"), row(2, "three")], completion_requests)
    assert [type(request) for request in asked.requests] == [Request, Request]
    assert "tokenizer refuses the prompt: called `Option::unwrap()`" in asked.rejected[0].error


def test_more_completions_than_a_run_can_have_are_refused_before_they_are_made(runtime: Runtime) -> None:
    many = [row(0, "one")] * (MAX_ROWS // 10_000 + 1)
    runtime = copy.copy(runtime)
    runtime.config = replace(runtime.config, sampling=SamplingConfig(n=10_000, temperature=1.0))
    what = r"sampling\.n=10,000, or the rows' own n, gives 50,010,000"
    with pytest.raises(ConfigError, match=what):
        make_batch(runtime, many, completion_requests)


def test_more_rows_than_a_run_can_have_are_refused_before_they_are_made(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines(["a"] * 3))
    config = DatasetConfig(kind=DatasetKind.jsonl, path=str(tmp_path / "in.jsonl"), repeat=MAX_ROWS)
    with pytest.raises(ConfigError, match=r"dataset\.repeat=50,000,000 times 3 rows is above the limit of 50,000,000"):
        read_rows(config)
