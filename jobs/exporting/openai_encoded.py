"""The bodies of results that generate nothing, in OpenAI's form and vLLM's: embeddings, and scores of pairs."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..datasets.openai_body import num_texts

RowValues: TypeAlias = Mapping[str, Any]  # one of an Arrow table: a text, or a pair, of a request
JsonObject: TypeAlias = dict[str, Any]


def embeddings_body(asked: RowValues, rows: Sequence[RowValues], model: str) -> JsonObject:
    """The vectors of a request's texts, in their order."""
    is_packed = asked.get("encoding_format") == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _packed(row["embedding"]) if is_packed else row["embedding"],
        }
        for index, row in enumerate(rows)
    ]
    return {"object": "list", "data": data, "model": model, "usage": _usage(rows)}


def score_body(asked: RowValues, rows: Sequence[RowValues], model: str, digest: str) -> JsonObject:
    """How well the texts of each pair go together: by a ranker, or by the cosine of their vectors."""
    scores = [row["probabilities"][0] for row in rows] if "probabilities" in rows[0] else _cosines(asked, rows)
    return {
        "id": f"score-{digest}",
        "object": "list",
        "created": 0,
        "model": model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": {**_usage(rows), "completion_tokens": 0},
    }


def _cosines(asked: RowValues, rows: Sequence[RowValues]) -> list[float]:
    """The vectors have length 1; one of the first texts is in a pair with each of the second ones."""
    vectors = np.array([row["embedding"] for row in rows], np.float64)
    num_first = num_texts(asked["text_1"])
    return (vectors[:num_first] * vectors[num_first:]).sum(-1).tolist()


def _packed(vector: Sequence[float]) -> str:
    """Little-endian float32, as OpenAI's client unpacks it."""
    return b64encode(np.array(vector, "<f4").tobytes()).decode()


def _usage(rows: Sequence[RowValues]) -> JsonObject:
    num_tokens = sum(row["num_prompt_tokens"] for row in rows)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
