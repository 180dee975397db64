"""Functions for HELM inputs: select in-context examples, and parse and hash the requests of a dry run."""

import hashlib
import json
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar

from runtime.config.sampling import MAX_SAMPLES
from runtime.config.settings import SamplingOverrides

from .records import BadRecord, Content, Fields, Json, check_messages, check_text, shorten

HELM_KEYS = frozenset({"trial", "num_examples"})


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question with its answer."""

    input: str
    answer: str


ItemT = TypeVar("ItemT", bound=Item)


def choose_examples(items: Sequence[ItemT], count: int, trial: int) -> list[ItemT]:
    """Selects the in-context examples of a trial as HELM does: `count` of `items`, or all if there are fewer.

    Items with the same answer are a class. The classes are sorted by size, the largest first, and classes of the same
    size are shuffled. One random item is taken from each class in this order, repeatedly, until there are enough. The
    random numbers are those of Python's `random` with the seed `trial`.
    """
    rng = random.Random(trial)
    items_by_answer: dict[str, list[ItemT]] = defaultdict(list)
    for item in items:
        items_by_answer[item.answer].append(item)
    answers_by_size: dict[int, list[str]] = defaultdict(list)
    for answer in sorted(items_by_answer):
        answers_by_size[len(items_by_answer[answer])].append(answer)
    ordered_answers: list[str] = []
    for size in sorted(answers_by_size, reverse=True):
        rng.shuffle(answers_by_size[size])
        ordered_answers += answers_by_size[size]
    next_answers = cycle(ordered_answers)
    examples: list[ItemT] = []
    while len(examples) < min(count, len(items)):
        remaining_items = items_by_answer[next(next_answers)]
        if remaining_items:
            examples.append(remaining_items.pop(rng.randrange(len(remaining_items))))
    return examples


REQUEST_DEFAULTS: Mapping[str, Json] = {  # defaults of HELM's `Request`, without model names
    "embedding": False,
    "prompt": "",
    "temperature": 1.0,
    "num_completions": 1,
    "top_k_per_token": 1,  # number of top logprobs to report; no top-k sampling
    "max_tokens": 100,
    "stop_sequences": [],
    "echo_prompt": False,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "random": None,
    "messages": None,
    "multimodal_prompt": None,
    "image_generation_parameters": None,
    "response_format": None,
}
UNSUPPORTED_FIELDS: Mapping[str, str] = {  # the error for another value than the default
    "embedding": "is not supported: this run generates text",
    "echo_prompt": "is not supported: use weightstream score for scores of a prompt",
    "presence_penalty": "is not supported",
    "frequency_penalty": "is not supported",
    "multimodal_prompt": "is not supported: only text is",
    "image_generation_parameters": "is not supported: only text is generated",
    "response_format": "is not supported per request: set sampling.json_schema for the whole run",
}


def request_digest(request: Mapping[str, Json]) -> str:
    """A hash of all fields of a request except the model, 32 hexadecimal characters."""
    values = {key: request.get(key, default) for key, default in REQUEST_DEFAULTS.items()}
    integers = {key: int(value) for key, value in values.items() if isinstance(value, float) and value.is_integer()}
    text = json.dumps({**values, **integers}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_request(request: Fields, *, may_be_chat: bool) -> tuple[Content, SamplingOverrides]:
    """Parses a HELM request. Returns its content and its sampling settings. Raises BadRecord with the name of the
    field."""
    fields = {key: REQUEST_DEFAULTS[key] if request.get(key) is None else request[key] for key in REQUEST_DEFAULTS}
    for key, reason in UNSUPPORTED_FIELDS.items():
        if fields[key] != REQUEST_DEFAULTS[key]:
            raise BadRecord(f"request.{key}={shorten(str(fields[key]))} {reason}")
    stops = fields["stop_sequences"]
    if not isinstance(stops, list):
        raise BadRecord("request.stop_sequences is not a list of texts")
    overrides = SamplingOverrides(
        max_new_tokens=int(_read_number(fields, "max_tokens", 1)),
        temperature=_read_number(fields, "temperature", 0),
        top_p=_read_number(fields, "top_p", 0),
        n=int(_read_number(fields, "num_completions", 1, MAX_SAMPLES)),
        stop=[check_text(stop, "a stop string of request.stop_sequences") for stop in stops],
        logprobs=1,
    )
    messages = fields["messages"]
    if messages is None:
        return Content(prompt=check_text(fields["prompt"], "request.prompt")), overrides
    if not may_be_chat:
        raise BadRecord("request.messages is a chat: it needs dataset.chat_template=true")
    if not isinstance(messages, list) or not messages:
        raise BadRecord("request.messages is not a list of messages")
    return Content(messages=check_messages(messages, "request.messages")), overrides


def _read_number(fields: Fields, key: str, least: float, most: float = sys.float_info.max) -> float:
    value = fields[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        allowed = f"of {least} or more" if most == sys.float_info.max else f"from {least} to {most:,}"
        raise BadRecord(f"request.{key}={shorten(str(value))} is not a number {allowed}")
    return value
