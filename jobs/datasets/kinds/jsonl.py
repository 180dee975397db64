"""JSON lines read record by record: a bad line costs that line and nothing else.

Lines end at byte 10 and nowhere else.
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
    bounded_lines,
    list_files,
    open_bytes,
    packed_too,
    packing_of,
    reading,
    skip_bytes,
    unpacked_name,
)
from ..records import Fields, Record, too_long
from ..row_rules import CHAT_KEYS, SPAN_ROWS, Mark, Numbered, RowRange, RowSource, prompts
from ..strict_json import DECODER, Json, parse_json, shorten

ROWS_OF_A_DOCUMENT = 64  # of the longest kind, that are held at once
SPAN_BYTES = 32 * MIB
LEAST_ROW_BYTES = 3  # `{}` and the end of its line
_SUFFIXES = packed_too(".jsonl", ".ndjson", ".json")
_ANY_JSON = json.JSONDecoder()  # where a value ends, whatever rows may hold
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[][{}]')  # strings too, whose brackets do not count


class _Form(Enum):
    """Where the rows of a file lie: one in each `line`; in `objects` of several lines, one behind another; in a
    `document`, which is or holds a list of them."""

    lines = "lines"
    objects = "objects"
    document = "document"


_RowText: TypeAlias = tuple[int, int, bytes | None, int]  # line, offset, text (None: too long), bytes with its end


def read_jsonl(
    path: str, json_field: str | None = None, key: str = "path", *, max_row_bytes: int = DatasetFields.max_row_bytes
) -> Iterator[Record]:
    """The records of a file or of a directory's files, in order.

    A file's content says whether it is JSON lines, objects of several lines, or one document: a list of objects, or
    with `json_field` one that holds it there, dotted. What is packed is unpacked, and offsets count unpacked bytes.
    Raises DatasetError for what concerns a whole file.
    """
    for file in list_files(path, _SUFFIXES, key):
        yield from _records(file, json_field, max_row_bytes, Mark(file=0, row=0))


def _records(file: Path, json_field: str | None, max_row_bytes: int, mark: Mark) -> Iterator[Record]:
    """The records of one file from `mark` on."""
    with reading(file):
        form = _form_of(file, json_field, max_row_bytes)
        if form is _Form.document:
            yield from islice(_read_document(file, json_field, max_row_bytes), mark.row, None)
            return
        for number, offset_bytes, text, num_bytes in _rows(file, form, max_row_bytes, mark):
            name = f"{file.name}:{number}"
            place = f"{file.name}, line {number}, byte {offset_bytes}"
            if text is None:
                yield too_long(name, place, num_bytes, max_row_bytes)
            else:
                yield _parse_record(text, name, place)


def _form_of(file: Path, json_field: str | None, max_row_bytes: int) -> _Form:
    """Told by the file's beginning. A bad first line is no other form: what is not certain goes by the name."""
    is_named = unpacked_name(file.name).endswith(".json")
    otherwise = _Form.document if is_named else _Form.lines
    if json_field is not None:
        return _Form.document
    with open_bytes(file) as stream:
        head = b""
        for most_bytes in (HEAD_BYTES, max_row_bytes):
            head += stream.read(max(0, most_bytes - len(head)))
            text, is_whole = head.decode("utf-8", "replace").removeprefix("\ufeff").strip(" \t\r\n"), not stream.peek(1)
            if text.startswith("[") and is_named:
                return _Form.document
            begun = _form_of_beginning(text, is_whole=is_whole, is_named=is_named)
            if begun is not None or is_whole:
                return begun or otherwise
    return otherwise


def _form_of_beginning(text: str, *, is_whole: bool, is_named: bool) -> _Form | None:
    """The form of a file that begins with this text; None where it ends too early, or tells nothing."""
    is_list = text.startswith("[")
    try:
        value, end = _ANY_JSON.raw_decode(text)
    except (ValueError, RecursionError):  # a list that is not whole: an object, and behind it another item or the end
        if not is_list:
            return None
        items = text[1:].lstrip()
        try:
            value, end = _ANY_JSON.raw_decode(items)
        except (ValueError, RecursionError):
            return None
        is_item = isinstance(value, dict) and items[end:].lstrip().startswith((",", "]"))
        return _Form.document if is_item else None
    more = text[end:].lstrip()
    if is_list:
        return _Form.lines if more else _Form.document
    if not isinstance(value, dict) or (is_named and is_whole and not more):
        return None
    if "\n" in text[:end]:
        return _Form.objects
    return _Form.lines if not text[end:].partition("\n")[0].strip() else None


def read_jsonl_path(config: DatasetFields) -> Iterator[Record]:
    """The records at `dataset.path`, as `read_jsonl` reads them."""
    return read_jsonl(config.path or "", config.json_field, max_row_bytes=config.max_row_bytes)


def _count(config: DatasetFields, file: Path, most: int) -> int:
    """How many rows the file has, up to `most`. Lines are told apart and not parsed; a document is, unless it is too
    short for so many."""
    with reading(file):
        form = _form_of(file, config.json_field, config.max_row_bytes)
        if form is not _Form.document:
            return sum(1 for _ in islice(_rows(file, form, config.max_row_bytes, Mark(file=0, row=0)), most))
        num_bytes = file.stat().st_size
        if not packing_of(file) and num_bytes < LEAST_ROW_BYTES * most:
            return num_bytes // LEAST_ROW_BYTES
        return sum(1 for _ in islice(_read_document(file, config.json_field, config.max_row_bytes), most))


def _look(config: DatasetFields, numbered: Numbered) -> Iterator[RowRange]:
    number, file = numbered
    with reading(file):
        form = _form_of(file, config.json_field, config.max_row_bytes)
        mark, begin_bytes, rows = Mark(file=number, row=0), 0, list[Fields | None]()
        if form is _Form.document:
            records = _read_document(file, config.json_field, config.max_row_bytes)
            while rows := [record.fields for record in islice(records, SPAN_ROWS)]:
                yield RowRange(mark=mark, rows=rows)
                mark = Mark(file=number, row=mark.row + len(rows))
            return
        for row, (line, offset_bytes, text, _) in enumerate(_rows(file, form, config.max_row_bytes, mark)):
            if len(rows) == SPAN_ROWS or offset_bytes - begin_bytes > SPAN_BYTES:
                yield RowRange(mark=mark, rows=rows)
                mark = Mark(file=number, row=row, line=line - 1, offset_bytes=offset_bytes)
                rows, begin_bytes = [], offset_bytes
            rows.append(_fields(text))
        if rows:
            yield RowRange(mark=mark, rows=rows)


def _fields(text: bytes | None) -> Fields | None:
    """What a row's line holds, looked at in a hurry: nesting and lone surrogates are judged when it is read."""
    if text is None:
        return None
    try:
        value = DECODER.decode(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


SOURCE = RowSource(
    files=lambda config: list_files(config.path or "", _SUFFIXES),
    count=_count,
    look=_look,
    records=lambda config, file, mark: _records(file, config.json_field, config.max_row_bytes, mark),
)
KINDS = {"jsonl": prompts(read_jsonl_path, CHAT_KEYS | {"json_field"}, source=SOURCE)}


def _rows(file: Path, form: _Form, max_row_bytes: int, mark: Mark) -> Iterator[_RowText]:
    """The texts that are rows, from `mark` on."""
    with open_bytes(file) as stream:
        skip_bytes(stream, mark.offset_bytes)
        lines = _lines(stream, mark.line, mark.offset_bytes, max_row_bytes)
        yield from lines if form is _Form.lines else _objects(lines, max_row_bytes)


def _lines(stream: BufferedReader, number: int, offset_bytes: int, max_row_bytes: int) -> Iterator[_RowText]:
    """The lines that are not blank, behind line `number`."""
    for line, num_bytes in bounded_lines(stream, max_row_bytes):
        number += 1
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if num_bytes > len(line) or len(line.rstrip(b"\r\n")) > max_row_bytes:
            yield number, offset_bytes, None, num_bytes
        elif text.strip():
            yield number, offset_bytes, text.rstrip(b"\r\n"), num_bytes
        offset_bytes += num_bytes


def _objects(lines: Iterator[_RowText], max_row_bytes: int) -> Iterator[_RowText]:
    """Lines joined to objects: one ends with the line in which its last bracket closes. Where that does not come, each
    line that begins with a bracket is another object's first, as printers indent all others."""
    held, num_bytes, depth = list[_RowText](), 0, 0
    for line in lines:
        held.append(line)
        num_bytes, depth = num_bytes + line[3], depth + _depth(line)
        if depth > 0 and num_bytes <= max_row_bytes:
            continue
        if depth > 0:
            *ended, held = _divided(held)
            yield from (_joined(each, max_row_bytes) for each in ended)
            depth = sum(map(_depth, held)) if ended else depth
            held = [_joined(held, max_row_bytes)] if sum(each[3] for each in held) > max_row_bytes else held
            num_bytes = sum(each[3] for each in held)
        if depth <= 0:
            yield _joined(held, max_row_bytes)
            held, num_bytes, depth = [], 0, 0
    yield from (_joined(each, max_row_bytes) for each in _divided(held) if each)


def _depth(line: _RowText) -> int:
    """Levels of nesting that a line adds, below 0 where it ends some."""
    brackets = (found[0] for found in _BRACKETS.finditer(line[2] or b""))
    return sum(1 if each in (b"{", b"[") else -1 if each in (b"}", b"]") else 0 for each in brackets)


def _divided(lines: list[_RowText]) -> list[list[_RowText]]:
    """The lines in front of each that begins with a bracket, and those from it on."""
    begins = [place for place, line in enumerate(lines) if place and (line[2] or b"").startswith((b"{", b"["))]
    return [lines[begin:end] for begin, end in pairwise([0, *begins, len(lines)])]


def _joined(lines: list[_RowText], max_row_bytes: int) -> _RowText:
    """One row of several lines, without its text where it is too long."""
    texts, num_bytes = [line[2] for line in lines], sum(line[3] for line in lines)
    known = [text for text in texts if text is not None]
    is_short = num_bytes <= max_row_bytes and len(known) == len(texts)
    return lines[0][0], lines[0][1], b"\n".join(known) if is_short else None, num_bytes


def _read_document(file: Path, json_field: str | None, max_row_bytes: int) -> Iterator[Record]:
    most_bytes = ROWS_OF_A_DOCUMENT * max_row_bytes
    with open_bytes(file) as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise DatasetError(
            f"{file} is one JSON document of more than {most_bytes:,} bytes, {ROWS_OF_A_DOCUMENT} times "
            "dataset.max_row_bytes: raise that, or write JSON lines, which are read one by one"
        )
    try:
        value = parse_json(content.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except ValueError as error:
        raise DatasetError(f"{file} is not one JSON document: {error}") from error
    for step in json_field.split(".") if json_field else ():
        if not isinstance(value, dict) or step not in value:
            raise DatasetError(f"{file} has nothing at {shorten(step)} of dataset.json_field={json_field}")
        value = value[step]
    if not isinstance(value, list):
        hint = f"its fields: {', '.join(map(shorten, value))}" if isinstance(value, dict) else "it is a single value"
        raise DatasetError(f"{file} holds no list of rows at dataset.json_field={json_field or 'null'}; {hint}")
    for number, item in enumerate(value):
        yield _check_record(item, f"{file.name}:{number}", f"{file.name}, item {number}", max_row_bytes)


def _parse_record(line: bytes, name: str, place: str) -> Record:
    try:
        value = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start} of the line"
        return Record(name=name, place=place, error=f"{place}: {reason}")
    except ValueError as error:
        return Record(name=name, place=place, error=f"{place}: {error}")
    return _check_record(value, name, place)


def _check_record(value: Json, name: str, place: str, max_row_bytes: int | None = None) -> Record:
    if not isinstance(value, dict):
        return Record(name=name, place=place, error=f"{place}: not a JSON object")
    try:
        num_bytes = len(json.dumps(value, ensure_ascii=False).encode("utf-8"))
    except UnicodeEncodeError:
        return Record(name=name, place=place, error=f"{place}: holds a lone surrogate, which UTF-8 cannot encode")
    if max_row_bytes is not None and num_bytes > max_row_bytes:
        return too_long(name, place, num_bytes, max_row_bytes)
    return Record(name=name, place=place, fields=value)
