"""JSON lines read record by record: a bad line costs that line and nothing else.

Lines end at byte 10 and nowhere else.
"""

import codecs
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from runtime.errors import DatasetError
from runtime.units import MIB

from ..fields import DatasetFields
from ..files import bounded_lines, list_files, open_bytes, reading
from ..records import Fields, Record, too_long
from ..row_rules import CHAT_KEYS, prompts
from ..sources import STRETCH_ROWS, Mark, Numbered, Source, Stretch, stretched
from ..strict_json import DECODER, Json, parse_json, shorten

ROWS_OF_A_DOCUMENT = 64  # of the longest kind, that are held at once
STRETCH_BYTES = 32 * MIB
LEAST_ROW_BYTES = 3  # `{}` and the end of its line
_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz")


def read_jsonl(
    path: str, json_field: str | None = None, key: str = "path", *, max_row_bytes: int = DatasetFields.max_row_bytes
) -> Iterator[Record]:
    """The records of a file or of a directory's files, in order.

    A `.json` file (or any, with `json_field`) is one document: a list of objects, or one that holds it at the dotted
    `json_field`. Every other file is JSON lines. `.gz` is unpacked, and offsets count unpacked bytes. Raises
    DatasetError for what concerns a whole file.
    """
    for file in list_files(path, _SUFFIXES, key):
        with reading(file):
            if _is_document(file, json_field):
                yield from _read_document(file, json_field, max_row_bytes)
            else:
                yield from _read_lines(file, max_row_bytes)


def _is_document(file: Path, json_field: str | None) -> bool:
    return json_field is not None or file.name.endswith((".json", ".json.gz"))


def read_jsonl_path(config: DatasetFields) -> Iterator[Record]:
    """The records at `dataset.path`, as `read_jsonl` reads them."""
    return read_jsonl(config.path or "", config.json_field, max_row_bytes=config.max_row_bytes)


def _files(config: DatasetFields) -> list[Path]:
    return list_files(config.path or "", _SUFFIXES)


def _count(config: DatasetFields, file: Path, most: int) -> int:
    """How many rows the file has, up to `most`. Lines are told apart and not parsed; a document is, unless it is too
    short for so many."""
    with reading(file):
        if not _is_document(file, config.json_field):
            return sum(1 for _ in islice(_lines(file, config.max_row_bytes), most))
        if not file.name.endswith(".gz") and file.stat().st_size < LEAST_ROW_BYTES * most:
            return file.stat().st_size // LEAST_ROW_BYTES
        return sum(1 for _ in islice(_read_document(file, config.json_field, config.max_row_bytes), most))


def _look(config: DatasetFields, numbered: Numbered) -> Iterator[Stretch]:
    number, file = numbered
    with reading(file):
        if _is_document(file, config.json_field):
            records = _read_document(file, config.json_field, config.max_row_bytes)
            yield from stretched((record.fields for record in records), number)
        else:
            yield from _look_at_lines(file, number, config.max_row_bytes)


def _look_at_lines(file: Path, number: int, max_row_bytes: int) -> Iterator[Stretch]:
    rows: list[Fields | None] = []
    mark, begin_bytes = Mark(file=number, row=0), 0
    for row, (line, offset_bytes, text, _) in enumerate(_lines(file, max_row_bytes)):
        if len(rows) == STRETCH_ROWS or offset_bytes - begin_bytes > STRETCH_BYTES:
            yield Stretch(mark=mark, rows=rows)
            mark = Mark(file=number, row=row, line=line - 1, offset_bytes=offset_bytes)
            rows, begin_bytes = [], offset_bytes
        rows.append(_fields(text))
    if rows:
        yield Stretch(mark=mark, rows=rows)


def _fields(text: bytes | None) -> Fields | None:
    """What a row's line holds, looked at in a hurry: nesting and lone surrogates are judged when it is read."""
    if text is None:
        return None
    try:
        value = DECODER.decode(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _records(config: DatasetFields, file: Path, mark: Mark) -> Iterator[Record]:
    with reading(file):
        if _is_document(file, config.json_field):
            yield from islice(_read_document(file, config.json_field, config.max_row_bytes), mark.row, None)
        else:
            yield from _read_lines(file, config.max_row_bytes, mark)


SOURCE = Source(files=_files, count=_count, look=_look, records=_records)
KINDS = {"jsonl": prompts(read_jsonl_path, CHAT_KEYS | {"json_field"}, source=SOURCE)}


def _read_lines(file: Path, max_row_bytes: int, mark: Mark | None = None) -> Iterator[Record]:
    """The records from `mark` on, or all."""
    for number, offset_bytes, text, num_bytes in _lines(file, max_row_bytes, mark):
        name = f"{file.name}:{number}"
        place = f"{file.name}, line {number}, byte {offset_bytes}"
        if text is None:
            yield too_long(name, place, num_bytes, max_row_bytes)
        else:
            yield _parse_record(text, name, place)


def _lines(file: Path, max_row_bytes: int, mark: Mark | None = None) -> Iterator[tuple[int, int, bytes | None, int]]:
    """The lines that are rows, from `mark` on: number, offset, text without its end, None where it is too long, and
    bytes."""
    number, offset_bytes = (mark.line, mark.offset_bytes) if mark is not None else (0, 0)
    with open_bytes(file) as stream:
        stream.seek(offset_bytes)  # of what is unpacked, where it is packed
        for line, num_bytes in bounded_lines(stream, max_row_bytes):
            number += 1
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if num_bytes > len(line) or len(line.rstrip(b"\r\n")) > max_row_bytes:
                yield number, offset_bytes, None, num_bytes
            elif text.strip():
                yield number, offset_bytes, text.rstrip(b"\r\n"), num_bytes
            offset_bytes += num_bytes


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
        hint = "" if json_field else "; JSON lines need a name ending in .jsonl"
        raise DatasetError(f"{file} is not one JSON document: {error}{hint}") from error
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
