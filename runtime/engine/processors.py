"""transformers' own logits processors, in the order of `GenerationMixin._get_logits_processor`, over rows of unequal
history.
"""

from collections.abc import Sequence as Rows

import torch
import torch.nn.functional as F
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..config import SamplingConfig, require
from .sequence import Sequence


class Processors:
    """What transformers applies with and without sampling: penalties and bans. The run's, the same for every row.

    `bad_words` are lists of token ids, from `bad_word_ids`.
    """

    def __init__(
        self,
        config: SamplingConfig,
        eos_token_ids: frozenset[int],
        bad_words: list[list[int]],
        start_token_id: int | None,
        device: torch.device,
    ):
        self._start_token_id = start_token_id
        self._by_history = LogitsProcessorList()
        if config.repetition_penalty != 1:
            self._by_history.append(RepetitionPenaltyLogitsProcessor(penalty=float(config.repetition_penalty)))
        if config.no_repeat_ngram_size:
            self._by_history.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
        if bad_words:
            self._by_history.append(NoBadWordsLogitsProcessor(bad_words))
        self._min_new_tokens = config.min_new_tokens if eos_token_ids else 0
        self._before_end = LogitsProcessorList()
        if self._min_new_tokens:
            eos = torch.tensor(sorted(eos_token_ids), device=device)
            self._before_end.append(MinNewTokensLengthLogitsProcessor(0, self._min_new_tokens, eos))

    def __call__(self, sequences: Rows[Sequence], logits_BV: torch.Tensor) -> torch.Tensor:
        """Scores, a tensor of their own where anything is applied: `logits_BV` is left as it is."""
        scores_BV = logits_BV
        if self._by_history:
            ids_BT = self._history(sequences, pad=logits_BV.shape[-1]).to(logits_BV.device)
            scores_BV = process(self._by_history, ids_BT, F.pad(scores_BV, (0, 1)))[:, :-1]  # the pad has a column too
        short_B1 = torch.tensor([[len(s.generated) < self._min_new_tokens] for s in sequences])
        if short_B1.any():
            endless_BV = process(self._before_end, no_history(scores_BV), scores_BV)
            scores_BV = torch.where(short_B1.to(scores_BV.device), endless_BV, scores_BV)
        return scores_BV

    def _history(self, sequences: Rows[Sequence], pad: int) -> torch.Tensor:
        """What each row's decoder has seen and generated, padded on the left with `pad`, which no row contains. Behind
        an encoder the prompt is not among it."""
        start = self._start_token_id
        rows = [[*(s.request.prompt_ids if start is None else (start,)), *s.generated] for s in sequences]
        width = max(map(len, rows))
        return torch.tensor([[pad] * (width - len(row)) + row for row in rows])


def warpers(config: SamplingConfig, temperature: float) -> LogitsProcessorList:
    """What transformers applies only when it samples. None of them looks at the history."""
    made = LogitsProcessorList()
    if temperature != 1:
        made.append(TemperatureLogitsWarper(float(temperature)))
    if config.top_k:
        made.append(TopKLogitsWarper(top_k=config.top_k))
    if config.top_p < 1:
        made.append(TopPLogitsWarper(top_p=float(config.top_p)))
    if config.min_p:
        made.append(MinPLogitsWarper(min_p=float(config.min_p)))
    return made


def no_history(scores_BV: torch.Tensor) -> torch.Tensor:
    """For processors that do not look at it, or only at its length."""
    return torch.empty(len(scores_BV), 0, dtype=torch.long, device=scores_BV.device)


def process(processors: LogitsProcessorList, ids_BT: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
    """transformers names the legacy types torch.LongTensor and FloatTensor, which no tensor's static type is."""
    return processors(ids_BT, scores_BV)  # pyright: ignore[reportArgumentType]


def bad_word_ids(
    words: Rows[str], tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int], vocab_size: int
) -> list[list[int]]:
    """Each word as the tokenizer spells it at the beginning of a text and after a space, special tokens left out:
    transformers' own advice for `bad_words_ids`. Another spelling of the same text in tokens is not banned.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word}"):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            require(bool(ids), f"sampling.bad_words: {word!r} has no tokens")
            require(max(ids) < vocab_size, f"sampling.bad_words: {word!r} has tokens outside the model's vocabulary")
            is_end = len(ids) == 1 and ids[0] in eos_token_ids
            require(not is_end, f"sampling.bad_words: {word!r} ends a completion; use sampling.ignore_eos=true")
            found[tuple(ids)] = None
    return [list(ids) for ids in found]
