"""OpenAI's batch files: a request a line, `{custom_id, method, url, body}`. A line that cannot be answered is an error
row, whatever is wrong with it, and the others are answered.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from ..fields import DatasetFields
from ..openai_body import ENDPOINTS, LATER_URLS, Asked
from ..records import BadRecord, Fields, Record, as_chat, check_text, shorten
from ..row_rules import CountTokens, Kind
from ..rows import Row
from .jsonl import read_jsonl

FIELDS = frozenset({"custom_id", "method", "url", "body"})


def read_batch(config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
    """A row for each line, by its custom_id; its own fields are its columns."""
    lines = read_jsonl(config.path or "", max_row_bytes=config.max_row_bytes)
    records = list(islice(lines, config.limit))
    places = _first_places(records)
    for index, record in enumerate(records):
        yield replace(_row(record, index, places, config), source_file=record.source)


KINDS = {
    "openai_batch": Kind(
        rows=read_batch,
        keys=frozenset({"path"}),
        needs="dataset.path=requests.jsonl (a file for OpenAI's Batch API)",
        has_chats=True,
    )
}


def _first_places(records: Sequence[Record]) -> Mapping[str, int]:
    """The first line of each custom_id that can be one."""
    found: dict[str, int] = {}
    for index, record in enumerate(records):
        value = (record.fields or {}).get("custom_id")
        if isinstance(value, str):
            found.setdefault(value, index)
    return found


def _row(record: Record, index: int, places: Mapping[str, int], config: DatasetFields) -> Row:
    fields = record.fields
    columns = {key: value for key, value in (fields or {}).items() if key in FIELDS} if config.keep_columns else {}
    row = Row(index=index, id="", prompt="", messages=None, columns=columns, error=None)
    if fields is None:
        return replace(row, id=_free_id(index, places), error=record.error or f"{record.place}: not readable")
    try:
        custom_id = check_text(fields.get("custom_id"), "custom_id")
    except BadRecord as error:
        return replace(row, id=_free_id(index, places), error=f"{record.place}: {error}")
    if places[custom_id] != index:
        error = f"{record.place}: custom_id {shorten(custom_id)} is that of request {places[custom_id]} too"
        return replace(row, id=_free_id(index, places), error=error)
    try:
        content, overrides = _asked(fields)
    except BadRecord as error:
        return replace(row, id=custom_id, error=f"{record.place}: {error}")
    chat = as_chat(content, config) if content.messages is not None else content
    return replace(
        row,
        id=custom_id,
        prompt=chat.prompt,
        messages=chat.messages,
        template_kwargs=chat.template_kwargs,
        overrides=overrides,
    )


def _free_id(index: int, places: Mapping[str, int]) -> str:
    """An id that no line has."""
    found = f"bad-row-{index}"
    while found in places:
        found += "'"
    return found


def _asked(fields: Fields) -> Asked:
    unknown = sorted(fields.keys() - FIELDS)
    if unknown:
        raise BadRecord(f"unknown field {shorten(unknown[0])}: a line has custom_id, method, url and body")
    if fields.get("method") != "POST":
        raise BadRecord(f"method must be 'POST', got {shorten(str(fields.get('method')))}")
    url, body = fields.get("url"), fields.get("body")
    if url in LATER_URLS:
        raise BadRecord(f"url {shorten(str(url))} is not answered yet: {' and '.join(ENDPOINTS)} are")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise BadRecord(f"url must be one of {', '.join(ENDPOINTS)}, got {shorten(str(url))}")
    if not isinstance(body, dict):
        raise BadRecord("body is not an object")
    return ENDPOINTS[url](body)
