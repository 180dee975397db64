"""Columns of results, for a run's Parquet files and for Arrow tables."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from ..config.settings import SamplingConfig

if TYPE_CHECKING:
    from .generation import Result

RESULT_FIELDS = (
    pa.field("status", pa.string(), nullable=False),  # ok or error
    pa.field("completion", pa.string(), nullable=False),
    pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("finish_reason", pa.string()),
    pa.field("num_prompt_tokens", pa.int32(), nullable=False),
    pa.field("num_completion_tokens", pa.int32(), nullable=False),
    pa.field("error", pa.string()),
)
LOGPROB_FIELDS = (  # one entry per token of `token_ids`; log-softmax of raw logits, see runtime/sequences/sequence.py
    pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
    pa.field("top_token_ids", pa.list_(pa.list_(pa.int32())), nullable=False),
    pa.field("top_logprobs", pa.list_(pa.list_(pa.float32())), nullable=False),
)
REASONING_FIELD = pa.field("reasoning", pa.string())
BEAM_FIELD = pa.field("beam_score", pa.float64())


def result_schema(sampling: SamplingConfig) -> pa.Schema:
    """The result columns of a run with these settings."""
    reasoning = [REASONING_FIELD] if sampling.reasoning is not None else []
    beams = [BEAM_FIELD] if (sampling.num_beams or 1) > 1 else []
    return pa.schema([*RESULT_FIELDS, *(LOGPROB_FIELDS if sampling.logprobs else ()), *reasoning, *beams])


def result_values(result: "Result") -> Mapping[str, object]:
    """The values of a result: column name -> value, also for columns that `result_schema` may omit."""
    return {
        "status": "ok" if result.is_ok else "error",
        "completion": clean_text(result.text),
        "token_ids": result.token_ids,
        "finish_reason": result.finish.value if result.is_ok else None,
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_completion_tokens": len(result.token_ids),
        "error": None if result.error is None else clean_text(result.error),
        "logprobs": [token.own for token in result.logprobs],
        "top_token_ids": [token.top_ids for token in result.logprobs],
        "top_logprobs": [token.top for token in result.logprobs],
        "reasoning": None if result.reasoning is None else clean_text(result.reasoning),
        "beam_score": getattr(result, "beam_score", None),
    }


def clean_text(text: str) -> str:
    """Returns `text` with lone surrogates escaped, since UTF-8 cannot encode them."""
    return text.encode("utf-8", "backslashreplace").decode()
