"""Separates reasoning from the answer in a completion. Reasoning is the text between two tags such as `<think>` and
`</think>`. The chat template may put the first tag at the end of the prompt, so it need not be in the completion."""

import json
import logging
from collections.abc import Sequence as Rows  # `Sequence` is a running request
from dataclasses import dataclass

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..config.settings import SamplingConfig, require
from .detokenizer import CONTEXT_TOKENS, Detokenizer
from .sequence import Answer, Sequence

log = logging.getLogger(__name__)

KNOWN_TAGS = (  # `sampling.reasoning=auto` searches for them in added tokens and chat template
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


@dataclass(frozen=True, kw_only=True)
class SplitText:
    """The answer (`text`) and the reasoning of a completion. `reasoning` is None if the completion has none."""

    reasoning: str | None
    text: str


class Reasoning:
    """Finds the end of reasoning in a completion: by the token id of the end tag, or by its text if it is not a token.
    (Special tokens have no text.) `begin` and `end`: the tags. `start_token_id`: see `Detokenizer`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, begin: str, end: str, start_token_id: int | None = None):
        self._texts, self._begin, self._end = Detokenizer(tokenizer, start_token_id), begin, end
        self._begin_id, self._end_id = (added_token_ids(tokenizer).get(tag) for tag in (begin, end))

    def find_answer(self, sequence: Sequence) -> Answer | None:
        """Returns where the answer starts; None if no reasoning has ended. Also None if a grammar applies from the
        first token on, since structured text may contain the end tag. May be called after each token, or once at the
        end. Mutates the sequence."""
        num_new, sequence.num_scanned = len(sequence.generated) - sequence.num_scanned, len(sequence.generated)
        if sequence.answer is None and num_new > 0 and (sequence.request.grammar is None or self.is_thinking(sequence)):
            sequence.answer = self._find_end(sequence.generated, num_new)
        return sequence.answer

    def is_thinking(self, sequence: Sequence) -> bool | None:
        """Decides, for a completion in which no answer has started, whether it began with reasoning. None if it is too
        short to tell."""
        if sequence.is_thinking:
            return True
        num_tokens = CONTEXT_TOKENS + len(self._begin.encode())
        prompt = self._decode_with_special(sequence.request.prompt_ids[-num_tokens:]).rstrip()
        text = self._decode_with_special(sequence.generated[: 2 * num_tokens]).lstrip()
        if prompt.endswith(self._begin) or text.startswith(self._begin):
            sequence.is_thinking = True
            return True
        return None if self._begin.startswith(text) else False

    def split(self, sequence: Sequence) -> SplitText:
        """Splits a finished completion. Strips the whitespace between reasoning and answer."""
        answer, ids = self.find_answer(sequence), sequence.generated
        if answer is None:
            text = self._texts.completion_text(sequence.request, ids)[: sequence.text_end]
            if not self.is_thinking(sequence):
                return SplitText(reasoning=None, text=text)
            return SplitText(reasoning=self._strip_tags(text), text="")
        reasoning = self._texts.decode(ids[: answer.num_tokens])
        is_structured = sequence.request.grammar is not None and not answer.rest  # leading whitespace is then kept
        text = answer.rest + self._texts.completion_text(sequence.request, ids, answer.num_tokens)[: sequence.text_end]
        return SplitText(reasoning=self._strip_tags(reasoning), text=text if is_structured else text.lstrip())

    @property
    def opening_grammar(self) -> str:
        """The grammar of a completion that begins with reasoning, in llguidance's Lark form."""
        begin = json.dumps(self._begin, ensure_ascii=False)
        tag = begin if self._begin_id is None else f"({begin} | <[{self._begin_id}]>)"
        return rf"start: /\s{{0,4}}/ {tag} /(.|\n)*/"

    def _strip_tags(self, reasoning: str) -> str:
        return reasoning.partition(self._end)[0].strip().removeprefix(self._begin).strip()

    def _find_end(self, ids: Rows[int], num_new: int) -> Answer | None:
        """Searches for the end of the end tag in the last `num_new` tokens."""
        new = list(ids[len(ids) - num_new :])
        if self._end_id in new:
            return Answer(num_tokens=len(ids) - num_new + new.index(self._end_id) + 1)
        window = CONTEXT_TOKENS + len(self._end.encode()) + num_new
        if self._end not in self._texts.decode(ids[-window:]):
            return None
        low, high = 0, len(ids)  # bisection: the first `high` tokens contain the tag, the first `low` do not
        if self._end not in self._texts.decode(ids):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._end in self._texts.decode(ids[:middle]) else (middle, high)
        return Answer(num_tokens=high, rest=self._texts.decode(ids[:high]).partition(self._end)[2])

    def _decode_with_special(self, ids: Rows[int]) -> str:
        return self._texts.decode(ids, keeps_special=True)


def added_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The tokenizer's added tokens: text -> id."""
    return {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}


def make_reasoning(
    config: SamplingConfig, tokenizer: PreTrainedTokenizerBase | None, start_token_id: int | None = None
) -> Reasoning | None:
    """Makes a `Reasoning` for the tags in the settings. None if reasoning is disabled, or if the tokenizer has no known
    tags. Raises ConfigError without a tokenizer."""
    if config.reasoning is None:
        return None
    require(tokenizer is not None, "sampling.reasoning needs a tokenizer; set model.tokenizer")
    assert tokenizer is not None, "checked above"
    if not isinstance(config.reasoning, str):
        begin, end = config.reasoning
        return Reasoning(tokenizer, begin, end, start_token_id)
    template, added = str(tokenizer.chat_template or ""), added_token_ids(tokenizer)
    tags = next((tags for tags in KNOWN_TAGS if tags[1] in added or tags[1] in template), None)
    if tags is None:
        known = ", ".join(end for _, end in KNOWN_TAGS)
        log.warning("sampling.reasoning=auto: the tokenizer and its chat template have none of %s", known)
    return Reasoning(tokenizer, *tags, start_token_id) if tags is not None else None
