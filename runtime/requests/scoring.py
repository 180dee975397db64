"""Requests that compute log-probabilities of target tokens after a prompt. The tokenization at the boundary of prompt
and target, and the windows of long documents, are as in lm-eval, so results are comparable."""

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
    """Makes the request that scores `target_ids` after the prompt, or rejects it. Prompt and target without its last
    token must fit the context. `index`: the request's sample index."""
    num_prompt, (*known, last) = len(prompt_ids), target_ids or (-1,)  # the last target token is not an input
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
    """Error if prompt or target is empty, too long or outside the vocabulary. `num_tokens`: input tokens together."""
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
    """A text to tokenize. `is_rendered`: no special tokens are added."""

    text: str
    is_rendered: bool


@dataclass(frozen=True, kw_only=True)
class TextPair:
    """A prompt and its targets. `is_rendered`: a chat template has added special tokens to the prompt."""

    prompt: str | Rows[int] | TemplateRefusal
    targets: Rows[Target]
    is_rendered: bool = False


PairIds: TypeAlias = tuple[Rows[int], Rows[int]]  # token ids of a prompt, and of its target


class _PairTexts(NamedTuple):
    """Texts to tokenize, or token ids, for a prompt and one target. `whole`: prompt and target as one text. If it is
    set, `target` is empty: the target is the tokens of `whole` after as many as the prompt has."""

    prompt: TokenizerInput | Rows[int]
    target: TokenizerInput | Rows[int] = ()
    whole: TokenizerInput | Rows[int] = ()


def encode_pairs(model: LoadedModel, pairs: Rows[TextPair]) -> list[list[PairIds | str]]:
    """Tokenizes pairs. Returns, per pair and target, the token ids of prompt and target, or a str with the error.

    Whitespace at the end of a prompt is moved to the target. Prompt and target are tokenized as one text, which is
    split after as many tokens as the prompt alone has. If the model has an encoder, or prompt or target is token ids,
    both are tokenized separately. An empty prompt becomes the BOS token. Raises CheckpointError without a tokenizer."""
    inputs = [[_pair_texts(model, pair, target) for target in pair.targets] for pair in pairs]
    parts = (part for row in inputs for item in row if not isinstance(item, str) for part in item)
    ids = _tokenize_texts(model, [part for part in parts if isinstance(part, TokenizerInput)])
    return [[item if isinstance(item, str) else _resolve_ids(item, ids) for item in row] for row in inputs]


def _pair_texts(model: LoadedModel, pair: TextPair, target: Target) -> _PairTexts | str:
    """Decides how a prompt and one target are tokenized (see `encode_pairs`). Returns a str for an error."""
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
    """Replaces texts by their token ids. Returns the error of the first text that has one."""
    resolved = list[Rows[int]]()
    for part in inputs:
        ids = ids_by_text[part] if isinstance(part, TokenizerInput) else part
        if isinstance(ids, str):
            return ids
        resolved.append(ids)
    prompt, target, whole = resolved
    return prompt, whole[len(prompt) :] if whole else target


def _tokenize_texts(model: LoadedModel, texts: Rows[TokenizerInput]) -> dict[TokenizerInput, tuple[int, ...] | str]:
    """Tokenizes each distinct text once: text -> token ids, or a str with the error."""
    results: dict[TokenizerInput, tuple[int, ...] | str] = {}
    for is_rendered in (False, True):
        distinct = [text for text, rendered in dict.fromkeys(texts) if rendered == is_rendered]
        outcomes = tokenize_each(model, distinct, is_rendered=is_rendered, max_tokens=None) if distinct else []
        results |= {TokenizerInput(text, is_rendered): ids for text, ids in zip(distinct, outcomes, strict=True)}
    return results


def text_start(model: LoadedModel) -> int | None:
    """The id of the BOS token, else of the EOS token; None if the tokenizer has neither."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return None
    known = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((token for token in known if isinstance(token, int)), None)


@dataclass(frozen=True, kw_only=True)
class TextSize:
    """Numbers of words and UTF-8 bytes of a text, as in lm-eval, for perplexities. Words are the strings between
    whitespace; an empty string at the begin or end of the text also counts."""

    num_words: int
    num_bytes: int

    @staticmethod
    def from_text(text: str) -> "TextSize":
        num_words = len(re.split(r"\s+", text)) if text else 0
        return TextSize(num_words=num_words, num_bytes=len(text.encode("utf-8", "surrogatepass")))

    @staticmethod
    def total(sizes: Iterable["TextSize"]) -> "TextSize":
        counts = [(size.num_words, size.num_bytes) for size in sizes]
        return TextSize(num_words=sum(words for words, _ in counts), num_bytes=sum(bytes_ for _, bytes_ in counts))


def document_windows(
    model: LoadedModel, documents: Rows[str | Rows[int]], max_tokens: int | None
) -> list[list[PairIds] | str]:
    """Tokenizes documents without special tokens and divides them into windows. Returns, per document, the windows as
    (context ids, ids to score), or a str with the error. `max_tokens`: see `rolling_windows`; None, or more than the
    model's context, means the context. Raises ConfigError if the tokenizer has neither BOS nor EOS."""
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
    """Divides a document into windows that score each token once: (context ids, ids to score). The last window has as
    much context as fits `max_tokens`; other windows have one token. The first context is the token `start`. Equals
    lm-eval's `get_rolling_token_windows` (context 1) with `make_disjoint_window`."""
    require(max_tokens >= 1, f"max_tokens must be 1 or more, got {max_tokens}")
    shifted, windows = [start, *tokens], list[PairIds]()  # shifted[i + 1] is tokens[i]
    for begin in range(0, len(tokens), max_tokens):
        end = min(begin + max_tokens, len(tokens))
        first = max(0, end - max_tokens)  # the first input in `shifted`
        windows.append((shifted[first : begin + 1], tokens[begin:end]))
    return windows
