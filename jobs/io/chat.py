"""Chats as the model's own template spells them, its special tokens included."""

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from runtime.errors import ConfigError

from .dataset import DatasetConfig

QUESTION = {"role": "user", "content": "?"}


class TemplateRefusal(ValueError):
    """Why the template takes none of these messages, in its own words."""


def require_template(tokenizer: PreTrainedTokenizerBase | None, config: DatasetConfig) -> None:
    """Raises ConfigError when chats are asked for and there is no template, or none for `dataset.system_prompt`."""
    if not config.chat_template:
        return
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError("dataset.chat_template=true, but the model's tokenizer has no chat template")
    if config.system_prompt is not None:
        try:
            render(tokenizer, [{"role": "system", "content": config.system_prompt}, QUESTION])
        except TemplateRefusal as error:
            raise ConfigError(
                f"dataset.system_prompt is set, but the model's chat template takes no system message ({error}): "
                "set it to null, or put its text into the prompts"
            ) from error


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> str:
    """The messages and the opening of the answer. Raises TemplateRefusal."""
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:
        raise TemplateRefusal(str(error).strip() or type(error).__name__) from error
    assert isinstance(text, str), "one chat gives one text"
    return text
