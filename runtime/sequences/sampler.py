"""Samples the next token of each sequence, with transformers' logits processors in transformers' order.

Each sequence has its own seeded random generator. It gets the tokens of `generate(do_sample=True)` with this prompt
alone and this seed. Shapes: B rows (sequences), R selected rows, V vocabulary, W mask words of 32 tokens."""

from collections.abc import Sequence as Rows  # `Sequence` is a running request

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..attention.upload import upload
from ..config.sampling import STRUCTURES
from ..config.settings import SamplingConfig, require
from ..model.loading import LoadedModel
from ..units import MIB
from .beam_search import BeamSearch
from .beams import BeamRules
from .detokenizer import Detokenizer, StopStrings
from .grammar import Grammars, llguidance_tokenizer, summarize_error
from .guide import apply_masks
from .processors import Processors, apply_processors, empty_history, warpers
from .reasoning import make_reasoning
from .sequence import FinishReason, Sequence, pack_logprobs, packed_width, unpack_logprobs


def require_known_tokens(config: SamplingConfig, vocab_size: int) -> None:
    """Raises ConfigError if a setting names a token id outside the vocabulary."""
    ends = config.forced_eos_token_id
    lists: dict[str, Rows[int]] = {
        "suppress_tokens": config.suppress_tokens or [],
        "begin_suppress_tokens": config.begin_suppress_tokens or [],
        "forced_bos_token_id": [] if config.forced_bos_token_id is None else [config.forced_bos_token_id],
        "forced_eos_token_id": [ends] if isinstance(ends, int) else ends or [],
        "bad_words_ids": [token for word in config.bad_words_ids or [] for token in word],
        "sequence_bias": [
            token for pair in config.sequence_bias or [] for part in pair if isinstance(part, list) for token in part
        ],
    }
    known = f"the model's vocabulary of {vocab_size:,} (0 to {vocab_size - 1:,})"
    for key, tokens in lists.items():
        for token in tokens:
            require(0 <= token < vocab_size, f"sampling.{key}: token id {token} is outside {known}")


def bad_word_ids(
    words: Rows[str], tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int], vocab_size: int
) -> list[list[int]]:
    """Tokenizes each word as at the beginning of a text, and as after a space, as transformers recommends for
    `bad_words_ids`. Other tokenizations of the same text are not banned."""
    banned: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word}"):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            require(bool(ids), f"sampling.bad_words: {word!r} has no tokens")
            require(max(ids) < vocab_size, f"sampling.bad_words: {word!r} has tokens outside the model's vocabulary")
            is_end = len(ids) == 1 and ids[0] in eos_token_ids
            require(not is_end, f"sampling.bad_words: {word!r} is an EOS token; to ignore it: sampling.ignore_eos=true")
            banned[tuple(ids)] = None
    return [list(ids) for ids in banned]


BAN_SETTINGS = (  # settings that can ban tokens
    "bad_words", "bad_words_ids", "no_repeat_ngram_size", "sequence_bias", "min_length", "min_new_tokens",
    "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip
STATUS_WIDTH = 3  # columns: token id, whether the logits are finite, whether some token is allowed
SLICE_BYTES = 4 * MIB  # float32 logits that are processed at once; sorting them takes several times this memory


class Sampler:
    """The sampler for all lanes (micro-batches) of a run. For each lane and pass, `sample` must be called once, then
    `accept` with its result in host memory. Neither waits for a device. `start_token_id`: decoder start token of an
    encoder-decoder, else None. Raises ConfigError if the vocabulary or tokenizer does not support the settings."""

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
        can_encode = tokenizer is not None or not config.bad_words
        require(can_encode, "sampling.bad_words needs a tokenizer; set model.tokenizer")
        is_within = config.logprobs <= vocab_size
        require(is_within, f"sampling.logprobs={config.logprobs} is above the vocabulary's {vocab_size}")
        require_known_tokens(config, vocab_size)
        self._config = config
        self._eos = frozenset() if config.ignore_eos else eos_token_ids
        self._stops = StopStrings(Detokenizer(tokenizer, start_token_id)) if tokenizer is not None else None
        self.reasoning = make_reasoning(config, tokenizer, start_token_id)
        bad_words = bad_word_ids(config.bad_words, tokenizer, self._eos, vocab_size) if tokenizer is not None else []
        self._bans = [f"sampling.{key}" for key in BAN_SETTINGS if getattr(config, key)]
        if any(getattr(config, key) is not None for key in STRUCTURES):
            llguidance_tokenizer(tokenizer, vocab_size, self._eos)
        self._grammars = Grammars(tokenizer, vocab_size, self._eos, self.reasoning)
        self._processors = Processors(config, self._eos, bad_words, start_token_id, device or torch.device("cpu"))
        self._beam_search = BeamSearch(
            BeamRules(
                num_beams=config.num_beams or 1,
                length_penalty=1.0 if config.length_penalty is None else config.length_penalty,
                early_stopping=config.early_stopping or False,
                num_ends=len(self._eos),
            ),
            process_logprobs=self._beam_scores,
            find_end=self._beam_end,
            vocab_size=vocab_size,
            num_top=config.logprobs,
            bans=self._bans,
        )

    def sample(self, sequences: Rows[Sequence], logits_BV: torch.Tensor) -> torch.Tensor:
        """Samples one token per row of logits, and advances the random generators. Returns int32 (B, row_width) on the
        logits' device, for `accept`."""
        if _is_beam_search(sequences):
            return self._beam_search.sample(sequences, logits_BV, SLICE_BYTES)
        num_rows = max(1, SLICE_BYTES // (4 * logits_BV.shape[-1]))
        slices = [slice(start, start + num_rows) for start in range(0, len(sequences), num_rows)]
        masks_BW = self._grammars.masks(sequences)
        if masks_BW is not None and logits_BV.device.type != "cpu":
            masks_BW = masks_BW.pin_memory().to(logits_BV.device, non_blocking=True)
        parts = [
            self._sample_rows(
                sequences[rows], logits_BV[rows].float(), masks_BW[rows] if masks_BW is not None else None
            )
            for rows in slices
        ]
        return torch.cat(parts) if parts else logits_BV.new_empty(0, self.row_width, dtype=torch.int32)

    def expect(self, sequences: Rows[Sequence]) -> None:
        """Updates grammar guides as `sample` does. Called instead of `sample` if another rank samples."""
        self._grammars.masks(sequences)

    def accept(self, sequences: Rows[Sequence], drawn: torch.Tensor, step: int) -> None:
        """Appends the sampled tokens, and marks finished sequences. A sequence with non-finite logits or without an
        allowed token fails. `drawn`: result of `sample`, in host memory. `step`: number of the pass, for messages."""
        if _is_beam_search(sequences):
            self._beam_search.accept(sequences, drawn, step)
            return
        logprobs = unpack_logprobs(drawn[:, STATUS_WIDTH:]) if self._config.logprobs else None
        for row, (token, is_finite, has_allowed) in enumerate(drawn[:, :STATUS_WIDTH].tolist()):
            sequence = sequences[row]
            position = f"at new token {len(sequence.generated)} (pass {step})"
            guide_error = sequence.guide.error if sequence.guide is not None else None
            if guide_error is not None:
                sequence.fail(f"its grammar cannot be followed {position}: {summarize_error(guide_error)}")
            elif not is_finite:
                sequence.is_broken = True
                sequence.fail(f"the model gave NaN or infinite logits {position}")
            elif not has_allowed:
                bans = [*self._bans, *(["its grammar"] if sequence.request.grammar is not None else [])]
                sequence.fail(f"every token is banned {position} by {', '.join(bans)}")
            else:
                sequence.generated.append(token)
                sequence.logprobs += [logprobs[row]] if logprobs else []
                if token in self._eos and not sequence.request.ignore_eos:
                    sequence.finish = FinishReason.eos
                elif self._hits_stop(sequence):
                    sequence.finish = FinishReason.stop
                elif len(sequence.generated) >= sequence.request.max_new_tokens:
                    sequence.finish = FinishReason.length
        self._grammars.start_masks([sequence for sequence in sequences if sequence.finish is None])

    def _beam_scores(self, sequences: Rows[Sequence], logprobs_BV: torch.Tensor) -> torch.Tensor:
        scores_BV, final_warpers = self._processors(sequences, logprobs_BV), warpers(self._config, sequences[0].request)
        return apply_processors(final_warpers, empty_history(scores_BV), scores_BV) if final_warpers else scores_BV

    def _beam_end(self, beam: Sequence, token_ids: Rows[int]) -> tuple[FinishReason, int | None] | None:
        if token_ids[-1] in self._eos:
            return FinishReason.eos, None
        if beam.request.stop:
            assert self._stops is not None, "stop strings need a tokenizer"
            if (text_end := self._stops.find(beam.request, token_ids)) is not None:
                return FinishReason.stop, text_end
        return (FinishReason.length, None) if len(token_ids) >= beam.request.max_new_tokens else None

    @property
    def num_top(self) -> int:
        """Number of top log-probabilities per token."""
        return self._config.logprobs

    @property
    def row_width(self) -> int:
        """Number of int32 values that `sample` returns per row."""
        num_top = self._config.logprobs
        return STATUS_WIDTH + (packed_width(num_top) if num_top else 0)

    def _sample_rows(
        self, sequences: Rows[Sequence], logits_BV: torch.Tensor, masks_BW: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns token, flags and log-probabilities of each row, packed. `masks_BW`: bits of allowed tokens; None
        allows all. Masks are applied between processors and warpers, where transformers applies custom processors."""
        scores_BV = self._processors(sequences, logits_BV)
        if masks_BW is not None:
            scores_BV = apply_masks(scores_BV, masks_BW)
        is_finite_B = logits_BV.abs().amax(-1) < torch.inf  # False for NaN; 5x as fast as isfinite
        has_allowed_B = is_finite_B if scores_BV is logits_BV else scores_BV.amax(-1) > -torch.inf
        # Rows with equal temperature, top-k, top-p and min-p are sampled together. Each gets the token that it would
        # get alone.
        rows_by_key: dict[tuple[float | None, ...], list[int]] = {}
        for row, sequence in enumerate(sequences):
            rows_by_key.setdefault(sequence.request.sampling_key, []).append(row)
        if len(rows_by_key) == 1:
            tokens_B = self._choose_tokens(sequences, scores_BV)
        else:
            tokens_B = torch.zeros_like(scores_BV[:, 0], dtype=torch.int64)
            for rows in rows_by_key.values():
                rows_R = upload(rows, scores_BV.device)
                tokens_B[rows_R] = self._choose_tokens([sequences[row] for row in rows], scores_BV[rows_R])
        numbers_B3 = torch.stack([tokens_B.int(), is_finite_B.int(), has_allowed_B.int()], 1)
        if not self._config.logprobs:
            return numbers_B3
        return torch.cat([numbers_B3, pack_logprobs(logits_BV, tokens_B, self._config.logprobs)], 1)

    def _choose_tokens(self, sequences: Rows[Sequence], scores_BV: torch.Tensor) -> torch.Tensor:
        """Samples tokens for rows with equal temperature, top-k, top-p and min-p."""
        request = sequences[0].request
        if last := warpers(self._config, request):
            if self._config.top_h is not None or self._config.eta_cutoff:
                # These warpers would raise for all rows if one is not finite. Such a row fails later, in `accept`.
                scores_BV = torch.where(scores_BV.amax(-1, keepdim=True).isfinite(), scores_BV, 0.0)
            scores_BV = apply_processors(last, empty_history(scores_BV), scores_BV)
        if request.temperature == 0:
            return scores_BV.argmax(-1)
        probabilities_BV = torch.softmax(scores_BV, -1).nan_to_num_(1.0)  # NaN: the sequence fails in `accept`
        # Dividing by exponential noise and taking the largest is what torch.multinomial does, bit by bit. But
        # multinomial also validates the probabilities, for which the host would wait for the device.
        noise_BV = torch.empty_like(probabilities_BV)
        for sequence, row in zip(sequences, noise_BV, strict=True):
            if sequence.generator is None:  # one generator per sequence, so that a restarted request repeats its draws
                sequence.generator = torch.Generator(row.device).manual_seed(sequence.request.seed(self._config.seed))
            row.exponential_(1, generator=sequence.generator)
        return probabilities_BV.div_(noise_BV).argmax(-1)

    def _hits_stop(self, sequence: Sequence) -> bool:
        """True if a stop string ends in the last token. Stop strings in reasoning do not count. Sets the sequence's
        `text_end`."""
        if not sequence.request.stop:
            return False
        assert self._stops is not None, "stop strings need a tokenizer"
        ids, begin, num_new = sequence.generated, 0, 1
        if self.reasoning is not None:
            answer = self.reasoning.find_answer(sequence)
            if answer is not None:
                begin = answer.num_tokens
            elif self.reasoning.is_thinking(sequence) is not False:
                sequence.num_unchecked = len(ids)
                return False
            num_new += sequence.num_unchecked if answer is None else 0
            sequence.num_unchecked = 0
        sequence.text_end = self._stops.find(sequence.request, ids, begin=begin, num_new=num_new)
        return sequence.text_end is not None


def _is_beam_search(sequences: Rows[Sequence]) -> bool:
    return bool(sequences) and sequences[0].request.num_beams > 1


def make_sampler(model: LoadedModel, config: SamplingConfig, device: torch.device) -> Sampler:
    return Sampler(
        config,
        vocab_size=model.shape.vocab_size,
        eos_token_ids=model.eos_token_ids,
        tokenizer=model.tokenizer,
        start_token_id=model.start_token_id,
        device=device,
    )
