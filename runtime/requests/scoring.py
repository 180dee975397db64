"""Requests that score target tokens. The boundary between prompt and target, and the windows of long documents, are as
in lm-eval, so results are comparable."""

import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..errors import require
from ..model.loading import LoadedModel
from ..sequences.sequence import Request, Scoring
from .chat import TemplateRefusal
from .prompts import Rejected, tokenize_each, vocabulary_error


def make_scoring(
    model: LoadedModel, id: str, prompt_ids: Rows[int], target_ids: Rows[int], *, index: int = 0
) -> Request | Rejected:
    """The request that scores `target_ids` after the prompt. All but the last target token must fit the context.
    `index`: the sample index."""
    num_prompt, (*known, last) = len(prompt_ids), target_ids or (-1,)
    has_encoder = model.start_token_id is not None
    ids = tuple(prompt_ids) if has_encoder else (*prompt_ids, *known)
    error = _size_error(model, prompt_ids, target_ids, num_tokens=len(ids))
    if error is not None:
        return Rejected(id=id, error=error, num_prompt_tokens=num_prompt, sample_index=index)
    scoring = Scoring(
        num_positions=len(target_ids), last_ids=(last,), decoder_ids=tuple(known) if has_encoder else None
    )
    return Request(id=id, prompt_ids=ids, max_new_tokens=1, sample_index=index, scoring=scoring)


def _size_error(model: LoadedModel, prompt_ids: Rows[int], target_ids: Rows[int], *, num_tokens: int) -> str | None:
    if not prompt_ids:
        return "the prompt has no tokens: the first target token needs one before it"
    if not target_ids:
        return "the target has no tokens"
    context = model.shape.context_tokens
    if model.start_token_id is not None:
        if max(len(prompt_ids), len(target_ids)) > context:
            sizes = f"the prompt has {len(prompt_ids):,} tokens and the target {len(target_ids):,}"
            return f"{sizes}; the limit of the model's encoder and decoder is {context:,} each"
    elif num_tokens > context:
        return (
            f"prompt and target have {num_tokens + 1:,} tokens; the limit is the model's context of {context:,}, plus "
            "the last target token"
        )
    return vocabulary_error(model, (*prompt_ids, *target_ids))


Target: TypeAlias = str | Rows[int]


class TokenizerInput(NamedTuple):
    """A text to tokenize. `is_rendered`: do not add special tokens."""

    text: str
    is_rendered: bool


@dataclass(frozen=True, kw_only=True)
class TextPair:
    """A prompt and its targets. `is_rendered`: the prompt already contains special tokens, from a chat template."""

    prompt: str | Rows[int] | TemplateRefusal
    targets: Rows[Target]
    is_rendered: bool = False


PairIds: TypeAlias = tuple[Rows[int], Rows[int]]  # of a prompt, and of its target


class _PairTexts(NamedTuple):
    """Texts or ids of a target and its prompt. `whole`: prompt and target as one text, split after as many tokens as
    the prompt has; empty if the target is tokenized alone."""

    prompt: TokenizerInput | Rows[int]
    target: TokenizerInput | Rows[int] = ()
    whole: TokenizerInput | Rows[int] = ()


def encode_pairs(model: LoadedModel, pairs: Rows[TextPair]) -> list[list[PairIds | str]]:
    """The ids of each target with its prompt, or an error.

    Trailing whitespace of a prompt moves to the target. Both are tokenized as one text and split after as many tokens
    as the prompt has alone. With an encoder, or token ids on either side, each is tokenized alone. An empty prompt
    becomes the BOS token. Raises CheckpointError without a tokenizer."""
    inputs = [[_pair_texts(model, pair, target) for target in pair.targets] for pair in pairs]
    parts = (part for each in inputs for one in each if not isinstance(one, str) for part in one)
    ids = _tokenize_texts(model, [part for part in parts if isinstance(part, TokenizerInput)])
    return [[one if isinstance(one, str) else _resolve_ids(one, ids) for one in each] for each in inputs]


def _pair_texts(model: LoadedModel, pair: TextPair, target: Target) -> _PairTexts | str:
    prompt, is_rendered = pair.prompt, pair.is_rendered
    if isinstance(prompt, TemplateRefusal):
        return prompt.as_error
    own = TokenizerInput(target, True) if isinstance(target, str) else target
    if not isinstance(prompt, str) or not isinstance(target, str):
        return _PairTexts(prompt=TokenizerInput(prompt, is_rendered) if isinstance(prompt, str) else prompt, target=own)
    num_kept = len(prompt.rstrip())
    kept, moved = prompt[:num_kept], prompt[num_kept:] + target
    if model.start_token_id is not None:
        return _PairTexts(prompt=TokenizerInput(kept, is_rendered), target=TokenizerInput(moved, True))
    if kept:
        return _PairTexts(prompt=TokenizerInput(kept, is_rendered), whole=TokenizerInput(kept + moved, is_rendered))
    start = text_start(model)
    if start is None:
        return "the prompt is empty, and the tokenizer has neither a BOS nor an EOS token"
    return _PairTexts(prompt=(start,), target=TokenizerInput(moved, True))


def _resolve_ids(inputs: _PairTexts, ids_by_text: Mapping[TokenizerInput, tuple[int, ...] | str]) -> PairIds | str:
    known = list[Rows[int]]()
    for part in inputs:
        ids = ids_by_text[part] if isinstance(part, TokenizerInput) else part
        if isinstance(ids, str):
            return ids
        known.append(ids)
    prompt, target, whole = known
    return prompt, whole[len(prompt) :] if whole else target


def _tokenize_texts(model: LoadedModel, texts: Rows[TokenizerInput]) -> dict[TokenizerInput, tuple[int, ...] | str]:
    """The ids of each distinct text, or its error."""
    results: dict[TokenizerInput, tuple[int, ...] | str] = {}
    for is_rendered in (False, True):
        distinct = [text for text, rendered in dict.fromkeys(texts) if rendered == is_rendered]
        ids = tokenize_each(model, distinct, is_rendered=is_rendered, max_tokens=None) if distinct else []
        results |= {TokenizerInput(text, is_rendered): one for text, one in zip(distinct, ids, strict=True)}
    return results


def text_start(model: LoadedModel) -> int | None:
    """The BOS token, or EOS if there is none."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return None
    known = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((token for token in known if isinstance(token, int)), None)


@dataclass(frozen=True, kw_only=True)
class TextSize:
    """Units of perplexity as in lm-eval: UTF-8 bytes, and pieces between whitespace (empty ones at the ends count)."""

    num_words: int
    num_bytes: int

    @staticmethod
    def from_text(text: str) -> "TextSize":
        num_words = len(re.split(r"\s+", text)) if text else 0
        return TextSize(num_words=num_words, num_bytes=len(text.encode("utf-8", "surrogatepass")))

    @staticmethod
    def total(sizes: Iterable["TextSize"]) -> "TextSize":
        counts = [(size.num_words, size.num_bytes) for size in sizes]
        return TextSize(num_words=sum(words for words, _ in counts), num_bytes=sum(num for _, num in counts))


def document_windows(
    model: LoadedModel, documents: Rows[str | Rows[int]], max_tokens: int | None
) -> list[list[PairIds] | str]:
    """The windows of each document, or its error. No special tokens are added. `max_tokens`: see `rolling_windows`;
    limited by the model's context. Raises ConfigError if the tokenizer has neither BOS nor EOS."""
    require(model.start_token_id is None, "an encoder-decoder cannot score documents: score (source, target) pairs")
    start = text_start(model)
    require(start is not None, "documents need a tokenizer with a BOS or EOS token; set model.tokenizer")
    assert start is not None
    window_tokens = min(max_tokens or model.shape.context_tokens, model.shape.context_tokens)
    inputs = [TokenizerInput(document, True) if isinstance(document, str) else document for document in documents]
    ids_by_text = _tokenize_texts(model, [text for text in inputs if isinstance(text, TokenizerInput)])
    document_ids = [ids_by_text[text] if isinstance(text, TokenizerInput) else text for text in inputs]
    return [
        ids if isinstance(ids, str) else rolling_windows(ids, start, window_tokens) or "the document has no tokens"
        for ids in document_ids
    ]


def rolling_windows(tokens: Rows[int], start: int, max_tokens: int) -> list[PairIds]:
    """Windows that score each token of a document once, with as much context before it as fits `max_tokens`. The first
    window begins with `start`. Equals lm-eval's `get_rolling_token_windows` (context 1) with `make_disjoint_window`."""
    require(max_tokens >= 1, f"max_tokens must be 1 or more, got {max_tokens}")
    known, windows = [start, *tokens], list[PairIds]()
    for begin in range(0, len(tokens), max_tokens):
        end = min(begin + max_tokens, len(tokens))
        first = max(0, end - max_tokens)  # index in `known`, which is shifted by one
        windows.append((known[first : begin + 1], tokens[begin:end]))
    return windows
