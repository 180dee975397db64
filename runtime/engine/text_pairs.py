"""Where a prompt ends and its target begins in tokens, and how long documents are cut into windows: as lm-eval defines
both, so that numbers made here and there are comparable.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import require
from ..model.loading import LoadedModel
from .chat import TemplateRefusal
from .tokens import tokenize_each

Text: TypeAlias = tuple[str, bool]  # the other says that its special tokens are in it, or wanted nowhere
Target: TypeAlias = str | Rows[int]


@dataclass(frozen=True, kw_only=True)
class TextPair:
    """A prompt and its targets. `is_rendered`: the prompt came out of a chat template, which has put the special tokens
    in already."""

    prompt: str | Rows[int] | TemplateRefusal
    targets: Rows[Target]
    is_rendered: bool = False


@dataclass(frozen=True, kw_only=True)
class PairIds:
    prompt: Rows[int]
    target: Rows[int]


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What a target's ids are made of. `whole`: prompt and target in one text, where both are texts."""

    prompt: Text | Rows[int]
    target: Text | Rows[int]
    whole: Text | None

    @property
    def texts(self) -> Iterator[Text]:
        yield from (text for text in (self.prompt, self.target, self.whole) if _is_text(text))


def encode_pairs(model: LoadedModel, pairs: Rows[TextPair]) -> list[list[PairIds | str]]:
    """The ids of each pair's targets and of the prompt in front of each, or what is wrong.

    Trailing white space of a prompt belongs to the target. The two are tokenised as one text, and what lies behind as
    many tokens as the prompt has alone is the target; behind an encoder, and with ids on one side, each is tokenised by
    itself. An empty prompt is the token that texts begin with. Raises CheckpointError where there is no tokenizer.
    """
    wanted = [[_wanted(model, pair, target) for target in pair.targets] for pair in pairs]
    found = _tokenised(
        model, [text for each in wanted for one in each if not isinstance(one, str) for text in one.texts]
    )
    return [[one if isinstance(one, str) else _ids(model, one, found) for one in each] for each in wanted]


def _wanted(model: LoadedModel, pair: TextPair, target: Target) -> _Wanted | str:
    prompt, is_rendered = pair.prompt, pair.is_rendered
    if isinstance(prompt, TemplateRefusal):
        return f"the model's chat template refuses the messages: {prompt}"
    if not isinstance(prompt, str) or not isinstance(target, str):
        return _Wanted(
            prompt=(prompt, is_rendered) if isinstance(prompt, str) else prompt,
            target=(target, True) if isinstance(target, str) else target,
            whole=None,
        )
    num_kept = len(prompt.rstrip())
    target = prompt[num_kept:] + target
    prompt = prompt[:num_kept]
    if model.start_token_id is not None:
        return _Wanted(prompt=(prompt, is_rendered), target=(target, True), whole=None)
    if prompt:
        return _Wanted(prompt=(prompt, is_rendered), target=(), whole=(prompt + target, is_rendered))
    start = text_start(model)
    if start is None:
        return "the prompt is empty, and the tokenizer has no token that texts begin with"
    return _Wanted(prompt=(start,), target=(target, True), whole=None)


def _ids(model: LoadedModel, wanted: _Wanted, found: dict[Text, tuple[int, ...] | str]) -> PairIds | str:
    prompt, target, whole = (
        found[part] if part is not None and _is_text(part) else part
        for part in (wanted.prompt, wanted.target, wanted.whole)
    )
    for ids in (prompt, target, whole):
        if isinstance(ids, str):
            return ids
    if whole is not None:
        return PairIds(prompt=whole[: len(prompt)], target=whole[len(prompt) :])
    return PairIds(prompt=prompt, target=target)


def _is_text(part: Text | Rows[int] | None) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str)


def _tokenised(model: LoadedModel, texts: Rows[Text]) -> dict[Text, tuple[int, ...] | str]:
    """The ids of each text once, or what is wrong with it."""
    found: dict[Text, tuple[int, ...] | str] = {}
    for is_rendered in (False, True):
        each = [text for text, how in dict.fromkeys(texts) if how == is_rendered]
        ids = tokenize_each(model, each, is_rendered=is_rendered, most_tokens=None) if each else []
        found |= {(text, is_rendered): one for text, one in zip(each, ids, strict=True)}
    return found


def text_start(model: LoadedModel) -> int | None:
    """The token that texts begin with, or where there is none that which they end with."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return None
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id


def encode_documents(model: LoadedModel, documents: Rows[str | Rows[int]]) -> list[Rows[int] | str]:
    """The ids of each document without special tokens, or what is wrong."""
    texts = [(document, True) for document in documents if isinstance(document, str)]
    found = _tokenised(model, texts)
    return [found[document, True] if isinstance(document, str) else document for document in documents]


def rolling_windows(tokens: Rows[int], start: int, most_tokens: int) -> list[PairIds]:
    """Windows in which each token of a document is scored once, behind as many of those before it as fit: up to
    `most_tokens` are computed of a window, the first of which begins with `start`. They are what lm-eval's
    `get_rolling_token_windows` with a context of 1 and `make_disjoint_window` give."""
    require(most_tokens >= 1, f"a window must have room for 1 token or more, got {most_tokens}")
    known, windows = [start, *tokens], list[PairIds]()
    for begin in range(0, len(tokens), most_tokens):
        end = min(begin + most_tokens, len(tokens))
        first = max(0, end - most_tokens)  # in `known`, of which each token has moved up by one
        windows.append(PairIds(prompt=known[first : begin + 1], target=tokens[begin:end]))
    return windows
