"""A run's rows as the results of an OpenAI batch: a line for each request, in input order, with the errors among them.

Every id is a digest of the request, and there are no times, so that one input gives one file, however often its run was
killed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from typing import Any, BinaryIO, TypeAlias

import pyarrow as pa

from runtime.config.settings import ModelConfig
from runtime.errors import ConfigError

from ..datasets.openai_body import CHAT_URL, EMBEDDINGS_URL, SCORE_URLS, endpoint_of
from ..record.found import FoundRun
from .columns import from_json, is_json
from .config import ErrorRows
from .openai_encoded import embeddings_body, score_body
from .openai_tokens import JsonObject, Tokens

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
ID_DIGITS = 24
REQUEST_COLUMNS = ("custom_id", "url", "body")

RowValues: TypeAlias = Mapping[str, Any]  # one of an Arrow table


@dataclass(kw_only=True)
class BatchResults:
    """Writes result lines, of requests that are `wanted`, and counts them."""

    model: str
    tokens: Tokens
    rejected: AbstractSet[int]  # places in the input of rows that nothing was asked of the model for
    wanted: ErrorRows
    num_lines: int = 0
    num_errors: int = 0

    def write(self, tables: Iterable[pa.Table], schema: pa.Schema, file: BinaryIO) -> None:
        for place, rows in groupby(_rows(tables), key=lambda row: row["row_index"]):
            line, is_error = self._line(place, list(rows))
            self.num_errors += is_error
            if self.wanted is ErrorRows.keep or (self.wanted is ErrorRows.only) == is_error:
                self.num_lines += 1
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")

    def _line(self, place: int, samples: Sequence[RowValues]) -> tuple[JsonObject, bool]:
        """The result of one request, and whether it is an error."""
        first = samples[0]
        digest = _digest([place, first["id"], *(first[name] for name in REQUEST_COLUMNS)])
        custom_id = first["custom_id"] if isinstance(first["custom_id"], str) else None
        failed = next((row for row in samples if row["status"] != "ok"), None)
        body, error, status = None, None, 200
        if failed is None:
            body = self._body(first, samples, digest)
        else:
            is_refused = place in self.rejected
            status = 400 if is_refused else 500
            error = {"code": "invalid_request" if is_refused else "server_error", "message": failed["error"]}
            kind = "invalid_request_error" if is_refused else "server_error"
            body = {"error": {"message": failed["error"], "type": kind, "param": None, "code": error["code"]}}
        response = {"status_code": status, "request_id": f"req_{digest}", "body": body}
        line = {"id": f"batch_req_{digest}", "custom_id": custom_id, "response": response, "error": error}
        return line, failed is not None

    def _body(self, first: RowValues, samples: Sequence[RowValues], digest: str) -> JsonObject:
        url, asked = endpoint_of(first["url"]), first["body"]
        is_chat = url == CHAT_URL
        if url == EMBEDDINGS_URL:
            return embeddings_body(asked, samples, self.model)
        if url in SCORE_URLS:
            return score_body(asked, samples, self.model, digest)
        choices = [self._choice(row, asked, is_chat=is_chat) for row in samples]
        num_prompt, num_new = first["num_prompt_tokens"], sum(row["num_completion_tokens"] for row in samples)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{digest}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 0,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }

    def _choice(self, row: RowValues, asked: RowValues, *, is_chat: bool) -> JsonObject:
        choice = {"index": row["sample_index"], "finish_reason": FINISH_REASONS[row["finish_reason"]]}
        wanted = asked.get("logprobs")
        if not is_chat:
            logprobs = self.tokens.completion_logprobs(row, wanted) if wanted is not None else None
            return {**choice, "text": row["completion"], "logprobs": logprobs}
        message = {"role": "assistant", "content": row["completion"], "refusal": None}
        if row.get("reasoning") is not None:
            message["reasoning_content"] = row["reasoning"]
        logprobs = self.tokens.chat_logprobs(row, asked.get("top_logprobs") or 0) if wanted else None
        return {**choice, "message": message, "logprobs": logprobs}


def batch_results(shards: Sequence[FoundRun], schema: pa.Schema, wanted: ErrorRows) -> BatchResults:
    """What writes the results of these shards. Raises ConfigError where their rows were no requests."""
    lacking = [name for name in REQUEST_COLUMNS if name not in schema.names]
    if lacking:
        raise ConfigError(
            f"{shards[0].path} has no column {lacking[0]}: format=openai_batch needs a run of dataset=openai_batch "
            "with dataset.keep_columns=true"
        )
    run = shards[0]
    values = {**run.semantic, **run.operational}
    texts = {key: value if isinstance(value := values.get(key), str) else None for key in MODEL_KEYS}
    model = ModelConfig(
        name=texts["model.name"] or "hf",
        path=texts["model.path"],
        revision=texts["model.revision"],
        tokenizer=texts["model.tokenizer"],
    )
    rejected: set[int] = set()
    for plan in (plan for shard in shards for plan in shard.plans()):
        rows = zip(plan["row_index"].to_pylist(), plan["status"].to_pylist(), strict=True)
        rejected |= {place for place, status in rows if status == "rejected"}
    return BatchResults(
        model=model.path or model.name,
        tokens=Tokens(model=model, cache_dir=texts["offload.cache_dir"]),
        rejected=rejected,
        wanted=wanted,
    )


MODEL_KEYS = ("model.name", "model.path", "model.revision", "model.tokenizer", "offload.cache_dir")


def _rows(tables: Iterable[pa.Table]) -> Iterator[RowValues]:
    for table in tables:
        json_columns = [column.name for column in table.schema if is_json(column)]
        for row in table.to_pylist():
            yield row | {name: from_json(row[name]) for name in json_columns}


def _digest(value: Sequence[object]) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:ID_DIGITS]
