"""The body of a request in OpenAI's form: what it asks, field by field; in vLLM's, texts to be embedded and pairs to be
scored. A field that cannot be honoured is an error of its request, so that none is passed over in silence.
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
from .rows import Inputs

MAX_TOP_LOGPROBS = 20  # as OpenAI's own
MAX_SEED = 2**63 - 1

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"

ABOUT_THE_CALLER = frozenset(  # say nothing of the answer
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"}
)
WITHOUT_EFFECT: Mapping[str, tuple[Json, ...]] = {  # the values that ask for what is done anyway
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
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
STRUCTURED = frozenset({"response_format", "structured_outputs", *GUIDED})  # OpenAI's, and those of vLLM
OF_VLLM = frozenset({"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"})
SAMPLED = frozenset({"max_tokens", "temperature", "top_p", "stop", "n", "seed", "logprobs", *STRUCTURED, *OF_VLLM})
ADVICE = {  # what does the same for all lines of a run
    "reasoning_effort": "body.chat_template_kwargs, where the model's template knows it",
}

Asked: TypeAlias = tuple[Content, SamplingOverrides]


def read_chat(body: Fields) -> Asked:
    """A chat with its tools, and what it asks otherwise than the run. Raises BadRecord naming the field."""
    known = {"messages", "tools", "chat_template_kwargs", "max_completion_tokens", "top_logprobs"}
    given = given_fields(body, SAMPLED | known)
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRecord("body.messages is not a list of messages")
    chat = check_messages(messages, "body.messages")
    for message in chat:
        if message["role"] == "developer":
            message["role"] = "system"  # as templates call it
    kwargs = given.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise BadRecord("body.chat_template_kwargs is not an object")
    taken = sorted(TEMPLATE_KEYWORDS & kwargs.keys())
    if taken:
        raise BadRecord(f"body.chat_template_kwargs.{taken[0]} is set by the run itself")
    tools = check_objects(given["tools"], "body.tools") if "tools" in given else []
    if tools and given.get("tool_choice") != "none":
        kwargs = {**kwargs, "tools": [*tools]}
    wanted, most = given.get("logprobs", False), _whole(given, "top_logprobs", most=MAX_TOP_LOGPROBS)
    if not isinstance(wanted, bool):
        raise BadRecord("body.logprobs is not true or false")
    if most is not None and not wanted:
        raise BadRecord("body.top_logprobs needs body.logprobs=true")
    return Content(messages=chat, template_kwargs=kwargs), _overrides(given, max(1, most or 0) if wanted else None)


def read_completion(body: Fields) -> Asked:
    """A prompt, and what it asks otherwise than the run. Raises BadRecord naming the field."""
    given = given_fields(body, SAMPLED | {"prompt"})
    logprobs = _whole(given, "logprobs", most=MAX_TOP_LOGPROBS)
    kept = None if logprobs is None else max(1, logprobs)
    return _prompt(given.get("prompt")), _overrides(given, kept)


def _prompt(value: Json) -> Content:
    """One text or one list of token ids, alone or in a list."""
    one = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list) else value
    if not isinstance(one, list):
        return Content(prompt=check_text(one, "body.prompt"))
    ids = read_tokens(one)
    if ids is None:
        is_several = len(one) > 1 and all(isinstance(each, str | list) for each in one)
        why = "one prompt is read, so give each a line of its own" if is_several else "neither texts nor token ids"
        raise BadRecord(f"body.prompt is a list: {why}")
    return Content(prompt_ids=ids)


def read_tokens(value: list[Json]) -> tuple[int, ...] | None:
    """Token ids; None where a list is empty, or has something else."""
    ids = tuple(token for token in value if isinstance(token, int) and not isinstance(token, bool))
    return ids if ids and len(ids) == len(value) else None


ENDPOINTS: Mapping[str, Callable[[Fields], Asked]] = {CHAT_URL: read_chat, COMPLETION_URL: read_completion}


def given_fields(
    body: Fields, known: AbstractSet[str], without_effect: Mapping[str, tuple[Json, ...]] = WITHOUT_EFFECT
) -> Fields:
    """The fields that are not null. Raises BadRecord for one that asks for what is not done: it is not among `known`,
    nor has it a value that has no effect."""
    given: Fields = {key: value for key, value in body.items() if value is not None}
    for key, value in given.items():
        if key == "model" or key in known | ABOUT_THE_CALLER:
            continue
        if key not in without_effect:
            hint = f": {ADVICE[key]} does" if key in ADVICE else ""
            raise BadRecord(f"body.{shorten(key)[1:-1]} cannot be honoured for a single line{hint}")
        # 0 is not false
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in without_effect[key]):
            raise BadRecord(f"body.{key}={shorten(str(value))} cannot be honoured: leave it out")
    check_text(given.get("model"), "body.model")
    return given


def _overrides(given: Fields, logprobs: int | None) -> SamplingOverrides:
    most, newer = _whole(given, "max_tokens"), _whole(given, "max_completion_tokens")
    if most is not None and newer is not None and most != newer:
        raise BadRecord(f"body.max_tokens={most} and body.max_completion_tokens={newer} are two limits")
    stop = given.get("stop")
    stops = stop if isinstance(stop, list) else [stop]
    return SamplingOverrides(
        max_new_tokens=most if newer is None else newer,
        temperature=_number(given, "temperature", least=0, most=2),
        top_p=_number(given, "top_p", least=0, most=1),
        stop=None if stop is None else [check_text(text, "a stop string of body.stop") for text in stops],
        # -1 says what 0 does, in vLLM's words: all tokens
        top_k=None if (top_k := _whole(given, "top_k", least=-1)) is None else max(0, top_k),
        min_p=_number(given, "min_p", least=0, most=1),
        repetition_penalty=_number(given, "repetition_penalty", least=0, most=sys.float_info.max),
        min_new_tokens=_whole(given, "min_tokens"),
        ignore_eos=_truth(given, "ignore_eos"),
        seed=_whole(given, "seed", most=MAX_SEED),
        n=_whole(given, "n", least=1, most=MAX_SAMPLES),
        logprobs=logprobs,
        **_structure(given),
    )


class _Structure(TypedDict, total=False):
    """What the completion must be, in the words of `SamplingOverrides`."""

    json_schema: str
    regex: str
    choice: list[str]
    grammar: str


def _structure(given: Fields) -> _Structure:
    """One at most, whoever's words say it. Whether a schema is one is seen with the run's other requests."""
    structures: list[tuple[str, Json, str]] = [
        (GUIDED[key], given[key], f"body.{key}") for key in GUIDED if key in given
    ]
    if "structured_outputs" in given:
        structures += _vllm_structures(given["structured_outputs"])
    if "response_format" in given:
        structures += _response_format(given["response_format"])
    if len(structures) > 1:
        raise BadRecord(f"{' and '.join(where for _, _, where in structures)} are two structures")
    return _read_structure(*structures[0]) if structures else {}


def _vllm_structures(value: Json) -> list[tuple[str, Json, str]]:
    where = "body.structured_outputs"
    if not isinstance(value, dict):
        raise BadRecord(f"{where} is not an object")
    found = {key: item for key, item in value.items() if item is not None and item is not False}
    for key in found.keys() - {*GUIDED.values(), "json_object"}:
        raise BadRecord(f"{where}.{shorten(key)[1:-1]} cannot be honoured: leave it out")
    return [(key, item, f"{where}.{key}") for key, item in found.items()]


def _response_format(value: Json) -> list[tuple[str, Json, str]]:
    where = "body.response_format"
    if not isinstance(value, dict):
        raise BadRecord(f"{where} is not an object")
    kind, described = value.get("type"), value.get("json_schema")
    if kind == "text":
        return []
    if kind == "json_object":
        return [("json_object", True, where)]
    if kind != "json_schema":
        raise BadRecord(f"{where}.type must be text, json_object or json_schema, got {shorten(str(kind))}")
    if not isinstance(described, dict):
        raise BadRecord(f"{where}.json_schema is not an object with a name and a schema")
    return [("json", described.get("schema"), f"{where}.json_schema.schema")]


def _read_structure(kind: str, value: Json, where: str) -> _Structure:
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


def _truth(given: Fields, key: str) -> bool | None:
    value = given.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadRecord(f"body.{key} is not true or false")
    return value


def _whole(given: Fields, key: str, *, least: int = 0, most: int | None = None) -> int | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRecord(f"body.{key} is {shorten(str(value))}, not a whole number")
    if value < least or (most is not None and value > most):
        raise BadRecord(
            f"body.{key} must be {f'{least} to {most}' if most is not None else f'{least} or more'}, "
            f"got {shorten(str(value))[1:-1]}"
        )
    return value


def _number(given: Fields, key: str, *, least: float, most: float) -> float | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRecord(f"body.{key} is {shorten(str(value))}, not a number")
    if not least <= value <= most:
        raise BadRecord(f"body.{key} must be {least} to {most}, got {shorten(str(value))[1:-1]}")
    return float(value)


EMBEDDINGS_URL, SCORE_URLS = "/v1/embeddings", ("/v1/score", "/score")
FORMATS = ("float", "base64")
WITHOUT_EFFECT_ENCODING: Mapping[str, tuple[Json, ...]] = {
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
    given = given_fields(body, {"input", "encoding_format"}, WITHOUT_EFFECT_ENCODING)
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
    given = given_fields(body, {"text_1", "text_2"}, WITHOUT_EFFECT_ENCODING)
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
    kept = dict(body)
    for key in OF_INPUTS & body.keys():
        value = body[key]
        if isinstance(value, list) and len(value) > 1 and not _are_tokens(value):
            kept[key] = {"count": len(value), "sha256": sha256(json.dumps(value).encode()).hexdigest()}
    return kept


def num_texts(kept: Json) -> int:
    """How many inputs a field has that `kept_body` has kept."""
    count = kept.get("count") if isinstance(kept, dict) else None
    return count if isinstance(count, int) else 1


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
