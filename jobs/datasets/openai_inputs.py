"""Requests in OpenAI's and vLLM's form that generate nothing: texts to be embedded, and pairs of texts to be scored."""

import json
from collections.abc import Callable, Mapping
from hashlib import sha256

from .openai_body import ENDPOINTS, given_fields, read_tokens
from .records import BadRecord, Fields, Json, check_text
from .rows import Inputs

EMBEDDINGS_URL, SCORE_URLS = "/v1/embeddings", ("/v1/score", "/score")
FORMATS = ("float", "base64")
WITHOUT_EFFECT: Mapping[str, tuple[Json, ...]] = {  # the values that ask for what is done anyway
    "normalize": (True,),
    "use_activation": (True,),
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (-1,),
    "priority": (0,),
}
OF_INPUTS = frozenset({"input", "text_1", "text_2"})


def read_embeddings(body: Fields) -> Inputs:
    """The texts, or token ids, of a request for embeddings. Raises BadRecord naming the field."""
    if body.get("dimensions") is not None:
        raise BadRecord("body.dimensions cannot be honoured: a vector has as many numbers as the model's hidden states")
    given = given_fields(body, {"input", "encoding_format"}, WITHOUT_EFFECT)
    if given.get("encoding_format", "float") not in FORMATS:
        raise BadRecord(f"body.encoding_format must be {' or '.join(FORMATS)}")
    asked = given.get("input")
    if isinstance(asked, list) and asked and not _are_tokens(asked):
        texts = [_text_or_tokens(each, f"input {number} of body.input") for number, each in enumerate(asked)]
    else:
        texts = [_text_or_tokens(asked, "body.input")]
    return Inputs(texts=tuple(texts))


def read_score(body: Fields) -> Inputs:
    """The pairs of texts of a request for scores. Raises BadRecord naming the field."""
    given = given_fields(body, {"text_1", "text_2"}, WITHOUT_EFFECT)
    firsts, others = _texts(given, "text_1"), _texts(given, "text_2")
    if len(firsts) not in (1, len(others)):
        raise BadRecord(
            f"body.text_1 has {len(firsts):,} texts and body.text_2 {len(others):,}: pairs are made of one text with "
            "each, or of as many on both sides"
        )
    return Inputs(texts=firsts, others=others)


ENCODED: Mapping[str, Callable[[Fields], Inputs]] = {
    EMBEDDINGS_URL: read_embeddings,
    **dict.fromkeys(SCORE_URLS, read_score),
}


def endpoint_of(url: Json) -> str | None:
    """The endpoint that a line's url names, also in Azure's form, without `/v1`, and with a slash behind it; None where
    there is no such endpoint."""
    path = url.rstrip("/") if isinstance(url, str) else ""
    return next((each for each in (path, f"/v1{path}") if each in {*ENDPOINTS, *ENCODED}), None)


def kept_body(body: Fields) -> Fields:
    """The body as each row of the output has it: a list of several inputs as its length and a digest, since every one
    of them has a row."""
    return {key: _kept(value) if key in OF_INPUTS else value for key, value in body.items()}


def num_texts(kept: Json) -> int:
    """How many inputs a field has that `kept_body` has kept."""
    count = kept.get("count") if isinstance(kept, dict) else None
    return count if isinstance(count, int) else 1


def _kept(value: Json) -> Json:
    if not isinstance(value, list) or len(value) < 2 or _are_tokens(value):
        return value
    return {"count": len(value), "sha256": sha256(json.dumps(value).encode()).hexdigest()}


def _are_tokens(value: list[Json]) -> bool:
    return isinstance(value[0], int) and not isinstance(value[0], bool)


def _text_or_tokens(value: Json, what: str) -> str | tuple[int, ...]:
    if not isinstance(value, list):
        return check_text(value, what)
    ids = read_tokens(value)
    if ids is None:
        raise BadRecord(f"{what} is neither a text nor a list of token ids")
    return ids


def _texts(given: Fields, key: str) -> tuple[str, ...]:
    value = given.get(key)
    if not isinstance(value, list):
        return (check_text(value, f"body.{key}"),)
    if not value:
        raise BadRecord(f"body.{key} is an empty list")
    return tuple(check_text(text, f"text {number} of body.{key}") for number, text in enumerate(value))
