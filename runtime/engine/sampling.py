"""From logits to the next token of each sequence, with transformers' own processors and its own order of them.

Every sequence draws from a generator of its own, seeded by its request: the same tokens as
`generate(do_sample=True)` gives for that prompt alone under `torch.manual_seed` of the same seed.
"""

from collections.abc import Sequence as Rows

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..config import SamplingConfig, require
from ..model.loading import LoadedModel
from ..units import MIB
from .logprobs import token_logprobs
from .processors import Processors, no_history, process, warpers
from .sequence import FinishReason, Sequence
from .stopping import StopStrings
from .token_bans import bad_word_ids, require_known_tokens

BANS = (
    "bad_words", "bad_words_ids", "no_repeat_ngram_size", "sequence_bias", "min_length", "min_new_tokens",
    "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip
SLICE_BYTES = 4 * MIB  # of float32 logits processed at once: sorting and its like take several times as much


class Sampler:
    """One per run. `step` is called once per lane and pass with one row of logits per sequence.

    `start_token_id`: what a decoder behind an encoder begins with, None without one.
    Raises ConfigError where the settings ask for what this vocabulary or tokenizer cannot give.
    """

    def __init__(
        self,
        config: SamplingConfig,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        tokenizer: PreTrainedTokenizerBase | None = None,
        start_token_id: int | None = None,
        device: torch.device | None = None,
    ):
        require(
            not config.bad_words or tokenizer is not None, "sampling.bad_words needs a tokenizer; set model.tokenizer"
        )
        require(
            config.logprobs <= vocab_size, f"sampling.logprobs={config.logprobs} is above the vocabulary's {vocab_size}"
        )
        require_known_tokens(config, vocab_size)
        self._config = config
        self._eos = frozenset() if config.ignore_eos else eos_token_ids
        self._stops = StopStrings(tokenizer) if tokenizer is not None else None
        bad_words = bad_word_ids(config.bad_words, tokenizer, self._eos, vocab_size) if tokenizer is not None else []
        self._bans = [f"sampling.{key}" for key in BANS if getattr(config, key)]
        self._processors = Processors(config, self._eos, bad_words, start_token_id, device or torch.device("cpu"))

    def step(self, sequences: Rows[Sequence], logits_BV: torch.Tensor, step: int) -> None:
        """Appends a token to each sequence and marks those that are finished. Mutates the sequences.

        A row that nothing can be chosen for becomes an error row: argmax would hide it.
        """
        num_rows = max(1, SLICE_BYTES // (4 * logits_BV.shape[-1]))
        for start in range(0, len(sequences), num_rows):
            rows = slice(start, start + num_rows)
            self._step(sequences[rows], logits_BV[rows].float(), step)

    def _step(self, sequences: Rows[Sequence], logits_BV: torch.Tensor, step: int) -> None:
        scores_BV = self._processors(sequences, logits_BV)
        is_finite = logits_BV.abs().amax(-1) < torch.inf  # NaN is below nothing; five times as fast as isfinite
        is_open = is_finite if scores_BV is logits_BV else scores_BV.amax(-1) > -torch.inf
        tokens = self._choose(sequences, scores_BV)
        logprobs = token_logprobs(logits_BV, tokens, self._config.logprobs) if self._config.logprobs else None
        for row, (finite, open_) in enumerate(zip(is_finite.tolist(), is_open.tolist(), strict=True)):
            sequence = sequences[row]
            place = f"at new token {len(sequence.generated)} (pass {step})"
            if not finite:
                sequence.is_broken = True
                sequence.fail(f"the model gave NaN or infinite logits {place}")
            elif not open_:
                sequence.fail(f"no token is left {place}: {', '.join(self._bans)} ban them all")
            else:
                sequence.generated.append(tokens[row])
                sequence.logprobs += [logprobs[row]] if logprobs else []
                self._mark_finished(sequence)

    def _choose(self, sequences: Rows[Sequence], scores_BV: torch.Tensor) -> list[int]:
        """Rows of one temperature together; each row gets what it would get alone."""
        rows_of: dict[float, list[int]] = {}
        for row, sequence in enumerate(sequences):
            rows_of.setdefault(sequence.request.temperature, []).append(row)
        tokens = [0] * len(sequences)
        for temperature, rows in rows_of.items():
            part_BV = scores_BV if len(rows_of) == 1 else scores_BV[rows]
            chosen = self._draw([sequences[row] for row in rows], part_BV, temperature)
            for row, token in zip(rows, chosen, strict=True):
                tokens[row] = token
        return tokens

    def _draw(self, sequences: Rows[Sequence], scores_BV: torch.Tensor, temperature: float) -> list[int]:
        last = warpers(self._config, temperature)
        warped_BV = process(last, no_history(scores_BV), _choosable(scores_BV)) if last else scores_BV
        if temperature == 0:
            return warped_BV.argmax(-1).tolist()
        probabilities = torch.softmax(warped_BV, -1).nan_to_num_(1.0)  # error rows get any draw; it is discarded
        return [
            int(torch.multinomial(row, 1, generator=self._generator(sequence, row.device)))
            for sequence, row in zip(sequences, probabilities, strict=True)
        ]

    def _generator(self, sequence: Sequence, device: torch.device) -> torch.Generator:
        """Kept by the sequence, so that a request that is started afresh draws afresh."""
        if sequence.generator is None:
            sequence.generator = torch.Generator(device).manual_seed(sequence.request.seed(self._config.seed))
        return sequence.generator

    def _mark_finished(self, sequence: Sequence) -> None:
        if sequence.generated[-1] in self._eos:
            sequence.finish = FinishReason.eos
        elif self._hits_stop(sequence):
            sequence.finish = FinishReason.stop
        elif len(sequence.generated) >= sequence.request.max_new_tokens:
            sequence.finish = FinishReason.length

    def _hits_stop(self, sequence: Sequence) -> bool:
        if not sequence.request.stop:
            return False
        assert self._stops is not None, "stop strings need a tokenizer"
        sequence.text_end = self._stops.find(sequence.generated, sequence.request.stop)
        return sequence.text_end is not None


def _choosable(scores_BV: torch.Tensor) -> torch.Tensor:
    """Zeros in place of a row that has no largest score: it is an error row, and some warpers refuse all for one."""
    is_good_B1 = scores_BV.amax(-1, keepdim=True).isfinite()
    return scores_BV if is_good_B1.all() else torch.where(is_good_B1, scores_BV, 0.0)


def sampler_for(model: LoadedModel, config: SamplingConfig, device: torch.device) -> Sampler:
    return Sampler(
        config,
        vocab_size=model.shape.vocab_size,
        eos_token_ids=model.eos_token_ids,
        tokenizer=model.tokenizer,
        start_token_id=model.start_token_id,
        device=device,
    )
