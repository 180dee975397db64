"""Prompts of the library's callers: text, chat messages or token ids, with per-prompt settings."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from operator import index as to_int
from typing import TypeAlias

from ..config.settings import SamplingOverrides
from ..errors import ConfigError, require
from ..model.loading import LoadedModel
from ..requests.chat import ChatRenderer, TemplateRefusal
from ..requests.prompts import tokenize_each

Messages: TypeAlias = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Prompt:
    """One prompt: `text`, chat `messages` (`{"role": ..., "content": ...}`) for the model's chat template, or
    `token_ids`. A setting of None means the value in the runtime's `sampling`.

    `id` defaults to the position in the input. It seeds the sampling: the same id and settings give the same tokens in
    any batch. If `seed` is set, it seeds the sampling instead, which then equals transformers' `generate` after
    `torch.manual_seed(seed)`. Raises ConfigError for invalid fields."""

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
        names = " and ".join(given) or "none"
        require(len(given) == 1, f"a prompt must have one of text, messages and token_ids, got {names}")
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
        """The prompt's own settings; None for those of the run."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return SamplingOverrides(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            stop=None if stop is None else list(stop),
            seed=self.seed,
            json_schema=None if self.json_schema is None else schema_json(self.json_schema),
            regex=self.regex,
            choice=None if self.choice is None else list(self.choice),
            grammar=self.grammar,
        )

    @staticmethod
    def from_value(value: "PromptLike", position: int) -> "Prompt":
        """Converts a text, token ids or messages to a prompt. Raises ConfigError with its `position` in the input."""
        if isinstance(value, Prompt):
            return value
        if isinstance(value, str):
            return Prompt(value)
        if isinstance(value, Iterable) and not isinstance(value, Mapping | bytes):
            items = list(value)
            if items and all(isinstance(item, Mapping) for item in items):
                return Prompt(messages=[item for item in items if isinstance(item, Mapping)])
            # Integers may come from any library, such as NumPy.
            if all(hasattr(item, "__index__") and not isinstance(item, bool) for item in items):
                ids = [to_int(item) for item in items]  # pyright: ignore[reportArgumentType] - checked above
                return Prompt(token_ids=ids)
        raise ConfigError(
            f"prompt {position} must be a text, a list of token ids, a list of messages or a Prompt, got {value!r:.80}"
        )


PromptLike: TypeAlias = str | Sequence[int] | Messages | Prompt


def schema_json(schema: str | Mapping[str, object]) -> str:
    """Serializes a JSON schema; a str is returned unchanged."""
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def render_prompts(model: LoadedModel, prompts: Sequence[Prompt]) -> list[str | Sequence[int] | TemplateRefusal]:
    """Renders chat messages to text with the model's chat template, or returns the template's error. Texts and token
    ids are returned unchanged. Raises ConfigError if there are messages but no chat template."""
    with ExitStack() as stack:
        renderer = None
        texts: list[str | Sequence[int] | TemplateRefusal] = []
        for prompt in prompts:
            if prompt.messages is None:
                texts.append(prompt.text if prompt.text is not None else prompt.token_ids or ())
                continue
            if renderer is None:
                has_template = model.tokenizer is not None and bool(model.tokenizer.chat_template)
                require(has_template, "there are messages, but the model's tokenizer has no chat template: use texts")
                assert model.tokenizer is not None, "it has a template"
                renderer = stack.enter_context(ChatRenderer(model.tokenizer))
            try:
                texts.append(renderer.render(prompt.messages))
            except TemplateRefusal as error:
                texts.append(error)
    return texts


def tokenize_prompts(
    model: LoadedModel, prompts: Sequence[Prompt], max_tokens: int | None, *, keeps_empty: bool = False
) -> list[Sequence[int] | str]:
    """Token ids of each prompt, or a str with the error; see `tokenize_each`. `keeps_empty`: an empty text gives "",
    without special tokens. Raises ConfigError for messages without a chat template, and CheckpointError for texts
    without a tokenizer."""
    texts = render_prompts(model, prompts)
    results = [text.as_error if isinstance(text, TemplateRefusal) else text for text in texts]
    for is_chat in (False, True):
        selected = {  # index -> text
            index: text
            for index, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
            if isinstance(text, str) and (prompt.messages is not None) == is_chat and (text or not keeps_empty)
        }
        ids = tokenize_each(model, list(selected.values()), is_rendered=is_chat, max_tokens=max_tokens)
        for index, ids_or_error in zip(selected, ids, strict=True):
            results[index] = ids_or_error
    return results
