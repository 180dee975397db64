"""Reads the requests of a HELM dry run from `scenario_state.json`, which `helm-run --dry-run` writes.

HELM gets the answers through a client (jobs/evaluating/helm_client.py).
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from runtime.errors import DatasetError

from ..fields import DatasetFields
from ..helm import read_request, request_digest
from ..records import BadRecord, Fields, Json, Record, value_at
from ..row_rules import CountTokens, InputKind, make_row
from ..rows import Row
from .jsonl import read_jsonl

STATE_FILE = "scenario_state.json"
NEEDS = f"dataset.path=benchmark_output/runs/SUITE (written by helm-run --dry-run), or one {STATE_FILE}"


def read_requests(config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
    """Yields a row for each different request, with the digest of the request as id. Raises DatasetError if no file is
    found."""
    path = Path(config.path or "")
    files = sorted(path.glob(f"**/{STATE_FILE}")) if path.is_dir() else [path]
    if not files:
        raise DatasetError(f"dataset.path={config.path} contains no {STATE_FILE}: set {NEEDS}")
    known_ids = set[str]()
    for file in files:
        for record in read_jsonl(str(file), "request_states", max_row_bytes=config.max_row_bytes):
            row = _make_row(record, len(known_ids), file.parent.name, config)
            if row.id not in known_ids:
                known_ids.add(row.id)
                yield replace(row, source_file=record.source)


KINDS = {"helm": InputKind(rows=read_requests, keys=frozenset({"path"}), needs=NEEDS)}


def _make_row(record: Record, index: int, run: str, config: DatasetFields) -> Row:
    fields = record.fields or {}
    request = fields.get("request")
    if not isinstance(request, dict):
        error = record.error or f"{record.location}: no request: not a request state of HELM"
        return Row(index=index, id=record.name, prompt="", messages=None, columns={}, error=error)
    columns: Fields = {}
    if config.keep_columns:  # origin of the request, and its first correct reference
        references = [ref for ref in _as_list(_value_or_none(fields, "instance.references")) if isinstance(ref, dict)]
        correct = [_value_or_none(ref, "output.text") for ref in references if "correct" in _as_list(ref.get("tags"))]
        columns = {
            "helm_run": run,
            "instance_id": _value_or_none(fields, "instance.id"),
            "split": _value_or_none(fields, "instance.split"),
            "reference": correct[0] if correct else None,
        }
    id = request_digest(request)
    try:
        content, overrides = read_request(request, may_be_chat=config.chat_template)
    except BadRecord as error:
        return Row(index=index, id=id, prompt="", messages=None, columns=columns, error=f"{record.location}: {error}")
    return make_row(index, id, content, columns, config, overrides)


def _as_list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _value_or_none(fields: Fields, path: str) -> Json:
    with suppress(KeyError):
        return value_at(fields, path)
    return None
