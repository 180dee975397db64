"""Requests, running sequences, completions, and the state from which a sequence can be resumed.

Log-probabilities are the log-softmax in float32 of the head's raw logits (`output_logits` in transformers), before
logits processors, temperature, top-k and top-p. Shapes: B rows (sequences), V vocabulary."""

import hashlib
import logging
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..cache.pages import SharedPages
from ..config.settings import Pooling
from ..plan.placement.memory import SequenceSize
from .beams import BeamState
from .guide import Guide

log = logging.getLogger(__name__)
Vector: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probability of one generated token, and the most likely tokens at its position in descending order."""

    own: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


def pack_logprobs(logits_BV: torch.Tensor, tokens_B: torch.Tensor, num_top: int) -> torch.Tensor:
    """Packs log-probabilities into int32 (B, packed_width(num_top)), for a single copy to the host. The columns are:
    that of the row's token, ids of the top tokens, log-probabilities of the top tokens. `logits_BV` must be float32.
    Inverse: `unpack_logprobs`."""
    logprobs_BV = torch.log_softmax(logits_BV, -1)
    own_B1 = logprobs_BV.gather(-1, tokens_B[:, None])
    top = logprobs_BV.topk(num_top, -1)
    return torch.cat([own_B1.view(torch.int32), top.indices.int(), top.values.view(torch.int32)], 1)


def packed_width(num_top: int) -> int:
    """Number of columns that `pack_logprobs` returns."""
    return 1 + 2 * num_top


def unpack_logprobs(numbers: torch.Tensor) -> list[TokenLogprobs]:
    """Unpacks one `TokenLogprobs` per row."""
    num_top = numbers.shape[1] // 2
    values = numbers.contiguous().view(torch.float32)
    own, top_ids, top = values[:, 0], numbers[:, 1 : 1 + num_top], values[:, 1 + num_top :]
    return [
        TokenLogprobs(own=o, top_ids=tuple(ids), top=tuple(likely))
        for o, ids, likely in zip(own.tolist(), top_ids.tolist(), top.tolist(), strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class TokenScore(TokenLogprobs):
    """Log-probability of a target token, the top tokens at its position if requested, and the most likely token
    (`greedy_id`)."""

    greedy_id: int


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """The target tokens of a scoring request. They are scored with the logits of the last `num_positions` input tokens:
    each scores the input token after it, and the last one scores each of `last_ids`. Inputs are the request's prompt
    ids; for an encoder-decoder, the decoder's start token and `decoder_ids`."""

    num_positions: int
    last_ids: tuple[int, ...]
    decoder_ids: tuple[int, ...] | None = None  # None without an encoder

    @property
    def num_scores(self) -> int:
        return self.num_positions - 1 + len(self.last_ids)

    def positions_of(self, part: "Scoring") -> list[int]:
        """Indices of the scores of `part`, which was merged into this scoring."""
        num_before = self.num_positions - 1
        lasts = [num_before + self.last_ids.index(token) for token in part.last_ids]
        return [*range(self.num_positions - part.num_positions, num_before), *lasts]


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """What is computed from a prompt without generating: a vector pooled from the last `num_read` hidden states, class
    logits (`has_classes`), or the `num_top` most likely tokens at the positions `masked`."""

    num_read: int
    pooling: Pooling = Pooling.last
    normalize: bool = False
    has_classes: bool = False
    masked: tuple[int, ...] = ()
    num_top: int = 0


class FinishReason(Enum):
    length = "length"
    eos = "eos"
    stop = "stop"
    error = "error"


@dataclass(frozen=True, kw_only=True)
class BeamTrace:
    """A finished beam of a beam search. `text_end`: length of its text before a stop string."""

    token_ids: tuple[int, ...]
    finish: FinishReason
    text_end: int | None
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt with its sampling options. `prompt_ids` must not be empty. `key` (`id`, `sample_index`) is unique in a
    run.

    `temperature` 0 is greedy. A sampling option of None means the run's setting. `own_seed`: the request's seed; None
    derives one from the run's seed and `key`. `grammar`: in llguidance's format. `stops_begin_in_prompt`: a stop string
    may begin in the prompt, as in transformers.

    A request with `scoring` or `encoding` generates nothing. Its `max_new_tokens` is 1, since its result comes with the
    last prefill pass. If `num_beams` is above 1, so many requests with the same id are the beams of one search; only
    those with `is_returned` produce completions."""

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    stop: tuple[str, ...] = ()
    sample_index: int = 0
    own_seed: int | None = None
    scoring: Scoring | None = None
    encoding: Encoding | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    ignore_eos: bool = False
    grammar: str | None = None
    stops_begin_in_prompt: bool = True
    num_beams: int = 1
    is_returned: bool = True

    @property
    def sampling_key(self) -> tuple[float | None, ...]:
        """The options that sequences sampled together must have in common."""
        return self.temperature, self.top_p, self.top_k, self.min_p

    @property
    def key(self) -> tuple[str, int]:
        return self.id, self.sample_index

    @property
    def size(self) -> SequenceSize:
        """Token counts for planning."""
        return SequenceSize.interned(
            len(self.prompt_ids), self.max_new_tokens, self.num_scored, num_beams=self.num_beams
        )

    @property
    def decoder_ids(self) -> tuple[int, ...]:
        """Decoder input after the start token, for scoring with an encoder-decoder."""
        return (self.scoring.decoder_ids or ()) if self.scoring is not None else ()

    @property
    def target_ids(self) -> tuple[int, ...]:
        """The scored tokens of a request that was not merged with others."""
        if self.scoring is None:
            return ()
        known = self.prompt_ids if self.scoring.decoder_ids is None else self.scoring.decoder_ids
        return *known[len(known) - self.scoring.num_positions + 1 :], *self.scoring.last_ids

    @property
    def num_scored(self) -> int:
        """Number of positions that are scored or pooled."""
        if self.encoding is not None:
            return self.encoding.num_read
        return self.scoring.num_positions if self.scoring is not None else 0

    @property
    def num_scores(self) -> int:
        """Number of scores that the request gets."""
        if self.encoding is not None:
            return len(self.encoding.masked)
        return self.scoring.num_scores if self.scoring is not None else 0

    @property
    def generates(self) -> bool:
        return self.scoring is None and self.encoding is None

    def seed(self, run_seed: int) -> int:
        """The seed of this sample, independent of batching and restarts. Sample 0 uses `own_seed` unchanged."""
        if self.own_seed is not None:
            return self.own_seed if not self.sample_index else _hash_seed(f"{self.own_seed}\0{self.sample_index}")
        return _hash_seed(f"{run_seed}\0{self.id}\0{self.sample_index}")


def _hash_seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little") >> 1


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Where the answer starts after reasoning. `num_tokens`: number of tokens before it, including the end tag. `rest`:
    text after the tag in the last of these tokens, which is part of the answer."""

    num_tokens: int
    rest: str = ""


@dataclass(kw_only=True)
class Sequence:
    """A running request, in one lane (micro-batch). Known tokens are those of the prompt and the generated ones;
    `num_cached` is the number of known tokens with KV in the cache."""

    request: Request
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per generated token, if requested
    scores: list[TokenScore] = field(default_factory=list)  # one per target token, in order
    vector: Vector | None = None  # the sum of what prefill chunks contributed so far
    num_cached: int = 0
    finish: FinishReason | None = None
    error: str | None = None
    text_end: int | None = None  # offset of the stop string in the text, or in the answer if there is reasoning
    answer: Answer | None = None  # set once reasoning has ended
    num_scanned: int = 0  # tokens scanned for the end of reasoning
    is_thinking: bool = False  # the completion began with reasoning, or the prompt ended with its tag
    num_unchecked: int = 0  # tokens not yet searched for stop strings: they may be reasoning
    generator: torch.Generator | None = None  # created at the first draw
    guide: Guide | None = None  # the grammar's state, created where the grammar begins
    is_broken: bool = False  # the model gave NaN or infinite values
    fills_prefix: SharedPages | None = None  # set if this sequence only computes a prefix that others share
    parent_prefix: SharedPages | None = None  # KV pages of a prefix that this sequence shares with others
    search: BeamState[BeamTrace] | None = None  # set on the first beam, once the search has begun
    source: "Sequence | None" = None  # the beam to copy keys and values from; cleared by the lane
    beam_score: float | None = None  # set on a finished beam

    @property
    def num_known(self) -> int:
        return len(self.request.prompt_ids) + len(self.generated)

    @property
    def known_size(self) -> SequenceSize:
        """The size of a request with all known tokens as its prompt, and the remaining new tokens."""
        num_left = self.request.max_new_tokens - len(self.generated)
        return SequenceSize.interned(
            self.num_known, num_left, self.request.num_scored, num_beams=self.request.num_beams
        )

    @property
    def known_ids(self) -> list[int]:
        return [*self.request.prompt_ids, *self.generated]

    @property
    def is_prefilled(self) -> bool:
        """True if all known tokens except the last one, a generated token, have KV in the cache."""
        return bool(self.generated) and self.num_cached == self.num_known - 1

    @property
    def is_filled(self) -> bool:
        """True if this sequence computes a shared prefix and has finished it."""
        return self.fills_prefix is not None and self.num_cached == self.num_known

    def num_selected(self, new: int) -> int:
        """Number of tokens among the next `new` that need logits or hidden states: the last known token if the request
        generates, else the scored or pooled positions. Must equal `SequenceSize.num_selected`, which plans use."""
        if self.fills_prefix is not None:
            return 0
        if self.request.generates:
            return int(new > 0 and self.num_cached + new == self.num_known)
        return len(self.target_tokens(self.num_cached, new))

    def target_tokens(self, past: int, new: int) -> list[tuple[int, ...]]:
        """The target tokens of each scored or pooled position among the `new` tokens after the first `past` ones. A
        scored position has one target, the last may have several, and a pooled position has none."""
        if self.fills_prefix is not None:
            return []
        scoring, encoding = self.request.scoring, self.request.encoding
        if encoding is not None:
            return [()] * max(0, past + new - max(past, len(self.request.prompt_ids) - encoding.num_read))
        assert scoring is not None, "the request generates"
        ids, end = self.request.prompt_ids, past + new
        if scoring.decoder_ids is not None:
            ids = (0, *scoring.decoder_ids)
        first = max(past, len(ids) - scoring.num_positions)
        return [(ids[position + 1],) if position + 1 < len(ids) else scoring.last_ids for position in range(first, end)]

    def fail(self, error: str) -> None:
        self.finish, self.error = FinishReason.error, error

    def snapshot(self) -> "SequenceState":
        generator = self.generator
        return SequenceState(
            token_ids=tuple(self.generated),
            logprobs=tuple(self.logprobs),
            generator_state=None if generator is None else generator.get_state().numpy().tobytes(),
            search=self.search,
        )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The result of a request. `error` is set if and only if `finish` is error.

    `text` ends before a stop string or EOS; `token_ids` and `logprobs` have all generated tokens. With
    `sampling.reasoning`, `reasoning` is separated from `text`. `scores`: of target tokens or masked positions.
    `vector`: float32, for a request with `encoding`. `beam_score`: sum of log-probabilities after logits processors,
    normalized by length. `prompt_index`: position of the prompt in the input of `Runtime.generate` or
    `Runtime.stream`."""

    request: Request
    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason
    error: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    reasoning: str | None = None
    vector: Vector | None = None
    beam_score: float | None = None
    prompt_index: int = 0

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def sample_index(self) -> int:
        return self.request.sample_index

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)


@dataclass(frozen=True, kw_only=True)
class SequenceState:
    """The state of an unfinished sequence, to resume it in another process. `generator_state`: of torch's random
    generator; None before the first draw. `search`: state of the beam search, on its first beam."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    generator_state: bytes | None
    search: BeamState[BeamTrace] | None = None


def start_sequence(request: Request) -> Sequence:
    """Makes a new sequence. It is finished already if it may not generate any tokens."""
    sequence = Sequence(request=request)
    if not request.max_new_tokens:
        sequence.finish = FinishReason.length
    return sequence


def resume_sequence(request: Request, unfinished: SequenceState | None, device: torch.device) -> Sequence:
    """Resumes a sequence from its state. Starts from the prompt if there is no state, or if its random generator was on
    another type of device."""
    if unfinished is None or (request.num_beams > 1 and unfinished.search is None):
        return start_sequence(request)
    generator = None
    if unfinished.generator_state is not None:
        try:
            generator = torch.Generator(device)
            generator.set_state(torch.frombuffer(bytearray(unfinished.generator_state), dtype=torch.uint8))
        except RuntimeError as error:
            log.warning("row %r restarts: the state of its generator does not fit %s: %s", request.id, device, error)
            return start_sequence(request)
    return Sequence(
        request=request,
        generated=list(unfinished.token_ids),
        num_unchecked=len(unfinished.token_ids),
        logprobs=list(unfinished.logprobs),
        generator=generator,
        search=unfinished.search,
    )


def resume_lane(
    requests: Rows[Request], unfinished: Rows[SequenceState | None], device: torch.device, *, is_packed: bool
) -> list[Sequence]:
    """Resumes the sequences of one micro-batch. In a padded lane, all sequences restart unless they have generated the
    same number of tokens: with padding, their KV cache would be larger than planned."""
    pairs = zip(requests, unfinished, strict=True)
    sequences = [resume_sequence(request, state, device) for request, state in pairs]
    if is_packed or len({len(s.generated) for s in sequences if s.finish is None}) <= 1:
        return sequences
    log.warning("%d rows restart: rows of a padded lane resume only with equally many tokens", len(sequences))
    return [start_sequence(request) for request in requests]
