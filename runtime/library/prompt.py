"""What a caller of the library asks: a prompt in one of three forms, and what it wants otherwise than the run."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import TypeAlias, TypeVar

from ..config.settings import SamplingConfig, SamplingOverrides
from ..errors import ConfigError, require
from ..model.loading import LoadedModel
from ..requests.chat import ChatRenderer, TemplateRefusal
from ..requests.prompts import Rejected, make_request, tokenize_each
from ..sequences.sequence import Request

T = TypeVar("T")
V = TypeVar("V")
Messages: TypeAlias = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Prompt:
    """One prompt: `text`; or `messages` of a chat, `{"role": ..., "content": ...}`, for the model's chat template; or
    `token_ids`, taken as they are. What is None is as the runtime's `sampling` says.

    `id` is its place in the input where none is given. Draws follow from it: a prompt with the same id and settings
    gets the same tokens in whatever company. With a `seed` of its own they follow from that alone, and are those of
    transformers' `generate` after `torch.manual_seed(seed)`. Raises ConfigError.
    """

    text: str | None = None
    _: KW_ONLY
    messages: Messages | None = None
    token_ids: Sequence[int] | None = None
    id: str | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    stop: str | Sequence[str] | None = None
    seed: int | None = None
    json_schema: str | Mapping[str, object] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [key for key in ("text", "messages", "token_ids") if getattr(self, key) is not None]
        require(
            len(given) == 1, f"a prompt is one of text, messages and token_ids, got {' and '.join(given) or 'none'}"
        )
        require(isinstance(self.text, str | None), f"a prompt's text must be a str, got {self.text!r}")
        for key in ("max_new_tokens", "seed"):
            value = getattr(self, key)
            is_number = value is None or (isinstance(value, int) and not isinstance(value, bool))
            require(is_number, f"a prompt's {key} must be a whole number, got {value!r}")
        is_number = self.temperature is None or isinstance(self.temperature, int | float)
        require(is_number, f"a prompt's temperature must be a number, got {self.temperature!r}")
        require(self.seed is None or 0 <= self.seed < 2**63, f"a prompt's seed must be 0 to 2**63 - 1, got {self.seed}")

    @property
    def overrides(self) -> SamplingOverrides:
        """What it asks otherwise than the run."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return SamplingOverrides(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            stop=None if stop is None else list(stop),
            seed=self.seed,
            json_schema=None if self.json_schema is None else as_json(self.json_schema),
            regex=self.regex,
            choice=None if self.choice is None else list(self.choice),
            grammar=self.grammar,
        )

    @staticmethod
    def of(value: "PromptLike", index: int) -> "Prompt":
        """A prompt of what stands for one: a text, token ids or messages. Raises ConfigError naming its place."""
        if isinstance(value, Prompt):
            return value
        if isinstance(value, str):
            return Prompt(value)
        if isinstance(value, Iterable) and not isinstance(value, Mapping | bytes):
            items = list(value)
            if items and all(isinstance(item, Mapping) for item in items):
                return Prompt(messages=[item for item in items if isinstance(item, Mapping)])
            ids = [token for token in map(_token_id, items) if token is not None]
            if len(ids) == len(items):
                return Prompt(token_ids=ids)
        raise ConfigError(
            f"prompt {index} must be a text, a list of token ids, a list of messages or a Prompt, got {value!r:.80}"
        )


PromptLike: TypeAlias = str | Sequence[int] | Messages | Prompt


def as_json(schema: str | Mapping[str, object]) -> str:
    """JSON of an object; a text is taken for JSON."""
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _token_id(value: object) -> int | None:
    """A whole number of any library's kind."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    return value.__index__()  # pyright: ignore[reportAttributeAccessIssue] - just seen


def windows_of(values: Iterable[V], of: Callable[[V, int], T], size: int | None) -> Iterator[list[tuple[int, T]]]:
    """What `of` makes of each value and its place in the input, with that place, so many at once; None: all of them."""
    numbered = ((index, of(value, index)) for index, value in enumerate(values))
    while window := list(islice(numbered, size)):
        yield window


def make_requests(
    model: LoadedModel, sampling: SamplingConfig, prompts: Sequence[tuple[int, Prompt]]
) -> list[Request | Rejected]:
    """What each prompt asks of the model, or why it cannot be generated from. Raises ConfigError where chats or stop
    strings are asked for and the model has no template or tokenizer."""
    texts = texts_of(model, [prompt for _, prompt in prompts])
    limits = {sampling.max_new_tokens, *(prompt.max_new_tokens for _, prompt in prompts)}
    most_tokens = None if 0 in limits else model.shape.context_tokens
    found: dict[int, tuple[int, ...] | str] = {}
    for is_chat in (False, True):
        places = [
            i for i, text in enumerate(texts) if isinstance(text, str) and text and _is_chat(prompts[i]) == is_chat
        ]
        asked = [text for i in places if isinstance(text := texts[i], str)]
        ids = tokenize_each(model, asked, is_rendered=is_chat, most_tokens=most_tokens)
        found |= dict(zip(places, ids, strict=True))

    def request(place: int) -> Request | Rejected:
        index, prompt = prompts[place]
        id, text, ids = prompt.id or str(index), texts[place], found.get(place)
        if isinstance(text, TemplateRefusal):
            return Rejected(id=id, error=f"the model's chat template refuses the messages: {text}")
        if isinstance(ids, str):
            return Rejected(id=id, error=ids)
        return make_request(model, sampling, id, ids if ids is not None else text, prompt.overrides)

    return [request(place) for place in range(len(prompts))]


def _is_chat(prompt: tuple[int, Prompt]) -> bool:
    return prompt[1].messages is not None


def texts_of(model: LoadedModel, prompts: Sequence[Prompt]) -> list[str | Sequence[int] | TemplateRefusal]:
    """Texts, chats as the template spells them; token ids as they are."""
    with ExitStack() as stack:
        renderer = None
        texts: list[str | Sequence[int] | TemplateRefusal] = []
        for prompt in prompts:
            if prompt.messages is None:
                texts.append(prompt.text if prompt.text is not None else prompt.token_ids or ())
                continue
            if renderer is None:
                has_template = model.tokenizer is not None and bool(model.tokenizer.chat_template)
                require(has_template, "there are messages, but the model's tokenizer has no chat template: give texts")
                assert model.tokenizer is not None, "it has a template"
                renderer = stack.enter_context(ChatRenderer(model.tokenizer))
            try:
                texts.append(renderer.render(prompt.messages))
            except TemplateRefusal as error:
                texts.append(error)
    return texts


def require_unique_ids(prompts: Sequence[tuple[int, Prompt]], seen: dict[str, int]) -> None:
    """Adds the prompts' ids to `seen`, by which those of earlier windows are known. Raises ConfigError."""
    for index, prompt in prompts:
        first = seen.setdefault(prompt.id or str(index), index)
        require(
            first == index, f"prompts {first} and {index} have the same id {prompt.id or str(index)!r}: ids are unique"
        )


def require_prompts(prompts: object, window: int | None) -> None:
    """Raises ConfigError for one prompt where many are expected."""
    is_many = isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | Mapping | Prompt)
    require(is_many, f"prompts must be an iterable of prompts, got one {type(prompts).__name__}: put it into a list")
    require(window is None or window >= 1, f"window must be 1 or more prompts, got {window}")
