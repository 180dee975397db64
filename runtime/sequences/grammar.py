"""Grammars of structured output: what `sampling.json_schema`, `regex`, `choice` and `grammar` come to in llguidance's
form, checked by llguidance itself. The library is an extra.
"""

# pyright: reportMissingImports=false

import json
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..config.sampling import STRUCTURES
from ..config.settings import SamplingConfig, require
from ..errors import ConfigError
from .detokenizer import Detokenizer
from .guide import Guide, fill_masks
from .reasoning import Reasoning
from .sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"  # between the parts of a document; endless, a weak model would never end
SPECIAL = b"\xff"  # before the name of a token without a text, by llguidance's convention: it is in no UTF-8
SPELLED_DECODERS = (
    "Metaspace",
    "WordPiece",
)  # that llguidance does not know; each token adds the same anywhere in a text
NUM_KEPT = 1024  # grammars whose compiled form is kept


def resolve_schema(sampling: SamplingConfig) -> SamplingConfig:
    """The settings with the schema as JSON, read where it is a file's, and checked by llguidance with all else that a
    completion must follow. Raises ConfigError naming the key."""
    schema = sampling.json_schema
    if isinstance(schema, str) and not schema.lstrip().startswith("{"):
        try:
            schema = Path(schema).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"sampling.json_schema={schema} cannot be read: {reason}") from error
    if schema is not None:
        sampling = replace(sampling, json_schema=schema_text(schema))
    make_grammar(sampling)
    return sampling


def schema_text(schema: str | Mapping[str, object]) -> str:
    """The JSON of a schema, in the order of its keys, which is that of a completion's. Raises ConfigError."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"sampling.json_schema is no JSON: {error}") from error
    require(isinstance(value, Mapping), f"sampling.json_schema must be an object, got {text[:80]}")
    return text


def make_grammar(sampling: SamplingConfig) -> str | None:
    """What a completion must be in llguidance's form; None where it may be anything. A schema is none of a file here.
    Raises ConfigError."""
    for key in STRUCTURES:
        value = getattr(sampling, key)
        if value is not None:
            value = schema_text(value) if key == "json_schema" else value
            return _validated_grammar(key, tuple(value) if isinstance(value, list) else value)
    return None


@lru_cache(NUM_KEPT)
def _validated_grammar(key: str, value: str | tuple[str, ...]) -> str:
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ConfigError(f"sampling.{key} needs llguidance: pip install 'weightstream[structured]'") from error
    try:
        made = _to_llguidance(LLMatcher, key, value)
        problem = LLMatcher.validate_grammar(made)
    except (ValueError, RecursionError) as error:  # a schema nested too deep for its parser, or text that is no UTF-8
        raise ConfigError(f"sampling.{key} is refused by llguidance: {summarize_error(str(error))}") from error
    if problem:
        raise ConfigError(f"sampling.{key} is refused by llguidance: {summarize_error(problem)}")
    return made


def _to_llguidance(compiler: "type[LLMatcher]", key: str, value: str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        # One terminal, an automaton: as rules, each text is a symbol, of which 65,000 are the most.
        return compiler.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, value))}")
    if key == "json_schema":  # whose `x-guidance`, if any, says how far the parts of a document may stand apart
        has_own = "x-guidance" in json.loads(value)
        return compiler.grammar_from_json_schema(value, {} if has_own else {"whitespace_pattern": WHITESPACE})
    return compiler.grammar_from_regex(value) if key == "regex" else compiler.grammar_from_lark(value)


def summarize_error(problem: str) -> str:
    """The first line of what llguidance says, and those that name an error."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    return "; ".join([lines[0], *(line for line in lines[1:] if line.startswith("error"))])[:400]


def llguidance_tokenizer(
    tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: frozenset[int]
) -> "LLTokenizer":
    """The vocabulary as llguidance walks it; for a large one that takes a second, once. Raises ConfigError where the
    tokenizer or the model cannot have structured output."""
    require(tokenizer is not None, "structured output is of text, and needs a tokenizer: set model.tokenizer")
    require(bool(eos_token_ids), "structured output ends by a token that the model ends by, and its config names none")
    assert tokenizer is not None, "just seen"
    return _make_llguidance_tokenizer(tokenizer, vocab_size, tuple(sorted(eos_token_ids)))


@lru_cache(maxsize=2)
def _make_llguidance_tokenizer(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    num_tokens, ends = max(vocab_size, len(tokenizer)), list(eos_token_ids)
    try:
        fast = cast(PreTrainedTokenizerFast, tokenizer)  # others are refused
        return from_tokenizer(fast, n_vocab=num_tokens, eos_token=ends)
    except ValueError as error:
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        if type(decoder).__name__ not in SPELLED_DECODERS:
            name, reason = type(tokenizer).__name__, summarize_error(str(error))
            raise ConfigError(f"structured output cannot follow this model's tokenizer, a {name}: {reason}") from error
    spelled = TokenizerWrapper(_SpelledVocabulary(Detokenizer(tokenizer), num_tokens, ends[0]))
    return LLTokenizer(spelled, n_vocab=num_tokens, eos_token=ends)


class _SpelledVocabulary:
    """A vocabulary as `TokenizerWrapper` wants it. Called it cuts bytes into tokens, the longest first."""

    bos_token_id = None

    def __init__(self, detokenizer: Detokenizer, num_tokens: int, eos_token_id: int):
        self.eos_token_id = eos_token_id
        self.special_token_ids = [id for id in range(num_tokens) if not detokenizer.has_text(id)]
        self.tokens = [detokenizer.spelling(id).text for id in range(num_tokens)]
        for id in self.special_token_ids:
            self.tokens[id] = SPECIAL + self.tokens[id]
        self._id_of = {text: id for id, text in reversed([*enumerate(self.tokens)]) if text[:1] != SPECIAL}
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, data: bytes) -> list[int]:
        found: list[int] = []
        while data:
            ends = range(min(self._longest, len(data)), 0, -1)
            end = next((end for end in ends if data[:end] in self._id_of), None)
            if end is None:
                break
            found.append(self._id_of[data[:end]])
            data = data[end:]
        return found


class Grammars:
    """Guides through the grammars of a run's sequences. What needs the tokenizer is made with the first.

    With `reasoning` a sequence that thinks has no guide until its end tag, behind which the grammar begins. One that
    has not begun to may begin with the tag or with what the grammar says."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        reasoning: Reasoning | None = None,
    ) -> None:
        self._model, self._reasoning = (tokenizer, vocab_size, eos_token_ids), reasoning
        self._compiled = lru_cache(NUM_KEPT)(self._compile)

    def masks(self, sequences: Rows[Sequence]) -> torch.Tensor | None:
        """Which tokens may come next, a bit for each, int32 (B, words) in host memory; None where any may, for all
        rows. Mutates the sequences' guides. What comes where a guide has an error means nothing."""
        guides = [self._update_guide(sequence) for sequence in sequences]
        if all(guide is None for guide in guides):
            return None
        begun = [guide.mask() if guide is not None else None for guide in guides]
        left = [guide if mask is None else None for guide, mask in zip(guides, begun, strict=True)]
        masks_BW = fill_masks(self._executor, left, self._tokens.vocab_size)
        for row, mask in enumerate(begun):
            if mask is not None:
                masks_BW[row] = mask
        return masks_BW

    def begin(self, sequences: Rows[Sequence]) -> None:
        """Begins the masks that come next, on a thread beside what the caller does then: reading weights and computing
        logits. llguidance computes without the interpreter's lock."""
        found = (self._update_guide(sequence) for sequence in sequences)
        guides = [guide for guide in found if guide is not None and guide.error is None]
        if guides:
            masks = self._thread.submit(fill_masks, self._executor, guides, self._tokens.vocab_size)
            for row, guide in enumerate(guides):
                guide.pending_mask = masks, row

    def _update_guide(self, sequence: Sequence) -> Guide | None:
        grammar, thinking = sequence.request.grammar, self._reasoning
        if grammar is None:
            return None
        answer = thinking.find_answer(sequence) if thinking is not None else None
        if thinking is not None and answer is None and thinking.is_thinking(sequence):
            sequence.guide = None
            return None
        if sequence.guide is None or (answer is not None and sequence.guide.num_reported < answer.num_tokens):
            matcher = self._compiled(grammar).deep_copy()
            if answer is not None:
                matcher.consume_tokens(self._tokens.tokenize_str(answer.rest.lstrip()))
                sequence.guide = Guide(matcher=matcher, num_reported=answer.num_tokens)
            else:
                opening = self._compiled(thinking.opening_grammar).deep_copy() if thinking is not None else None
                sequence.guide = Guide(matcher=matcher, opening=opening)
        sequence.guide.accept(sequence.generated)
        return sequence.guide

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        return LLMatcher(self._tokens, grammar, log_level=0)

    @cached_property
    def _tokens(self) -> "LLTokenizer":
        return llguidance_tokenizer(*self._model)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="masks")

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()
