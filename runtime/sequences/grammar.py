"""Grammars of structured output: `sampling.json_schema`, `regex`, `choice` and `grammar`. They are compiled by
llguidance, an optional dependency. A guide is the state of one sequence in its grammar; it gives the mask of tokens
that are allowed next."""

# pyright: reportMissingImports=false

import json
from collections.abc import Mapping
from collections.abc import Sequence as Rows  # `Sequence` is a running request
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

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"  # limited, since a weak model might generate whitespace forever
SPECIAL_PREFIX = b"\xff"  # llguidance's prefix of special tokens; invalid in UTF-8
# Decoders that decode each token independently. If llguidance rejects a tokenizer with one of these, it can be given
# the text of each token instead.
CONTEXT_FREE_DECODERS = ("Metaspace", "WordPiece")
NUM_CACHED_GRAMMARS = 1024  # compiled grammars in the cache


def resolve_schema(sampling: SamplingConfig) -> SamplingConfig:
    """Returns the settings with `json_schema` as JSON text; reads it from the file if it is a path. Validates this and
    the other grammar settings. Raises ConfigError with the key."""
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
    """Serializes a schema as compact JSON. Keeps the order of keys, since completions have the same order. Raises
    ConfigError."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"sampling.json_schema is not valid JSON: {error}") from error
    require(isinstance(value, Mapping), f"sampling.json_schema must be an object, got {text[:80]}")
    return text


def make_grammar(sampling: SamplingConfig) -> str | None:
    """Makes the grammar of a completion in llguidance's format; None if the settings have no grammar. `sampling` must
    be a result of `resolve_schema`. Raises ConfigError."""
    for key in STRUCTURES:
        value = getattr(sampling, key)
        if value is not None:
            value = schema_text(value) if key == "json_schema" else value
            return _validate_grammar(key, tuple(value) if isinstance(value, list) else value)
    return None


@lru_cache(NUM_CACHED_GRAMMARS)
def _validate_grammar(key: str, value: str | tuple[str, ...]) -> str:
    """Converts the setting `key` to llguidance's format, and validates it."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ConfigError(f"sampling.{key} needs llguidance: pip install 'weightstream[structured]'") from error
    try:
        grammar = _to_llguidance(LLMatcher, key, value)
        problem = LLMatcher.validate_grammar(grammar)
    except (ValueError, RecursionError) as error:  # schema nested too deep, or text that is not UTF-8
        raise ConfigError(f"sampling.{key} is refused by llguidance: {summarize_error(str(error))}") from error
    if problem:
        raise ConfigError(f"sampling.{key} is refused by llguidance: {summarize_error(problem)}")
    return grammar


def _to_llguidance(compiler: "type[LLMatcher]", key: str, value: str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        # One terminal with all choices. With one rule per choice, each would be a symbol; llguidance allows 65,000.
        return compiler.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, value))}")
    if key == "json_schema":  # a schema with `x-guidance` options may set its own whitespace pattern
        has_options = "x-guidance" in json.loads(value)
        return compiler.grammar_from_json_schema(value, {} if has_options else {"whitespace_pattern": WHITESPACE})
    return compiler.grammar_from_regex(value) if key == "regex" else compiler.grammar_from_lark(value)


def summarize_error(problem: str) -> str:
    """Joins the first line of an llguidance message and later lines that begin with "error"."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    return "; ".join([lines[0], *(line for line in lines[1:] if line.startswith("error"))])[:400]


def llguidance_tokenizer(
    tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: frozenset[int]
) -> "LLTokenizer":
    """Converts a vocabulary for llguidance. Results are cached, since a large vocabulary takes a second. Raises
    ConfigError if the tokenizer or model does not support structured output."""
    require(tokenizer is not None, "structured output needs a tokenizer: set model.tokenizer")
    require(bool(eos_token_ids), "structured output needs an EOS token, but the model's config has none")
    assert tokenizer is not None, "checked above"
    return _make_llguidance_tokenizer(tokenizer, vocab_size, tuple(sorted(eos_token_ids)))


@lru_cache(maxsize=2)
def _make_llguidance_tokenizer(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> "LLTokenizer":
    """Converts the tokenizer with llguidance's own function. If that rejects it, passes token texts instead, for
    decoders that need no context."""
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    num_tokens, ends = max(vocab_size, len(tokenizer)), list(eos_token_ids)
    try:
        fast = cast(PreTrainedTokenizerFast, tokenizer)  # from_tokenizer raises ValueError for others
        return from_tokenizer(fast, n_vocab=num_tokens, eos_token=ends)
    except ValueError as error:
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        if type(decoder).__name__ not in CONTEXT_FREE_DECODERS:
            name, reason = type(tokenizer).__name__, summarize_error(str(error))
            raise ConfigError(f"structured output does not support this model's tokenizer {name}: {reason}") from error
    wrapper = TokenizerWrapper(_TextVocabulary(Detokenizer(tokenizer), num_tokens, ends[0]))
    return LLTokenizer(wrapper, n_vocab=num_tokens, eos_token=ends)


class _TextVocabulary:
    """The object from which llguidance's `TokenizerWrapper` reads token texts. Calling it tokenizes bytes: it takes the
    longest matching token at each position."""

    bos_token_id = None

    def __init__(self, detokenizer: Detokenizer, num_tokens: int, eos_token_id: int):
        self.eos_token_id = eos_token_id
        self.special_token_ids = [id for id in range(num_tokens) if not detokenizer.has_text(id)]
        self.tokens = [detokenizer.spelling(id).text for id in range(num_tokens)]
        for id in self.special_token_ids:
            self.tokens[id] = SPECIAL_PREFIX + self.tokens[id]
        # In reverse order, so that the lowest id wins if tokens have equal text.
        self._ids_by_text = {text: id for id, text in reversed([*enumerate(self.tokens)]) if text[:1] != SPECIAL_PREFIX}
        self._longest = max(map(len, self._ids_by_text), default=0)

    def __call__(self, data: bytes) -> list[int]:
        ids: list[int] = []
        while data:
            lengths = range(min(self._longest, len(data)), 0, -1)
            length = next((length for length in lengths if data[:length] in self._ids_by_text), None)
            if length is None:
                break
            ids.append(self._ids_by_text[data[:length]])
            data = data[length:]
        return ids


class Grammars:
    """Manages the grammar guides of a run's sequences. The vocabulary is converted on first use. With `reasoning`, a
    completion may begin with a reasoning tag. The grammar then applies after the end tag, otherwise from the start."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        reasoning: Reasoning | None = None,
    ) -> None:
        self._tokenizer_arguments, self._reasoning = (tokenizer, vocab_size, eos_token_ids), reasoning
        self._compiled = lru_cache(NUM_CACHED_GRAMMARS)(self._compile)

    def masks(self, sequences: Rows[Sequence]) -> torch.Tensor | None:
        """Masks of allowed next tokens, int32 (B, words) in host memory, with one bit per token. None if no sequence
        has a guide. Updates the guides. The row of a guide with an error is undefined."""
        guides = [self._update_guide(sequence) for sequence in sequences]
        if all(guide is None for guide in guides):
            return None
        precomputed = [guide.mask() if guide is not None else None for guide in guides]  # by `start_masks`
        remaining = [guide if mask is None else None for guide, mask in zip(guides, precomputed, strict=True)]
        masks_BW = fill_masks(self._executor, remaining, self._tokens.vocab_size)
        for row, mask in enumerate(precomputed):
            if mask is not None:
                masks_BW[row] = mask
        return masks_BW

    def start_masks(self, sequences: Rows[Sequence]) -> None:
        """Starts computing the next masks on a thread, in parallel with reads and compute; llguidance releases the
        GIL."""
        all_guides = (self._update_guide(sequence) for sequence in sequences)
        guides = [guide for guide in all_guides if guide is not None and guide.error is None]
        if guides:
            masks_future = self._thread.submit(fill_masks, self._executor, guides, self._tokens.vocab_size)
            for row, guide in enumerate(guides):
                guide.pending_mask = masks_future, row

    def _update_guide(self, sequence: Sequence) -> Guide | None:
        """Returns the sequence's guide, advanced by the generated tokens. None without a grammar and during
        reasoning."""
        grammar, reasoning = sequence.request.grammar, self._reasoning
        if grammar is None:
            return None
        answer = reasoning.find_answer(sequence) if reasoning is not None else None
        if reasoning is not None and answer is None and reasoning.is_thinking(sequence):
            sequence.guide = None
            return None
        # Make a new guide at the begin of the completion, and again where the answer begins after reasoning.
        if sequence.guide is None or (answer is not None and sequence.guide.num_consumed < answer.num_tokens):
            matcher = self._compiled(grammar).deep_copy()
            if answer is not None:
                # The text after the end tag, within the tag's last token, is the begin of the answer.
                matcher.consume_tokens(self._tokens.tokenize_str(answer.rest.lstrip()))
                sequence.guide = Guide(matcher=matcher, num_consumed=answer.num_tokens)
            else:
                # Reasoning may still begin: keep a state in the grammar of its tag too, until the tokens exclude one.
                opening = self._compiled(reasoning.opening_grammar).deep_copy() if reasoning is not None else None
                sequence.guide = Guide(matcher=matcher, opening=opening)
        sequence.guide.accept(sequence.generated)
        return sequence.guide

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        return LLMatcher(self._tokens, grammar, log_level=0)

    @cached_property
    def _tokens(self) -> "LLTokenizer":
        return llguidance_tokenizer(*self._tokenizer_arguments)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="masks")

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()
