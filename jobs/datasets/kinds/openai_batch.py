"""Reads input files for OpenAI's Batch API: one request in each line, `{custom_id, method, url, body}`.

An invalid line becomes an error row, so that other lines are still answered.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from runtime.errors import DatasetError

from ..fields import DatasetFields
from ..openai_body import ENCODE_ENDPOINTS, ENDPOINTS, parse_endpoint, summarize_body
from ..records import BadRecord, Fields, Record, check_text, shorten, to_chat_content
from ..row_rules import CountTokens, InputKind
from ..rows import Row
from .jsonl import read_jsonl

FIELDS = ("custom_id", "method", "url", "body")


def read_batch(config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
    """Yields a row for each line, with its custom_id as id and its fields as columns."""
    lines = read_jsonl(config.path or "", max_row_bytes=config.max_row_bytes)
    records = list(islice(lines, config.limit))
    first_lines: dict[str, int] = {}  # number of the first line with each custom_id
    for index, record in enumerate(records):
        value = (record.fields or {}).get("custom_id")
        if isinstance(value, str):
            first_lines.setdefault(value, index)
    for index, record in enumerate(records):
        yield replace(_make_row(record, index, first_lines, config), source_file=record.source)


def _make_row(record: Record, index: int, first_lines: Mapping[str, int], config: DatasetFields) -> Row:
    fields = record.fields
    # Exported results need all four fields.
    columns = {key: (fields or {}).get(key) for key in FIELDS} if config.keep_columns else {}
    row = Row(index=index, id="", prompt="", messages=None, columns=columns, error=None)
    if fields is None:
        return replace(row, id=_unused_id(index, first_lines), error=record.error or f"{record.location}: not readable")
    try:
        custom_id = check_text(fields.get("custom_id"), "custom_id")
    except BadRecord as error:
        return replace(row, id=_unused_id(index, first_lines), error=f"{record.location}: {error}")
    if first_lines[custom_id] != index:
        error = f"{record.location}: custom_id {shorten(custom_id)} is already used by request {first_lines[custom_id]}"
        return replace(row, id=_unused_id(index, first_lines), error=error)
    try:
        return with_request(replace(row, id=custom_id), *_parse_url_and_body(fields), config)
    except BadRecord as error:
        return replace(row, id=custom_id, error=f"{record.location}: {error}")


def with_request(row: Row, url: str, body: Fields, config: DatasetFields) -> Row:
    """Returns `row` with the request that `url` and `body` define. Raises BadRecord."""
    if url in ENCODE_ENDPOINTS:
        columns = {**row.columns, "body": summarize_body(body)} if config.keep_columns else row.columns
        return replace(row, inputs=ENCODE_ENDPOINTS[url](body), columns=columns)
    content, overrides = ENDPOINTS[url](body)
    chat = to_chat_content(content, config) if content.messages is not None else content
    return replace(
        row,
        prompt=chat.prompt,
        prompt_ids=chat.prompt_ids,
        messages=chat.messages,
        template_kwargs=chat.template_kwargs,
        overrides=overrides,
    )


def _unused_id(index: int, first_lines: Mapping[str, int]) -> str:
    """An id for an error row, which no line has as custom_id."""
    id = f"bad-row-{index}"
    while id in first_lines:
        id += "'"
    return id


def _parse_url_and_body(fields: Fields) -> tuple[str, Fields]:
    unknown = sorted(fields.keys() - {*FIELDS})
    if unknown:
        raise BadRecord(f"unknown field {shorten(unknown[0])}; allowed: custom_id, method, url and body")
    method = fields.get("method")
    if method is not None and not (isinstance(method, str) and method.upper() == "POST"):
        raise BadRecord(f"method must be 'POST', got {shorten(str(method))}")
    url, body = parse_endpoint(fields.get("url")), fields.get("body")
    if url is None:
        known = ", ".join([*ENDPOINTS, *ENCODE_ENDPOINTS])
        raise BadRecord(f"url must be one of {known}, got {shorten(str(fields.get('url')))}")
    if not isinstance(body, dict):
        raise BadRecord("body is not an object")
    return url, body


def reject_wrong_endpoints(rows: Sequence[Row], encodes: bool) -> list[Row]:
    """Turns requests into error rows if another command answers their endpoint. Raises DatasetError if no valid request
    is left. `encodes`: True if this command encodes."""
    answered, foreign_endpoints = (ENCODE_ENDPOINTS, ENDPOINTS) if encodes else (ENDPOINTS, ENCODE_ENDPOINTS)
    urls, job = " and ".join(foreign_endpoints), "generate" if encodes else "encode"
    valid = [row for row in rows if row.error is None]
    foreign = {row.index for row in valid if (row.inputs is None) == encodes}
    if foreign and len(foreign) == len(valid):
        raise DatasetError(f"all requests of this file are to {urls}: use weightstream {job}")
    error = f"{urls} need weightstream {job}, in a separate run: this one answers {' and '.join(answered)}"
    return [
        replace(row, prompt="", messages=None, inputs=None, error=error) if row.index in foreign else row
        for row in rows
    ]


KINDS = {
    "openai_batch": InputKind(
        rows=read_batch,
        keys=frozenset({"path"}),
        needs="dataset.path=requests.jsonl (a file for OpenAI's Batch API)",
        has_chats=True,
        reject_wrong_endpoints=reject_wrong_endpoints,
    )
}
