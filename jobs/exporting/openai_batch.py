"""Exports a run as OpenAI batch results: a line per request, in input order, errors included. Output is deterministic:
ids are digests of requests, and there are no timestamps."""

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from runtime.config.settings import ModelConfig
from runtime.errors import ConfigError

from ..datasets.openai_body import CHAT_URL, EMBEDDINGS_URL, SCORE_URLS, count_inputs, parse_endpoint
from ..record.run_reader import RunReader
from .columns import JsonObject, ResultWriter, RowValues
from .config import ErrorRows

if TYPE_CHECKING:
    from runtime.sequences.detokenizer import Detokenizer

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
ID_DIGITS = 24
REQUEST_COLUMNS = ("custom_id", "url", "body")
MODEL_KEYS = ("model.name", "model.path", "model.revision", "model.tokenizer", "offload.cache_dir")
MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON lacks


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token and its log-probability. `data`: its bytes in the text."""

    id: int
    data: bytes
    logprob: float

    @property
    def text(self) -> str:
        """Decoded text; an incomplete UTF-8 sequence becomes `bytes:` and its bytes, as in OpenAI's API."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)

    @property
    def as_json(self) -> JsonObject:
        return {"token": self.text, "bytes": list(self.data), "logprob": self.logprob}


@dataclass(frozen=True, kw_only=True)
class LogprobFormatter:
    """Formats rows' log-probabilities for OpenAI's API. Loads the tokenizer of `model` on first use."""

    model: ModelConfig
    cache_dir: str | None

    def chat_logprobs(self, row: Mapping[str, Any], num_top: int) -> JsonObject:
        content = [
            {**chosen.as_json, "top_logprobs": [token.as_json for token in likeliest[:num_top]]}
            for chosen, likeliest in self._tokens(row)
        ]
        return {"content": content, "refusal": None}

    def completion_logprobs(self, row: Mapping[str, Any], num_top: int) -> JsonObject:
        tokens = list(self._tokens(row))
        return {
            "tokens": [chosen.text for chosen, _ in tokens],
            "token_logprobs": [chosen.logprob for chosen, _ in tokens],
            "top_logprobs": [_logprobs_by_text(chosen, likeliest[:num_top]) for chosen, likeliest in tokens],
            "text_offset": self._detokenizer.offsets(row["token_ids"], begins_text=self._begins_text(row)),
        }

    def _tokens(self, row: Mapping[str, Any]) -> Iterator[tuple[TokenLogprob, Sequence[TokenLogprob]]]:
        """Yields each generated token with the top tokens at its position, most likely first."""
        begins_text = self._begins_text(row)  # up to the first token with text
        columns = (row["token_ids"], row["logprobs"], row["top_token_ids"], row["top_logprobs"])
        for id, own, top_ids, top in zip(*columns, strict=True):
            token = partial(self._token, begins_text=begins_text)
            yield token(id, own), list(map(token, top_ids, top))
            begins_text = begins_text and not self._detokenizer.has_text(id)

    def _token(self, id: int, logprob: float, *, begins_text: bool) -> TokenLogprob:
        data = self._detokenizer.token_bytes(id, begins_text=begins_text)
        return TokenLogprob(id=id, data=data, logprob=max(logprob, MIN_LOGPROB))

    def _begins_text(self, row: Mapping[str, Any]) -> bool:
        """True if the completion begins a text, so that decoding dropped the leading space of its first token.
        Inferred by decoding again. The completion may be shorter than its tokens' text, because of stop sequences."""
        ids, text = row["token_ids"], row["completion"]
        has_all_spaces = self._detokenizer.join_spellings(ids).startswith(text)
        return not has_all_spaces and self._detokenizer.decode(ids).startswith(text)

    @cached_property
    def _detokenizer(self) -> "Detokenizer":
        from runtime.checkpoint_source.location import find_tokenizer  # torch and transformers
        from runtime.sequences.detokenizer import Detokenizer

        tokenizer = find_tokenizer(self.model, self.cache_dir)
        if tokenizer is None:
            raise ConfigError("log-probabilities in OpenAI's format need a tokenizer: set model.tokenizer")
        return Detokenizer(tokenizer)


def _logprobs_by_text(chosen: TokenLogprob, likeliest: Sequence[TokenLogprob]) -> dict[str, float]:
    """Log-probabilities by token text. If tokens have equal text, the chosen or else the most likely one keeps it; the
    others become `token_id:ID`, as in vLLM."""
    ids = {chosen.text: chosen.id}
    for token in likeliest:
        ids.setdefault(token.text, token.id)
    return {token.text if ids[token.text] == token.id else f"token_id:{token.id}": token.logprob for token in likeliest}


@dataclass(kw_only=True)
class BatchResultWriter(ResultWriter):
    """Writes batch result lines."""

    model: str
    logprob_formatter: LogprobFormatter
    rejected_rows: AbstractSet[int]  # row indices of invalid requests

    def format_results(self, rows: Iterator[RowValues]) -> Iterator[tuple[bool, JsonObject]]:
        for row_index, samples in groupby(rows, key=lambda row: row["row_index"]):
            yield self._line(row_index, list(samples))

    def _line(self, row_index: int, samples: Sequence[RowValues]) -> tuple[bool, JsonObject]:
        first = samples[0]
        request = [row_index, first["id"], *(first[name] for name in REQUEST_COLUMNS)]
        digest = sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:ID_DIGITS]
        custom_id = first["custom_id"] if isinstance(first["custom_id"], str) else None
        failed = next((row for row in samples if row["status"] != "ok"), None)
        if failed is None:
            status, error, body = 200, None, self._body(first, samples, digest)
        else:
            is_rejected, message = row_index in self.rejected_rows, failed["error"]
            status, code = (400, "invalid_request") if is_rejected else (500, "server_error")
            kind = "invalid_request_error" if is_rejected else code
            error = {"code": code, "message": message}
            body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        response = {"status_code": status, "request_id": f"req_{digest}", "body": body}
        line = {"id": f"batch_req_{digest}", "custom_id": custom_id, "response": response, "error": error}
        return failed is not None, line

    def _body(self, first: RowValues, samples: Sequence[RowValues], digest: str) -> JsonObject:
        url, request_body = parse_endpoint(first["url"]), first["body"]
        is_chat = url == CHAT_URL
        if url == EMBEDDINGS_URL:
            return embeddings_body(request_body, samples, self.model)
        if url in SCORE_URLS:
            return score_body(request_body, samples, self.model, digest)
        choices = [make_choice(row, request_body, self.logprob_formatter, is_chat=is_chat) for row in samples]
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{digest}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 0,
            "model": self.model,
            "choices": choices,
            "usage": completion_usage(first["num_prompt_tokens"], sum(row["num_completion_tokens"] for row in samples)),
        }


def completion_usage(num_prompt: int, num_new: int) -> JsonObject:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def make_choice(
    row: RowValues, request_body: RowValues, logprob_formatter: LogprobFormatter, *, is_chat: bool
) -> JsonObject:
    """One sample as a choice of OpenAI's response body."""
    choice = {"index": row["sample_index"], "finish_reason": FINISH_REASONS[row["finish_reason"]]}
    num_logprobs = request_body.get("logprobs")  # chat: a bool
    if not is_chat:
        logprobs = None
        if num_logprobs is not None:
            logprobs = logprob_formatter.completion_logprobs(row, num_logprobs)
        return {**choice, "text": row["completion"], "logprobs": logprobs}
    message = {"role": "assistant", "content": row["completion"], "refusal": None}
    if row.get("reasoning") is not None:
        message["reasoning_content"] = row["reasoning"]
    num_top = request_body.get("top_logprobs") or 0
    logprobs = logprob_formatter.chat_logprobs(row, num_top) if num_logprobs else None
    return {**choice, "message": message, "logprobs": logprobs}


def make_batch_writer(shards: Sequence[RunReader], schema: pa.Schema, error_rows: ErrorRows) -> BatchResultWriter:
    """The writer for these shards. Raises ConfigError if the run's rows are not batch requests."""
    missing = [name for name in REQUEST_COLUMNS if name not in schema.names]
    if missing:
        raise ConfigError(
            f"{shards[0].path} has no column {missing[0]}: format=openai_batch needs a run of dataset=openai_batch "
            "with dataset.keep_columns=true"
        )
    run = shards[0]
    values = {**run.semantic, **run.operational}
    settings = {key: values.get(key) for key in MODEL_KEYS}
    texts = {key: value if isinstance(value, str) else None for key, value in settings.items()}
    model = ModelConfig(
        name=texts["model.name"] or "hf",
        path=texts["model.path"],
        revision=texts["model.revision"],
        tokenizer=texts["model.tokenizer"],
    )
    rejected: set[int] = set()
    for plan in (plan for shard in shards for plan in shard.plans()):
        rows = zip(plan["row_index"].to_pylist(), plan["status"].to_pylist(), strict=True)
        rejected |= {row_index for row_index, status in rows if status == "rejected"}
    return BatchResultWriter(
        model=model.path or model.name,
        logprob_formatter=LogprobFormatter(model=model, cache_dir=texts["offload.cache_dir"]),
        rejected_rows=rejected,
        error_rows=error_rows,
    )


def embeddings_body(request_body: RowValues, rows: Sequence[RowValues], model: str) -> JsonObject:
    """Response body of an embeddings request, in input order; base64 encodes little-endian float32."""
    vectors = [row["embedding"] for row in rows]
    if request_body.get("encoding_format") == "base64":
        vectors = [b64encode(np.array(vector, "<f4").tobytes()).decode() for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "model": model, "usage": _count_usage(rows)}


def score_body(request_body: RowValues, rows: Sequence[RowValues], model: str, digest: str) -> JsonObject:
    """Response body of a score request: a reranker's probability, or the cosine of two embeddings."""
    if "probabilities" in rows[0]:
        scores = [row["probabilities"][0] for row in rows]
    else:  # unit vectors; NumPy broadcasts a single first text
        vectors = np.array([row["embedding"] for row in rows], np.float64)
        num_first = count_inputs(request_body["text_1"])
        scores = (vectors[:num_first] * vectors[num_first:]).sum(-1).tolist()
    return {
        "id": f"score-{digest}",
        "object": "list",
        "created": 0,
        "model": model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": {**_count_usage(rows), "completion_tokens": 0},
    }


def _count_usage(rows: Sequence[RowValues]) -> JsonObject:
    num_tokens = sum(row["num_prompt_tokens"] for row in rows)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
