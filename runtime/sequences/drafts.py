"""Guesses the next tokens of sequences from known text: prompt lookup decoding (Saxena 2023).

If the last tokens of a sequence occurred before, the tokens after that occurrence are the guess, a **draft**. They are
searched in the sequence's own prompt and output, then in the outputs of other samples of its prompt, then in outputs
that finished earlier. Summaries, code, repetitive outputs and several samples of a prompt can often be guessed. A small
model can guess other texts (speculative decoding, Leviathan et al. 2023).

A pass computes a draft together with the sequence's last token. Drafted tokens count only as far as they are equal to
those that the sampler then chooses, so outputs do not depend on drafts.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from .sequence import Sequence as Running

Tokens: TypeAlias = NDArray[np.int32]

MAX_MATCH = 16  # tokens that are compared at most
MAX_FINISHED = 1 << 16  # tokens of finished outputs that are searched
PRIOR_SHARE = 0.6  # share of right tokens after right ones that is assumed at first
PRIOR_DRAFTS = 8  # weight of this assumption, as a number of drafts
TRIAL_DRAFTS = 32  # one draft of so many has all tokens
SEPARATOR = -1  # after each finished output; no token has this id
GUESSED_BY_MODEL = 2 * MAX_MATCH  # stands for the number of equal tokens in drafts of a model


def find_continuation(text: Tokens, suffix: Tokens) -> tuple[int, int]:
    """Finds the place in `text` whose preceding tokens equal most of the last tokens of `suffix`, `MAX_MATCH` at most.

    Returns its index and the number of equal tokens, (0, 0) if not even the last token occurs before another token. Of
    equally good places, returns the last.
    """
    lasts = np.flatnonzero(text[:-1] == suffix[-1])
    if not len(lasts):
        return 0, 0
    num_equal = 1
    while num_equal < min(MAX_MATCH, len(suffix)):
        longer = lasts[lasts >= num_equal]
        longer = longer[text[longer - num_equal] == suffix[-1 - num_equal]]
        if not len(longer):
            break
        lasts, num_equal = longer, num_equal + 1
    return int(lasts[-1]) + 1, num_equal


class Draft(NamedTuple):
    """Guessed tokens. `num_equal`: number of tokens before them that the text had in common with the sequence, or
    `GUESSED_BY_MODEL`."""

    tokens: Sequence[int] = ()
    num_equal: int = 0


NO_DRAFT = Draft()


class Guesser(Protocol):
    """A model that guesses tokens. `needs_hidden`: it uses hidden states of the model whose tokens it guesses."""

    needs_hidden: bool

    def guess(self, wanted: Sequence[tuple[Running, int]]) -> list[list[int]]:
        """Returns likely next tokens of each sequence, at most the given number."""
        ...

    def show_hidden(self, computed: Sequence[tuple[Running, int, torch.Tensor]]) -> None:
        """Takes the hidden states (T, D) of known tokens of sequences, from the given position on, after each pass."""
        ...

    def leave(self, sequence: Running) -> None:
        """Forgets a sequence."""
        ...


class Drafts:
    """Makes drafts of at most `max_tokens` tokens for the sequences of a session, and learns how often they are right.

    `token_cost`: seconds that a guessed token adds to a pass, relative to those of a pass per token. A token is guessed
    if it is right at least as often, judged by the drafts so far that had an equally long match. Depends on tokens
    only, not on time, so that a run can be repeated. `model` guesses where it is more often right than text,
    `model_cost`: like `token_cost`, with the time of the model.
    """

    def __init__(self, max_tokens: int, token_cost: float = 0.0, model: Guesser | None = None, model_cost: float = 0.0):
        self.max_tokens, self._token_cost = max_tokens, token_cost
        self._model, self._model_cost = model, model_cost
        # By length of the match in powers of two: the number of drafts, and for each of their tokens how often it was
        # guessed and was right.
        self._num_drafts = Counter[int]()
        self._num_guessed, self._num_right = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self._running = dict[str, dict[int, _Text]]()  # request id -> sample -> prompt and output
        self._finished = _Text()  # outputs

    def guess_all(self, wanted: Sequence[tuple[Running, int]], num_free: int) -> list[Draft]:
        """Returns a draft for each sequence, of at most the given number of tokens, and of `num_free` in total."""
        drafts = [self.guess(sequence, most) if most > 0 else NO_DRAFT for sequence, most in wanted]
        if self._model is not None:
            self._ask(self._model, wanted, drafts)
        for row, draft in enumerate(drafts):
            drafts[row] = draft._replace(tokens=draft.tokens[:num_free])
            num_free -= len(drafts[row].tokens)
        return drafts

    def _ask(self, model: Guesser, wanted: Sequence[tuple[Running, int]], drafts: list[Draft]) -> None:
        """Replaces drafts by those of the model, where more of their tokens are right on average."""
        asked = dict[int, int]()  # row -> number of tokens
        for row, (_, most) in enumerate(wanted):
            if (count := min(most, self.max_tokens)) > 0:
                expected = self._num_expected(drafts[row].num_equal, len(drafts[row].tokens))
                count = min(count, self._num_worthwhile(GUESSED_BY_MODEL, self._model_cost))
                if self._num_expected(GUESSED_BY_MODEL, count) > expected:
                    asked[row] = count
        guessed = model.guess([(wanted[row][0], count) for row, count in asked.items()]) if asked else []
        for row, tokens in zip(asked, guessed, strict=True):
            if tokens:
                drafts[row] = Draft(tokens, GUESSED_BY_MODEL)

    def guess(self, sequence: Running, max_tokens: int) -> Draft:
        """Returns at most `max_tokens` tokens that followed similar text; none if there is none, or it is rarely
        right."""
        max_tokens = min(max_tokens, self.max_tokens)
        if max_tokens < 1:
            return NO_DRAFT
        own = self._text(sequence)
        begin = max(0, len(sequence.request.prompt_ids) - MAX_MATCH)  # other samples have the same prompt
        others = [text.tokens[begin:] for text in self._running[sequence.request.id].values() if text is not own]
        best, most_equal = own.tokens[:0], 0
        for text in (own.tokens, *others, self._finished.tokens):
            place, num_equal = find_continuation(text, own.tokens)
            if num_equal > most_equal:
                best, most_equal = text[place : place + max_tokens], num_equal
        ends = np.flatnonzero(best == SEPARATOR)
        tokens = best[: ends[0] if len(ends) else None].tolist()
        return Draft(tokens[: self._num_worthwhile(most_equal, self._token_cost)], most_equal) if tokens else NO_DRAFT

    def _num_worthwhile(self, num_equal: int, token_cost: float) -> int:
        """Number of tokens that are right often enough. Sometimes more, to learn whether that has changed."""
        length = num_equal.bit_length()
        self._num_drafts[length] += 1
        if self._num_drafts[length] % TRIAL_DRAFTS == 0:
            return self.max_tokens
        for index in range(self.max_tokens):
            if self._right_share(length, index) < token_cost:
                return index
        return self.max_tokens

    def _right_share(self, length: int, index: int) -> float:
        """How often token number `index` of a draft is right."""
        num_right = self._num_right[length, index] + PRIOR_DRAFTS * PRIOR_SHARE ** (1 + index)
        return num_right / (self._num_guessed[length, index] + PRIOR_DRAFTS)

    def _num_expected(self, num_equal: int, count: int) -> float:
        """Number of right tokens in a draft of `count` tokens, on average."""
        return sum(self._right_share(num_equal.bit_length(), index) for index in range(count))

    def show_hidden(self, computed: Sequence[tuple[Running, int, torch.Tensor]]) -> None:
        """See `Guesser`."""
        assert self._model is not None, "only a model needs hidden states"
        self._model.show_hidden(computed)

    def learn(self, draft: Draft, num_right: int) -> None:
        """Counts a draft whose first `num_right` tokens were right."""
        length = draft.num_equal.bit_length()
        for index in range(len(draft.tokens)):
            self._num_guessed[length, index] += 1
            self._num_right[length, index] += index < num_right

    def leave(self, sequence: Running) -> None:
        """Forgets a sequence that is not running any more. The output of a finished one is kept for drafts of
        others."""
        if self._model is not None:
            self._model.leave(sequence)
        request = sequence.request
        if (samples := self._running.get(request.id)) is None or samples.pop(request.sample_index, None) is None:
            return
        if not samples:
            del self._running[request.id]
        if sequence.finish is not None:
            self._finished.append([*request.prompt_ids[-MAX_MATCH:], *sequence.generated, SEPARATOR])
            self._finished.drop_first(self._finished.length - MAX_FINISHED)

    def _text(self, sequence: Running) -> "_Text":
        """The prompt and output of a running sequence."""
        request = sequence.request
        samples = self._running.setdefault(request.id, {})
        if request.sample_index not in samples:
            samples[request.sample_index] = _Text()
            samples[request.sample_index].append(request.prompt_ids)
        text = samples[request.sample_index]
        text.append(sequence.generated[text.length - len(request.prompt_ids) :])
        return text


class _Text:
    """Token ids to which others are appended."""

    def __init__(self) -> None:
        self._buffer, self.length = np.empty(256, np.int32), 0

    @property
    def tokens(self) -> Tokens:
        return self._buffer[: self.length]

    def append(self, tokens: Sequence[int]) -> None:
        end = self.length + len(tokens)
        if end > len(self._buffer):
            grown = np.empty(2 * end, np.int32)
            grown[: self.length] = self.tokens
            self._buffer = grown
        self._buffer[self.length : end] = tokens
        self.length = end

    def drop_first(self, count: int) -> None:
        if count > 0:
            self._buffer[: self.length - count] = self.tokens[count:].copy()
            self.length -= count
