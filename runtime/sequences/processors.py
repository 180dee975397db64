"""Applies transformers' logits processors to rows of unequal length, in the order of `_get_logits_processor`.

A row is the logits of one sequence. The history of a row is its token ids so far. transformers' processors expect
histories of equal length, so rows are padded, or grouped by length.
Shapes: B rows, R selected rows, T history length, V vocabulary."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows  # `Sequence` is a running request
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..attention.upload import upload
from ..config.sampling import MAX_NEW_TOKENS
from ..config.settings import SamplingConfig
from .sequence import Request, Sequence

NUM_PENALTIES = 256  # number of distinct repetition penalties for which processors are cached


@dataclass(frozen=True, kw_only=True)
class LengthStep:
    """A processor that depends only on the length of a row's history. `length` returns the length to pass to the
    processor for a row; None skips the row."""

    processor: LogitsProcessor
    length: Callable[[Sequence], int | None]

    def __call__(self, sequences: Rows[Sequence], scores_BV: torch.Tensor) -> torch.Tensor:
        rows_by_length: dict[int, list[int]] = {}
        for row, sequence in enumerate(sequences):
            if (length := self.length(sequence)) is not None:
                rows_by_length.setdefault(length, []).append(row)
        if not rows_by_length:
            return scores_BV
        out_BV = scores_BV.clone()
        for length, rows in rows_by_length.items():
            rows_R, processors = upload(rows, scores_BV.device), LogitsProcessorList([self.processor])
            out_BV[rows_R] = apply_processors(processors, dummy_history(len(rows), length), scores_BV[rows_R])
        return out_BV


class Processors:
    """The processors for penalties, banned tokens and forced tokens, which apply with and without sampling.
    `bad_words`: token ids of `config.bad_words`. All ids must be within the vocabulary."""

    def __init__(
        self,
        config: SamplingConfig,
        eos_token_ids: frozenset[int],
        bad_words: list[list[int]],
        start_token_id: int | None,
        device: torch.device,
    ):
        """`device`: the logits' device. Lookup tensors are created there before the first pass."""
        self._start_token_id = start_token_id
        self._device: Any = device  # transformers annotates it as a str
        eos = torch.tensor(sorted(eos_token_ids), device=device) if eos_token_ids else None
        self._history_steps = lru_cache(NUM_PENALTIES)(lambda value: _history_processors(config, bad_words, eos, value))
        self._run_penalty = config.repetition_penalty
        self._by_length = [*self._length_steps(config, eos)]

    def __call__(self, sequences: Rows[Sequence], logits_BV: torch.Tensor) -> torch.Tensor:
        """Returns processed scores. Never modifies `logits_BV`."""
        rows_by_penalty: dict[float | None, list[int]] = {}  # repetition penalty -> rows
        for row, sequence in enumerate(sequences):
            row_penalty = sequence.request.repetition_penalty
            rows_by_penalty.setdefault(self._run_penalty if row_penalty is None else row_penalty, []).append(row)
        if len(rows_by_penalty) == 1:
            [penalty] = rows_by_penalty
            scores_BV = self._apply_history_steps(sequences, logits_BV, penalty)
        else:
            scores_BV = logits_BV.clone()
            for penalty, rows in rows_by_penalty.items():
                rows_R = upload(rows, logits_BV.device)
                scores_BV[rows_R] = self._apply_history_steps(
                    [sequences[row] for row in rows], logits_BV[rows_R], penalty
                )
        for step in self._by_length:
            scores_BV = step(sequences, scores_BV)
        return scores_BV

    def _apply_history_steps(
        self, sequences: Rows[Sequence], logits_BV: torch.Tensor, penalty: float | None
    ) -> torch.Tensor:
        """Applies the processors that read token ids."""
        steps = self._history_steps(penalty)
        if not steps:
            return logits_BV
        # Left-pad the histories with an id that no row contains. With an encoder, histories exclude the prompt.
        start, pad = self._start_token_id, logits_BV.shape[-1]
        histories = [[*(s.request.prompt_ids if start is None else (start,)), *s.generated] for s in sequences]
        width = max(map(len, histories))
        ids_BT = upload([[pad] * (width - len(row)) + row for row in histories], logits_BV.device)
        return apply_processors(steps, ids_BT, F.pad(logits_BV, (0, 1)))[:, :-1]  # the added column is for the pad id

    def _length_steps(self, config: SamplingConfig, eos: torch.Tensor | None) -> Iterator[LengthStep]:
        """Yields the processors that depend only on lengths, in transformers' order."""
        min_length, min_new = config.min_length or 0, config.min_new_tokens or 0
        if eos is not None and min_length:
            yield LengthStep(
                processor=MinLengthLogitsProcessor(min_length, eos),
                length=lambda row: self._length(row) if self._length(row) < min_length and _can_end(row) else None,
            )
        if eos is not None:
            # The processor bans EOS below MAX_NEW_TOKENS new tokens, so always: `length` alone selects the rows.
            yield LengthStep(
                processor=MinNewTokensLengthLogitsProcessor(0, MAX_NEW_TOKENS, eos),
                length=lambda row: (
                    _num_new(row) if _num_new(row) < _min_new_tokens(row, min_new) and _can_end(row) else None
                ),
            )
        has_forced_bos = config.forced_bos_token_id is not None
        if config.forced_bos_token_id is not None:
            yield LengthStep(
                processor=ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id),
                length=lambda row: 1 if self._length(row) == 1 else None,
            )
        if config.forced_eos_token_id is not None:
            yield LengthStep(
                # The processor with 1 forces EOS in rows of length 0: `length` is 0 if the next token is the last one.
                processor=ForcedEOSTokenLogitsProcessor(1, config.forced_eos_token_id, self._device),
                length=lambda row: 0 if _num_new(row) == row.request.max_new_tokens - 1 else None,
            )
        if eos is not None and config.exponential_decay_length_penalty is not None:
            # The bonus of EOS grows with each new token.
            begin, factor = int(config.exponential_decay_length_penalty[0]), config.exponential_decay_length_penalty[1]
            yield LengthStep(
                processor=ExponentialDecayLengthPenalty((begin, factor), eos, 0),
                length=lambda row: _num_new(row) if _num_new(row) > begin and _can_end(row) else None,
            )
        if config.suppress_tokens:
            yield LengthStep(
                processor=SuppressTokensLogitsProcessor(config.suppress_tokens, self._device), length=lambda _: 0
            )
        if config.begin_suppress_tokens:
            yield LengthStep(
                processor=SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, 0, self._device),
                length=lambda row: 0 if _num_new(row) == self._num_forced(row, has_forced_bos) else None,
            )

    def _num_forced(self, row: Sequence, has_forced_bos: bool) -> int:
        """Number of new tokens before the first sampled one: 1 if `forced_bos_token_id` applies to the row, else 0."""
        num_start_tokens = self._length(row) - _num_new(row)
        return int(has_forced_bos and num_start_tokens == 1)  # BOS is forced only as the second token of a history

    def _length(self, row: Sequence) -> int:
        """The history's length in `generate`: prompt and new tokens; with an encoder, start token and new tokens."""
        return row.num_known if self._start_token_id is None else 1 + _num_new(row)


def _num_new(row: Sequence) -> int:
    return len(row.generated)


def _can_end(row: Sequence) -> bool:
    return not row.request.ignore_eos


def _min_new_tokens(row: Sequence, run_setting: int) -> int:
    row_setting = row.request.min_new_tokens
    return run_setting if row_setting is None else row_setting


def _history_processors(
    config: SamplingConfig, bad_words: list[list[int]], eos: torch.Tensor | None, penalty: float | None
) -> LogitsProcessorList:
    """Makes the processors that read token ids. `penalty`: the repetition penalty."""
    processors = LogitsProcessorList()
    if config.sequence_bias:
        processors.append(SequenceBiasLogitsProcessor(config.sequence_bias))
    if penalty not in (None, 1):
        processors.append(RepetitionPenaltyLogitsProcessor(penalty=float(penalty)))
    if config.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if banned := [*bad_words, *(config.bad_words_ids or [])]:
        processors.append(NoBadWordsLogitsProcessor(banned, eos))
    return processors


def warpers(config: SamplingConfig, request: Request) -> LogitsProcessorList:
    """Makes a request's warpers, the processors for sampling such as temperature and top-p. transformers applies them
    last; they ignore the history. For greedy decoding there is only the normalization."""
    processors = LogitsProcessorList()
    if request.temperature != 0:
        processors.extend(_sampling_warpers(config, request))
    if config.renormalize_logits:
        processors.append(LogitNormalization())
    return processors


def _sampling_warpers(config: SamplingConfig, request: Request) -> Iterator[LogitsProcessor]:
    top_k = config.top_k if request.top_k is None else request.top_k
    top_p = config.top_p if request.top_p is None else request.top_p
    min_p = config.min_p if request.min_p is None else request.min_p
    if request.temperature != 1:
        yield TemperatureLogitsWarper(float(request.temperature))
    if config.top_h is not None:
        yield TopHLogitsWarper(top_h=config.top_h)
    if top_k:
        yield TopKLogitsWarper(top_k=top_k)
    if top_p is not None and top_p < 1:
        yield TopPLogitsWarper(top_p=float(top_p))
    if min_p:
        yield MinPLogitsWarper(min_p=float(min_p))
    if config.typical_p is not None and config.typical_p < 1:
        yield TypicalLogitsWarper(mass=config.typical_p)
    if config.epsilon_cutoff:
        yield EpsilonLogitsWarper(epsilon=config.epsilon_cutoff)
    if config.eta_cutoff:
        yield EtaLogitsWarper(epsilon=config.eta_cutoff)


def empty_history(scores_BV: torch.Tensor) -> torch.Tensor:
    """Placeholder token ids, for processors that ignore the history."""
    return dummy_history(len(scores_BV), 0)


def dummy_history(num_rows: int, length: int) -> torch.Tensor:
    """Placeholder token ids of a given length, for processors that use only the length."""
    return torch.zeros(1, 1, dtype=torch.long).expand(num_rows, length) if length else torch.zeros(num_rows, 0).long()


def apply_processors(processors: LogitsProcessorList, ids_BT: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
    """Calls the processors. A separate function, since transformers annotates the legacy types LongTensor and
    FloatTensor, which type checkers reject here."""
    return processors(ids_BT, scores_BV)  # pyright: ignore[reportArgumentType]
