"""From logits to the next token of each sequence, with transformers' own processors and its own order of them.

Every sequence draws from a generator of its own, seeded by its request: the same tokens as
`generate(do_sample=True)` gives for that prompt alone under `torch.manual_seed` of the same seed.
"""

from collections.abc import Sequence as Rows

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..config import SamplingConfig
from .sequence import FinishReason, Sequence

STOP_WINDOW_TOKENS = 8  # decoded again around a stop string's possible straddle; grows with the longest stop string


class Sampler:
    """One per run. `step` is called once per lane and pass with one row of logits per sequence."""

    def __init__(
        self, config: SamplingConfig, eos_token_ids: frozenset[int], tokenizer: PreTrainedTokenizerBase | None
    ):
        self._config = config
        self._eos = frozenset() if config.ignore_eos else eos_token_ids
        self._tokenizer = tokenizer
        self._row_processors = LogitsProcessorList()
        if config.repetition_penalty != 1:
            self._row_processors.append(RepetitionPenaltyLogitsProcessor(penalty=config.repetition_penalty))
        self._warpers = _warpers(config)

    def step(self, sequences: Rows[Sequence], logits_BV: torch.Tensor, step: int) -> None:
        """Appends a token to each sequence and marks those that are finished. Mutates the sequences.

        A row whose logits are not all finite becomes an error row: argmax would hide it.
        """
        logits_BV = logits_BV.float()
        is_finite = torch.isfinite(logits_BV).all(-1).tolist()
        tokens = self._choose(sequences, logits_BV)
        for sequence, token, finite in zip(sequences, tokens, is_finite, strict=True):
            if not finite:
                sequence.finish = FinishReason.error
                sequence.error = (
                    f"the model gave NaN or infinite logits at new token {len(sequence.generated)} (pass {step})"
                )
            else:
                sequence.generated.append(token)
                self._mark_finished(sequence, token)

    def _choose(self, sequences: Rows[Sequence], logits_BV: torch.Tensor) -> list[int]:
        if self._row_processors:
            logits_BV = torch.cat([self._penalised(s, row[None]) for s, row in zip(sequences, logits_BV, strict=True)])
        if self._config.is_greedy:
            return logits_BV.argmax(-1).tolist()
        ids = torch.empty(len(sequences), 0, dtype=torch.long, device=logits_BV.device)  # no warper looks at them
        probabilities = torch.softmax(_process(self._warpers, ids, logits_BV), -1)
        # error rows get any draw; it is discarded
        probabilities = torch.where(torch.isfinite(probabilities), probabilities, 1.0)
        return [
            int(torch.multinomial(row, 1, generator=self._generator(sequence, row.device)))
            for sequence, row in zip(sequences, probabilities, strict=True)
        ]

    def _penalised(self, sequence: Sequence, logits_1V: torch.Tensor) -> torch.Tensor:
        ids = torch.tensor([[*sequence.request.prompt_ids, *sequence.generated]], device=logits_1V.device)
        return _process(self._row_processors, ids, logits_1V)

    def _generator(self, sequence: Sequence, device: torch.device) -> torch.Generator:
        """Kept by the sequence, so that a request that is started afresh draws afresh."""
        if sequence.generator is None:
            sequence.generator = torch.Generator(device).manual_seed(sequence.request.seed(self._config.seed))
        return sequence.generator

    def _mark_finished(self, sequence: Sequence, token: int) -> None:
        if token in self._eos:
            sequence.finish = FinishReason.eos
        elif self._config.stop and self._hits_stop(sequence):
            sequence.finish = FinishReason.stop
        elif len(sequence.generated) >= sequence.request.max_new_tokens:
            sequence.finish = FinishReason.length

    def _hits_stop(self, sequence: Sequence) -> bool:
        """Looks at the text of the last tokens first; the whole text is decoded only when a stop string is in it."""
        assert self._tokenizer is not None, "stop strings need a tokenizer"
        window = STOP_WINDOW_TOKENS + max(map(len, self._config.stop))
        tail = decode_text(self._tokenizer, sequence.generated[-window:])
        if not any(stop in tail for stop in self._config.stop):
            return False
        text = decode_text(self._tokenizer, sequence.generated)
        places = [place for stop in self._config.stop if (place := text.find(stop)) >= 0]
        sequence.text_end = min(places, default=None)
        return bool(places)


def _process(processors: LogitsProcessorList, ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
    """transformers names the legacy types torch.LongTensor and FloatTensor, which no tensor's static type is."""
    return processors(ids_BT, logits_BV)  # pyright: ignore[reportArgumentType]


def decode_text(tokenizer: PreTrainedTokenizerBase, token_ids: Rows[int]) -> str:
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    assert isinstance(text, str), "one list of ids gives one text"
    return text


def _warpers(config: SamplingConfig) -> LogitsProcessorList:
    """In the order of `GenerationMixin._get_logits_processor`."""
    warpers = LogitsProcessorList()
    if config.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        warpers.append(TopKLogitsWarper(top_k=config.top_k))
    if config.top_p < 1:
        warpers.append(TopPLogitsWarper(top_p=config.top_p))
    if config.min_p:
        warpers.append(MinPLogitsWarper(min_p=config.min_p))
    return warpers
