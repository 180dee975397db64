"""Parses request bodies in OpenAI's format, with vLLM's extensions for sampling, embeddings and scores.

A field that is not supported is an error of its request, unless its value has no effect.
"""

import json
import sys
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from hashlib import sha256
from typing import TypeAlias, TypedDict

from runtime.config.sampling import MAX_SAMPLES
from runtime.config.settings import SamplingOverrides

from .fields import TEMPLATE_KEYWORDS
from .records import BadRecord, Content, Fields, Json, check_messages, check_objects, check_text, shorten
from .rows import EncodeInputs

MAX_TOP_LOGPROBS = 20  # as at OpenAI
MAX_SEED = 2**63 - 1

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"

IGNORED_FIELDS = frozenset(  # accepted with any value; no effect on the answer
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"}
)
NO_EFFECT_VALUES: Mapping[str, tuple[Json, ...]] = {  # accepted values of fields that are not supported
    "stream": (False,),
    "store": (False,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "use_beam_search": (False,),
    "priority": (0,),
}
# Deprecated fields of vLLM: the kind of constraint.
GUIDED_FIELDS = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
STRUCTURE_FIELDS = frozenset({"response_format", "structured_outputs", *GUIDED_FIELDS})  # of OpenAI and vLLM
VLLM_FIELDS = frozenset({"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"})
SAMPLING_FIELDS = frozenset(
    {"max_tokens", "temperature", "top_p", "stop", "n", "seed", "logprobs", *STRUCTURE_FIELDS, *VLLM_FIELDS}
)
ALTERNATIVES = {  # what to set instead
    "reasoning_effort": "body.chat_template_kwargs, if the model's template has it"
}

ParsedRequest: TypeAlias = tuple[Content, SamplingOverrides]


def read_chat(body: Fields) -> ParsedRequest:
    """Parses the body of a chat completion: messages, tools and sampling settings. Raises BadRecord with the name of
    the field."""
    known = {"messages", "tools", "chat_template_kwargs", "max_completion_tokens", "top_logprobs"}
    fields = supported_fields(body, SAMPLING_FIELDS | known)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRecord("body.messages is not a list of messages")
    chat = check_messages(messages, "body.messages")
    for message in chat:
        if message["role"] == "developer":
            message["role"] = "system"  # the name that chat templates know
    kwargs = fields.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise BadRecord("body.chat_template_kwargs is not an object")
    reserved = sorted(TEMPLATE_KEYWORDS & kwargs.keys())
    if reserved:
        raise BadRecord(f"body.chat_template_kwargs.{reserved[0]} is reserved: leave it out")
    tools = check_objects(fields["tools"], "body.tools") if "tools" in fields else []
    if tools and fields.get("tool_choice") != "none":
        kwargs = {**kwargs, "tools": [*tools]}
    has_logprobs = fields.get("logprobs", False)
    num_top = _read_integer(fields, "top_logprobs", maximum=MAX_TOP_LOGPROBS)
    if not isinstance(has_logprobs, bool):
        raise BadRecord("body.logprobs is not true or false")
    if num_top is not None and not has_logprobs:
        raise BadRecord("body.top_logprobs needs body.logprobs=true")
    overrides = _read_overrides(fields, max(1, num_top or 0) if has_logprobs else None)
    return Content(messages=chat, template_kwargs=kwargs), overrides


def read_completion(body: Fields) -> ParsedRequest:
    """Parses the body of a completion: prompt and sampling settings. Raises BadRecord with the name of the field."""
    fields = supported_fields(body, SAMPLING_FIELDS | {"prompt"})
    logprobs = _read_integer(fields, "logprobs", maximum=MAX_TOP_LOGPROBS)
    num_logprobs = None if logprobs is None else max(1, logprobs)
    return _read_prompt(fields.get("prompt")), _read_overrides(fields, num_logprobs)


def _read_prompt(value: Json) -> Content:
    """Reads one prompt, a string or a list of token ids. It may be the only item of a list."""
    prompt = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list) else value
    if not isinstance(prompt, list):
        return Content(prompt=check_text(prompt, "body.prompt"))
    ids = parse_token_ids(prompt)
    if ids is None:
        is_several = len(prompt) > 1 and all(isinstance(item, str | list) for item in prompt)
        reason = "has several prompts: write a line for each" if is_several else "is not a text or list of token ids"
        raise BadRecord(f"body.prompt {reason}")
    return Content(prompt_ids=ids)


def parse_token_ids(value: list[Json]) -> tuple[int, ...] | None:
    """Returns the token ids in a list. Returns None if the list is empty, or has an item that is not an integer."""
    ids = tuple(token for token in value if isinstance(token, int) and not isinstance(token, bool))
    return ids if ids and len(ids) == len(value) else None


ENDPOINTS: Mapping[str, Callable[[Fields], ParsedRequest]] = {CHAT_URL: read_chat, COMPLETION_URL: read_completion}


def supported_fields(
    body: Fields, known: AbstractSet[str], no_effect: Mapping[str, tuple[Json, ...]] = NO_EFFECT_VALUES
) -> Fields:
    """The fields of a body that are not null. Raises BadRecord for a field that is not in `known`, unless its value has
    no effect. `no_effect`: such values by field."""
    fields: Fields = {key: value for key, value in body.items() if value is not None}
    for key, value in fields.items():
        if key == "model" or key in known | IGNORED_FIELDS:
            continue
        if key not in no_effect:
            hint = f": set {ALTERNATIVES[key]}" if key in ALTERNATIVES else ""
            raise BadRecord(f"body.{shorten(key)[1:-1]} is not supported{hint}")
        # compare types too: 0 == False in Python
        if not any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in no_effect[key]):
            raise BadRecord(f"body.{key}={shorten(str(value))} is not supported: leave it out")
    check_text(fields.get("model"), "body.model")
    return fields


def _read_overrides(fields: Fields, logprobs: int | None) -> SamplingOverrides:
    max_tokens, max_completion = _read_integer(fields, "max_tokens"), _read_integer(fields, "max_completion_tokens")
    if max_tokens is not None and max_completion is not None and max_tokens != max_completion:
        raise BadRecord(f"body.max_tokens={max_tokens} and body.max_completion_tokens={max_completion} differ: set one")
    stop = fields.get("stop")
    stops = stop if isinstance(stop, list) else [stop]
    return SamplingOverrides(
        max_new_tokens=max_tokens if max_completion is None else max_completion,
        temperature=_read_number(fields, "temperature", minimum=0, maximum=2),
        top_p=_read_number(fields, "top_p", minimum=0, maximum=1),
        stop=None if stop is None else [check_text(text, "a stop string of body.stop") for text in stops],
        # all tokens: -1 in vLLM, 0 here
        top_k=None if (top_k := _read_integer(fields, "top_k", minimum=-1)) is None else max(0, top_k),
        min_p=_read_number(fields, "min_p", minimum=0, maximum=1),
        repetition_penalty=_read_number(fields, "repetition_penalty", minimum=0, maximum=sys.float_info.max),
        min_new_tokens=_read_integer(fields, "min_tokens"),
        ignore_eos=_read_bool(fields, "ignore_eos"),
        seed=_read_integer(fields, "seed", maximum=MAX_SEED),
        n=_read_integer(fields, "n", minimum=1, maximum=MAX_SAMPLES),
        logprobs=logprobs,
        **_read_structured_output(fields),
    )


class _StructuredOutput(TypedDict, total=False):
    """The constraint of structured output, with the field names of `SamplingOverrides`. At most one is set."""

    json_schema: str
    regex: str
    choice: list[str]
    grammar: str


def _read_structured_output(fields: Fields) -> _StructuredOutput:
    """Reads the constraint from the fields of OpenAI or vLLM; at most one may be set. Schemas are compiled later."""
    # kind of constraint, its value, and the path of its field for messages
    structures: list[tuple[str, Json, str]] = [
        (GUIDED_FIELDS[key], fields[key], f"body.{key}") for key in GUIDED_FIELDS if key in fields
    ]
    if "structured_outputs" in fields:
        structures += _vllm_structures(fields["structured_outputs"])
    if "response_format" in fields:
        structures += _parse_response_format(fields["response_format"])
    if len(structures) > 1:
        raise BadRecord(f"{' and '.join(key for _, _, key in structures)} exclude each other: set one of them")
    return _read_structure(*structures[0]) if structures else {}


def _vllm_structures(value: Json) -> list[tuple[str, Json, str]]:
    """The constraints in vLLM's field, as in `_read_structured_output`."""
    where = "body.structured_outputs"
    if not isinstance(value, dict):
        raise BadRecord(f"{where} is not an object")
    values = {key: item for key, item in value.items() if item is not None and item is not False}
    for key in values.keys() - {*GUIDED_FIELDS.values(), "json_object"}:
        raise BadRecord(f"{where}.{shorten(key)[1:-1]} is not supported: leave it out")
    return [(key, item, f"{where}.{key}") for key, item in values.items()]


def _parse_response_format(value: Json) -> list[tuple[str, Json, str]]:
    """The constraint in OpenAI's field, as in `_read_structured_output`. Empty if there is none."""
    where = "body.response_format"
    if not isinstance(value, dict):
        raise BadRecord(f"{where} is not an object")
    kind, named_schema = value.get("type"), value.get("json_schema")
    if kind == "text":
        return []
    if kind == "json_object":
        return [("json_object", True, where)]
    if kind != "json_schema":
        raise BadRecord(f"{where}.type must be text, json_object or json_schema, got {shorten(str(kind))}")
    if not isinstance(named_schema, dict):
        raise BadRecord(f"{where}.json_schema is not an object with a name and a schema")
    return [("json", named_schema.get("schema"), f"{where}.json_schema.schema")]


def _read_structure(kind: str, value: Json, where: str) -> _StructuredOutput:
    if kind == "json_object":
        return {"json_schema": json.dumps({"type": "object"})}
    if kind == "json":
        if not isinstance(value, dict):
            return {"json_schema": check_text(value, where)}
        return {"json_schema": json.dumps(value, ensure_ascii=False, separators=(",", ":"))}
    if kind == "choice":
        if not isinstance(value, list):
            raise BadRecord(f"{where} is not a list of texts")
        return {"choice": [check_text(item, f"a text of {where}") for item in value]}
    text = check_text(value, where)
    return {"regex": text} if kind == "regex" else {"grammar": text}


def _read_bool(fields: Fields, key: str) -> bool | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadRecord(f"body.{key} is not true or false")
    return value


def _read_integer(fields: Fields, key: str, *, minimum: int = 0, maximum: int | None = None) -> int | None:
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRecord(f"body.{key} is {shorten(str(value))}, not a whole number")
    if value < minimum or (maximum is not None and value > maximum):
        raise BadRecord(
            f"body.{key} must be {f'{minimum} to {maximum}' if maximum is not None else f'{minimum} or more'}, "
            f"got {shorten(str(value))[1:-1]}"
        )
    return value


def _read_number(fields: Fields, key: str, *, minimum: float, maximum: float) -> float | None:
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRecord(f"body.{key} is {shorten(str(value))}, not a number")
    if not minimum <= value <= maximum:
        raise BadRecord(f"body.{key} must be {minimum} to {maximum}, got {shorten(str(value))[1:-1]}")
    return float(value)


EMBEDDINGS_URL, SCORE_URLS = "/v1/embeddings", ("/v1/score", "/score")
FORMATS = ("float", "base64")
ENCODE_NO_EFFECT_VALUES: Mapping[str, tuple[Json, ...]] = {
    "normalize": (True,),
    "use_activation": (True,),
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (-1,),
    "priority": (0,),
}
INPUT_FIELDS = frozenset({"input", "text_1", "text_2"})


def read_embeddings(body: Fields) -> EncodeInputs:
    """Parses the body of an embeddings request: strings or lists of token ids. Raises BadRecord with the name of the
    field."""
    if body.get("dimensions") is not None:
        raise BadRecord("body.dimensions is not supported: vectors have the model's hidden size")
    fields = supported_fields(body, {"input", "encoding_format"}, ENCODE_NO_EFFECT_VALUES)
    if fields.get("encoding_format", "float") not in FORMATS:
        raise BadRecord(f"body.encoding_format must be {' or '.join(FORMATS)}")
    value = fields.get("input")
    if isinstance(value, list) and value and not _is_token_list(value):
        texts = [_read_text_or_tokens(item, f"input {number} of body.input") for number, item in enumerate(value)]
    else:
        texts = [_read_text_or_tokens(value, "body.input")]
    return EncodeInputs(texts=tuple(texts))


def read_score(body: Fields) -> EncodeInputs:
    """Parses the body of a score request: pairs of strings. Raises BadRecord with the name of the field."""
    fields = supported_fields(body, {"text_1", "text_2"}, ENCODE_NO_EFFECT_VALUES)
    firsts, seconds = _read_texts(fields, "text_1"), _read_texts(fields, "text_2")
    if len(firsts) not in (1, len(seconds)):
        raise BadRecord(
            f"body.text_1 has {len(firsts):,} texts and body.text_2 {len(seconds):,}: text_1 needs one, or as many as "
            "text_2"
        )
    return EncodeInputs(texts=firsts, second_texts=seconds)


ENCODE_ENDPOINTS: Mapping[str, Callable[[Fields], EncodeInputs]] = {
    EMBEDDINGS_URL: read_embeddings,
    **dict.fromkeys(SCORE_URLS, read_score),
}


def parse_endpoint(url: Json) -> str | None:
    """Returns the endpoint of a url, or None if it is unknown. The url may lack `/v1` (Azure) or have a trailing
    slash."""
    path = url.rstrip("/") if isinstance(url, str) else ""
    known = {*ENDPOINTS, *ENCODE_ENDPOINTS}
    return next((endpoint for endpoint in (path, f"/v1{path}") if endpoint in known), None)


def summarize_body(body: Fields) -> Fields:
    """The body that is stored in each output row. A list of several inputs is replaced by its length and digest,
    because each of its inputs has an output row."""
    summary = dict(body)
    for key in INPUT_FIELDS & body.keys():
        value = body[key]
        if isinstance(value, list) and len(value) > 1 and not _is_token_list(value):
            summary[key] = {"count": len(value), "sha256": sha256(json.dumps(value).encode()).hexdigest()}
    return summary


def count_inputs(summary: Json) -> int:
    """The number of inputs that a field of `summarize_body` stands for."""
    count = summary.get("count") if isinstance(summary, dict) else None
    return count if isinstance(count, int) else 1


def _is_token_list(value: list[Json]) -> bool:
    return isinstance(value[0], int) and not isinstance(value[0], bool)


def _read_text_or_tokens(value: Json, what: str) -> str | tuple[int, ...]:
    if not isinstance(value, list):
        return check_text(value, what)
    ids = parse_token_ids(value)
    if ids is None:
        raise BadRecord(f"{what} is neither a text nor a list of token ids")
    return ids


def _read_texts(fields: Fields, key: str) -> tuple[str, ...]:
    value = fields.get(key)
    if not isinstance(value, list):
        return (check_text(value, f"body.{key}"),)
    if not value:
        raise BadRecord(f"body.{key} is an empty list")
    return tuple(check_text(text, f"text {number} of body.{key}") for number, text in enumerate(value))
