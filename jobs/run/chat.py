"""Whether chats that a data set asks for can be spelt by the model's own template, found out before the run."""

from collections.abc import Sequence

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from runtime.errors import ConfigError
from runtime.requests.chat import ChatRenderer, TemplateRefusal

from ..datasets import DatasetConfig, Row

QUESTION = {"role": "user", "content": "?"}


def renderer_for(tokenizer: PreTrainedTokenizerBase) -> ChatRenderer:
    """A renderer whose errors name the data set's key."""
    return ChatRenderer(tokenizer, asked_by="dataset.chat_template=true", otherwise="set dataset.chat_template=false")


def has_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    return tokenizer is not None and bool(tokenizer.chat_template)


def require_template(
    tokenizer: PreTrainedTokenizerBase | None, config: DatasetConfig, rows: Sequence[Row] = ()
) -> None:
    """Raises ConfigError when chats are asked for and there is no template, none for `dataset.system_prompt`, or one
    that fails in the same way for each of `rows`."""
    asked = [row.messages is not None for row in rows if row.error is None]
    if not (config.chat_template or any(asked)):
        return
    if not has_template(tokenizer):
        if config.chat_template or all(asked):
            why = "dataset.chat_template=true" if config.chat_template else "the rows are chats"
            raise ConfigError(f"{why}, but the model's tokenizer has no chat template")
        return
    assert tokenizer is not None, "it has a template"
    with renderer_for(tokenizer) as renderer:
        if config.system_prompt is not None and not rows:
            _require_system_prompt(renderer, config)
        _require_any(renderer, [row for row in rows if row.error is None])


def _require_system_prompt(renderer: ChatRenderer, config: DatasetConfig) -> None:
    try:
        renderer.render([{"role": "system", "content": config.system_prompt}, QUESTION], config.chat_template_kwargs)
    except TemplateRefusal as error:
        raise ConfigError(
            f"dataset.system_prompt is set, but the model's chat template takes no system message ({error}): "
            "set it to null, or put its text into the prompts"
        ) from error


def _require_any(renderer: ChatRenderer, rows: Sequence[Row]) -> None:
    """One chat may be at fault itself: a plain question beside it tells."""
    first: str | None = None
    chats = [(row.messages, row.template_kwargs) for row in rows if row.messages is not None]
    for messages, given in [*chats, *([([QUESTION], chats[0][1])] if len(chats) == 1 else [])]:
        try:
            renderer.render(messages, given)
            return
        except TemplateRefusal as error:
            if first is not None and str(error) != first:
                return
            first = str(error)
    if first is not None:
        raise ConfigError(
            f"dataset.chat_template=true, but the model's chat template fails for all {len(chats):,} rows: {first}; "
            "mend it, or set dataset.chat_template=false"
        )
