"""Reads JSON files one record at a time, so that an invalid line affects only its own record.

Only a newline character (byte 10) ends a line.
"""

import codecs
import json
import re
from collections.abc import Iterator
from enum import Enum
from io import BufferedReader
from itertools import islice, pairwise
from pathlib import Path
from typing import TypeAlias

from runtime.errors import DatasetError
from runtime.units import MIB

from ..fields import DatasetFields
from ..files import (
    HEAD_BYTES,
    detect_compression,
    list_files,
    open_bytes,
    read_bounded_lines,
    skip_bytes,
    strip_compression_suffix,
    translate_read_errors,
    with_compressed_suffixes,
)
from ..records import Fields, Record, too_long_record
from ..row_rules import CHAT_KEYS, MAX_RANGE_ROWS, NumberedFile, RowRange, RowSource, SeekPoint, prompt_kind
from ..strict_json import DECODER, Json, parse_json, shorten

MAX_DOCUMENT_ROWS = 64  # limit of a document, which is read into memory: so many rows of maximum length
MAX_RANGE_BYTES = 32 * MIB
MIN_ROW_BYTES = 3  # `{}` and a newline
_SUFFIXES = with_compressed_suffixes(".jsonl", ".ndjson", ".json")
_ANY_JSON = json.JSONDecoder()  # finds the end of a value; rows are validated later
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[][{}]')  # brackets, and strings as a whole, to skip brackets in them


class _Layout(Enum):
    """How the rows are in a file: one in each line (`lines`), objects of several lines (`objects`), or one `document`
    that is a list of rows or has such a list."""

    lines = "lines"
    objects = "objects"
    document = "document"


# Line number, offset in bytes, text without line end (None: too long), and number of bytes with line end.
_RowText: TypeAlias = tuple[int, int, bytes | None, int]


def read_jsonl(
    path: str, json_field: str | None = None, key: str = "path", *, max_row_bytes: int = DatasetFields.max_row_bytes
) -> Iterator[Record]:
    """Reads the records of a file, or of the files of a directory in order.

    The layout is detected from the content: JSON lines, objects of several lines, or one document. A document is a list
    of objects, or has this list at the dotted path `json_field`. Offsets count decompressed bytes. Raises DatasetError
    for errors that affect a whole file.
    """
    for file in list_files(path, _SUFFIXES, key):
        yield from _read_file(file, json_field, max_row_bytes, SeekPoint(file=0, row=0))


def _read_file(file: Path, json_field: str | None, max_row_bytes: int, start: SeekPoint) -> Iterator[Record]:
    """Yields the records of one file from `start` on."""
    with translate_read_errors(file):
        layout = _detect_layout(file, json_field, max_row_bytes)
        if layout is _Layout.document:
            yield from islice(_read_document(file, json_field, max_row_bytes), start.row, None)
            return
        for number, offset_bytes, text, num_bytes in _row_texts(file, layout, max_row_bytes, start):
            name = f"{file.name}:{number}"
            location = f"{file.name}, line {number}, byte {offset_bytes}"
            if text is None:
                yield too_long_record(name, location, num_bytes, max_row_bytes)
            else:
                yield _parse_record(text, name, location)


def _detect_layout(file: Path, json_field: str | None, max_row_bytes: int) -> _Layout:
    """Detects the layout from the beginning of a file, or from its name if the first line is invalid. Reads more of the
    file if a short beginning is not enough."""
    has_json_suffix = strip_compression_suffix(file.name).endswith(".json")
    default = _Layout.document if has_json_suffix else _Layout.lines
    if json_field is not None:
        return _Layout.document
    with open_bytes(file) as stream:
        head = b""
        for max_bytes in (HEAD_BYTES, max_row_bytes):  # the second time, with the longest possible first row
            head += stream.read(max(0, max_bytes - len(head)))
            text, is_whole = head.decode("utf-8", "replace").removeprefix("\ufeff").strip(" \t\r\n"), not stream.peek(1)
            if text.startswith("[") and has_json_suffix:
                return _Layout.document
            detected = _detect_layout_from_head(text, is_whole=is_whole, has_json_suffix=has_json_suffix)
            if detected is not None or is_whole:
                return detected or default
    return default


def _detect_layout_from_head(text: str, *, is_whole: bool, has_json_suffix: bool) -> _Layout | None:
    """The layout of a file that begins with `text`; None if `text` is too short or ambiguous."""
    is_list = text.startswith("[")
    try:
        value, end = _ANY_JSON.raw_decode(text)
    except (ValueError, RecursionError):
        # Probably the beginning of a list. It is one if it has an object, and then another item or the end.
        if not is_list:
            return None
        items = text[1:].lstrip()
        try:
            value, end = _ANY_JSON.raw_decode(items)
        except (ValueError, RecursionError):
            return None
        is_item = isinstance(value, dict) and items[end:].lstrip().startswith((",", "]"))
        return _Layout.document if is_item else None
    rest = text[end:].lstrip()
    if is_list:  # with text after it, it is an invalid line of JSON lines
        return _Layout.lines if rest else _Layout.document
    if not isinstance(value, dict) or (has_json_suffix and is_whole and not rest):
        return None
    if "\n" in text[:end]:  # the first object has several lines
        return _Layout.objects
    return _Layout.lines if not text[end:].partition("\n")[0].strip() else None


def read_jsonl_path(config: DatasetFields) -> Iterator[Record]:
    return read_jsonl(config.path or "", config.json_field, max_row_bytes=config.max_row_bytes)


def _count_rows(config: DatasetFields, file: Path, max_rows: int) -> int:
    """Counts rows up to `max_rows`, without parsing lines. A document is parsed, unless it is too short for `max_rows`
    rows."""
    with translate_read_errors(file):
        layout = _detect_layout(file, config.json_field, config.max_row_bytes)
        if layout is not _Layout.document:
            texts = _row_texts(file, layout, config.max_row_bytes, SeekPoint(file=0, row=0))
            return sum(1 for _ in islice(texts, max_rows))
        num_bytes = file.stat().st_size
        if not detect_compression(file) and num_bytes < MIN_ROW_BYTES * max_rows:
            return num_bytes // MIN_ROW_BYTES  # an upper bound, and below `max_rows`
        return sum(1 for _ in islice(_read_document(file, config.json_field, config.max_row_bytes), max_rows))


def _scan(config: DatasetFields, numbered: NumberedFile) -> Iterator[RowRange]:
    """Yields all rows of a file in ranges, as `RowSource.scan`."""
    number, file = numbered
    with translate_read_errors(file):
        layout = _detect_layout(file, config.json_field, config.max_row_bytes)
        start, begin_bytes, rows = SeekPoint(file=number, row=0), 0, list[Fields | None]()
        if layout is _Layout.document:
            records = _read_document(file, config.json_field, config.max_row_bytes)
            while rows := [record.fields for record in islice(records, MAX_RANGE_ROWS)]:
                yield RowRange(start=start, rows=rows)
                start = SeekPoint(file=number, row=start.row + len(rows))
            return
        for row, (line, offset_bytes, text, _) in enumerate(_row_texts(file, layout, config.max_row_bytes, start)):
            if len(rows) == MAX_RANGE_ROWS or offset_bytes - begin_bytes > MAX_RANGE_BYTES:
                yield RowRange(start=start, rows=rows)
                start = SeekPoint(file=number, row=row, line=line - 1, offset_bytes=offset_bytes)
                rows, begin_bytes = [], offset_bytes
            rows.append(_parse_fields(text))
        if rows:
            yield RowRange(start=start, rows=rows)


def _parse_fields(text: bytes | None) -> Fields | None:
    """The fields of a row for the survey; None if it cannot be parsed. Depth and surrogates are not checked: they are
    when the row is read."""
    if text is None:
        return None
    try:
        value = DECODER.decode(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


SOURCE = RowSource(
    files=lambda config: list_files(config.path or "", _SUFFIXES),
    count=_count_rows,
    scan=_scan,
    read_records=lambda config, file, start: _read_file(file, config.json_field, config.max_row_bytes, start),
)
KINDS = {"jsonl": prompt_kind(read_jsonl_path, CHAT_KEYS | {"json_field"}, source=SOURCE)}


def _row_texts(file: Path, layout: _Layout, max_row_bytes: int, start: SeekPoint) -> Iterator[_RowText]:
    """Yields the text of each row of a file that is no document, from `start` on."""
    with open_bytes(file) as stream:
        skip_bytes(stream, start.offset_bytes)
        lines = _split_lines(stream, start.line, start.offset_bytes, max_row_bytes)
        yield from lines if layout is _Layout.lines else _join_objects(lines, max_row_bytes)


def _split_lines(stream: BufferedReader, line_number: int, offset_bytes: int, max_row_bytes: int) -> Iterator[_RowText]:
    """Yields the lines that are not blank. `line_number`: of the line before the stream's position."""
    for line, num_bytes in read_bounded_lines(stream, max_row_bytes):
        line_number += 1
        text = line.removeprefix(codecs.BOM_UTF8) if line_number == 1 else line
        if num_bytes > len(line) or len(line.rstrip(b"\r\n")) > max_row_bytes:
            yield line_number, offset_bytes, None, num_bytes
        elif text.strip():
            yield line_number, offset_bytes, text.rstrip(b"\r\n"), num_bytes
        offset_bytes += num_bytes


def _join_objects(lines: Iterator[_RowText], max_row_bytes: int) -> Iterator[_RowText]:
    """Joins lines to objects. An object ends with the line that closes its last bracket.

    If an object becomes too long or is never closed, one of its brackets is probably missing. Then each line that
    begins with a bracket starts a new object, because inner lines of printed objects are indented.
    """
    pending, num_bytes, depth = list[_RowText](), 0, 0  # lines of the current object, and its open brackets
    for line in lines:
        pending.append(line)
        num_bytes, depth = num_bytes + line[3], depth + _nesting_change(line)
        if depth > 0 and num_bytes <= max_row_bytes:
            continue
        if depth > 0:
            *complete, pending = _split_at_brackets(pending)  # all but the last are objects
            yield from (_join_lines(lines, max_row_bytes) for lines in complete)
            depth = sum(map(_nesting_change, pending)) if complete else depth
            num_bytes = sum(num_line_bytes for *_, num_line_bytes in pending)
            pending = [_join_lines(pending, max_row_bytes)] if num_bytes > max_row_bytes else pending
        if depth <= 0:
            yield _join_lines(pending, max_row_bytes)
            pending, num_bytes, depth = [], 0, 0
    yield from (_join_lines(lines, max_row_bytes) for lines in _split_at_brackets(pending) if lines)


def _nesting_change(line: _RowText) -> int:
    """The number of brackets that a line opens, minus those that it closes."""
    tokens = (match[0] for match in _BRACKETS.finditer(line[2] or b""))
    return sum(1 if token in (b"{", b"[") else -1 if token in (b"}", b"]") else 0 for token in tokens)


def _split_at_brackets(lines: list[_RowText]) -> list[list[_RowText]]:
    """Splits lines before each line that begins with a bracket."""
    begins = [index for index, line in enumerate(lines) if index and (line[2] or b"").startswith((b"{", b"["))]
    return [lines[begin:end] for begin, end in pairwise([0, *begins, len(lines)])]


def _join_lines(lines: list[_RowText], max_row_bytes: int) -> _RowText:
    """Joins lines to one row. The text of the row is None if it is too long."""
    texts, num_bytes = [line[2] for line in lines if line[2] is not None], sum(line[3] for line in lines)
    is_short = num_bytes <= max_row_bytes and len(texts) == len(lines)
    return lines[0][0], lines[0][1], b"\n".join(texts) if is_short else None, num_bytes


def _read_document(file: Path, json_field: str | None, max_row_bytes: int) -> Iterator[Record]:
    """Yields the records of a file that is one JSON value. Reads it into memory."""
    max_bytes = MAX_DOCUMENT_ROWS * max_row_bytes
    with open_bytes(file) as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DatasetError(
            f"{file} is one JSON document of more than {max_bytes:,} bytes, {MAX_DOCUMENT_ROWS} times "
            "dataset.max_row_bytes: raise that, or convert the file to JSON lines"
        )
    try:
        value = parse_json(content.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except ValueError as error:
        raise DatasetError(f"{file} is not one JSON document: {error}") from error
    for step in json_field.split(".") if json_field else ():
        if not isinstance(value, dict) or step not in value:
            raise DatasetError(f"{file} has no field {shorten(step)} of dataset.json_field={json_field}")
        value = value[step]
    if not isinstance(value, list):
        hint = f"its fields: {', '.join(map(shorten, value))}" if isinstance(value, dict) else "it is a single value"
        raise DatasetError(f"{file} has no list of rows at dataset.json_field={json_field or 'null'}; {hint}")
    for number, item in enumerate(value):
        yield _check_record(item, f"{file.name}:{number}", f"{file.name}, item {number}", max_row_bytes)


def _parse_record(line: bytes, name: str, location: str) -> Record:
    try:
        value = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start} of the line"
        return Record(name=name, location=location, error=f"{location}: {reason}")
    except ValueError as error:
        return Record(name=name, location=location, error=f"{location}: {error}")
    return _check_record(value, name, location)


def _check_record(value: Json, name: str, location: str, max_row_bytes: int | None = None) -> Record:
    if not isinstance(value, dict):
        return Record(name=name, location=location, error=f"{location}: not a JSON object")
    try:
        num_bytes = len(json.dumps(value, ensure_ascii=False).encode("utf-8"))
    except UnicodeEncodeError:
        error = f"{location}: has a lone surrogate, which UTF-8 cannot encode"
        return Record(name=name, location=location, error=error)
    if max_row_bytes is not None and num_bytes > max_row_bytes:
        return too_long_record(name, location, num_bytes, max_row_bytes)
    return Record(name=name, location=location, fields=value)
