"""A request and what has become of it so far, its tokens and their log-probabilities: log-softmax in float32 of the
logits as they leave the head, before any processor, temperature or cut. transformers calls these `output_logits`. Those
that an earlier process has begun are taken up where it left them.
"""

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
    """One generated token's own log-probability, and the likeliest tokens in its place, likeliest first."""

    own: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


def pack_logprobs(logits_BV: torch.Tensor, tokens_B: torch.Tensor, num_top: int) -> torch.Tensor:
    """Log-probabilities of each row's chosen token and of the likeliest ones, as `read_logprobs` reads them: int32 (B,
    num_written(num_top)), so that one transfer brings them to the host. `logits_BV` is float32."""
    logprobs_BV = torch.log_softmax(logits_BV, -1)
    own_B1 = logprobs_BV.gather(-1, tokens_B[:, None])
    top = logprobs_BV.topk(num_top, -1)
    return torch.cat([own_B1.view(torch.int32), top.indices.int(), top.values.view(torch.int32)], 1)


def packed_width(num_top: int) -> int:
    """Numbers of a row."""
    return 1 + 2 * num_top


def unpack_logprobs(numbers: torch.Tensor) -> list[TokenLogprobs]:
    """One for each row."""
    num_top = numbers.shape[1] // 2
    values = numbers.contiguous().view(torch.float32)
    own, top_ids, top = values[:, 0], numbers[:, 1 : 1 + num_top], values[:, 1 + num_top :]
    return [
        TokenLogprobs(own=o, top_ids=tuple(ids), top=tuple(likely))
        for o, ids, likely in zip(own.tolist(), top_ids.tolist(), top.tolist(), strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class TokenScore(TokenLogprobs):
    """A given token's own log-probability behind those before it, the likeliest tokens in its place where they are
    asked for, and the likeliest of all."""

    greedy_id: int


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Which tokens of a request are given to be scored: those that follow on the last `num_positions` of its prompt,
    which are the prompt's own, and behind the last one each of `last_ids` in its place. Behind an encoder those of the
    decoder are all scored: `decoder_ids` follow on its start token."""

    num_positions: int
    last_ids: tuple[int, ...]
    decoder_ids: tuple[int, ...] | None = None  # None without an encoder

    @property
    def num_scores(self) -> int:
        return self.num_positions - 1 + len(self.last_ids)

    def positions_of(self, part: "Scoring") -> list[int]:
        """Where among its scores those of `part` are, which it was joined of."""
        num_before = self.num_positions - 1
        lasts = [num_before + self.last_ids.index(token) for token in part.last_ids]
        return [*range(self.num_positions - part.num_positions, num_before), *lasts]


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """What is read off a request's prompt, of which nothing is generated: a vector, by `pooling` of the hidden states,
    or the logits of classes; or, with `masked`, the likeliest tokens at these places, `num_top` of them. `num_read`: of
    how many hidden states, the last of the prompt, that is made."""

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
    """A completion that a beam search has come to."""

    token_ids: tuple[int, ...]
    finish: FinishReason
    text_end: int | None
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """`prompt_ids` must not be empty. `id` and `sample_index` together, the `key`, are unique in a run.

    `temperature` 0 is greedy. Where `top_p` and what follows on it are None they are the run's. With `scoring` nothing
    is generated: `max_new_tokens` is 1, as the scores come with the prompt's last pass, where a first token would. So
    it is with an `encoding`. `grammar`: what the completion must be, in llguidance's form; None: anything. With
    `num_beams` so many requests of one id are the beams of one search, of which those that are not `is_returned` come
    to no completion. `stops_begin_in_prompt`: a stop string counts that begins in the prompt and ends behind it, as in
    transformers' `generate`.
    """

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
        """What its draws go by beside the run's settings."""
        return self.temperature, self.top_p, self.top_k, self.min_p

    @property
    def key(self) -> tuple[str, int]:
        return self.id, self.sample_index

    @property
    def size(self) -> SequenceSize:
        """What a plan asks of it."""
        return SequenceSize.shared(len(self.prompt_ids), self.max_new_tokens, self.num_scored, num_beams=self.num_beams)

    @property
    def decoder_ids(self) -> tuple[int, ...]:
        """What a decoder behind an encoder is given behind its start token."""
        return (self.scoring.decoder_ids or ()) if self.scoring is not None else ()

    @property
    def target_ids(self) -> tuple[int, ...]:
        """What is scored, of a request that was not joined with others."""
        if self.scoring is None:
            return ()
        known = self.prompt_ids if self.scoring.decoder_ids is None else self.scoring.decoder_ids
        return *known[len(known) - self.scoring.num_positions + 1 :], *self.scoring.last_ids

    @property
    def num_scored(self) -> int:
        """Positions whose next tokens are scored, or whose hidden states are read."""
        if self.encoding is not None:
            return self.encoding.num_read
        return self.scoring.num_positions if self.scoring is not None else 0

    @property
    def num_scores(self) -> int:
        """Tokens that get a score."""
        if self.encoding is not None:
            return len(self.encoding.masked)
        return self.scoring.num_scores if self.scoring is not None else 0

    @property
    def generates(self) -> bool:
        return self.scoring is None and self.encoding is None

    def seed(self, run_seed: int) -> int:
        """The same for a row wherever it lands in a batch, whichever worker runs it and however often it is
        restarted. A seed of its own is its first sample's as it is."""
        if self.own_seed is not None:
            return self.own_seed if not self.sample_index else _digest(f"{self.own_seed}\0{self.sample_index}")
        return _digest(f"{run_seed}\0{self.id}\0{self.sample_index}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little") >> 1


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What comes behind a completion's reasoning: all but its first `num_tokens`, the end tag's among them, behind
    `rest`, what the last of those has of it."""

    num_tokens: int
    rest: str = ""


@dataclass(kw_only=True)
class Sequence:
    """Mutable; owned by one lane. `num_cached` counts known tokens, prompt and generated, whose KV is stored."""

    request: Request
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per generated token, where they are asked for
    scores: list[TokenScore] = field(default_factory=list)  # one per given token, in their order
    vector: Vector | None = None  # what was read off the prompt, so far
    num_cached: int = 0
    finish: FinishReason | None = None
    error: str | None = None
    text_end: int | None = None  # where a stop string begins in the decoded text, or the answer's
    answer: Answer | None = None  # where reasoning is told apart and has ended
    num_scanned: int = 0  # tokens that were looked at for its end
    is_thinking: bool = False  # it was seen to begin with reasoning, or its prompt to end with the tag of it
    num_unchecked: int = 0  # tokens in which no stop string was looked for, as they may have been reasoning
    generator: torch.Generator | None = None  # of its own draws; made at the first one
    guide: Guide | None = None  # through its request's grammar; made where that begins
    is_broken: bool = False  # its logits were not finite
    fills_prefix: SharedPages | None = None  # its prompt is what others begin with, and nothing is generated
    parent_prefix: SharedPages | None = None  # what it goes on from
    search: BeamState[BeamTrace] | None = None  # of the beams that it is one of, once they have begun
    source: "Sequence | None" = None  # the beam whose keys and values it goes on from, until the lane has moved them
    beam_score: float | None = None  # of a completion of a beam search

    @property
    def num_known(self) -> int:
        return len(self.request.prompt_ids) + len(self.generated)

    @property
    def known_size(self) -> SequenceSize:
        """The size of a request whose prompt is all that is known."""
        num_left = self.request.max_new_tokens - len(self.generated)
        return SequenceSize.shared(self.num_known, num_left, self.request.num_scored, num_beams=self.request.num_beams)

    @property
    def known_ids(self) -> list[int]:
        return [*self.request.prompt_ids, *self.generated]

    @property
    def is_prefilled(self) -> bool:
        """All but the token that was sampled last is cached."""
        return bool(self.generated) and self.num_cached == self.num_known - 1

    @property
    def is_filled(self) -> bool:
        """Whether it has computed what others go on from, which is all that it is there for."""
        return self.fills_prefix is not None and self.num_cached == self.num_known

    def num_selected(self, new: int) -> int:
        """How many of the next `new` tokens want logits, which are the last of them: the one that ends what is known,
        or those that scored tokens follow on. `SequenceSize.num_selected` says the same to a plan."""
        if self.fills_prefix is not None:
            return 0
        if self.request.generates:
            return int(new > 0 and self.num_cached + new == self.num_known)
        return len(self.target_tokens(self.num_cached, new))

    def target_tokens(self, past: int, new: int) -> list[tuple[int, ...]]:
        """What is scored behind each of `new` tokens behind `past` others that a scored token follows on: one token, or
        several in one place; nothing where only hidden states are read."""
        if self.fills_prefix is not None:
            return []
        scoring, encoding = self.request.scoring, self.request.encoding
        if encoding is not None:
            return [()] * max(0, past + new - max(past, len(self.request.prompt_ids) - encoding.num_read))
        assert scoring is not None, "asked of a sequence that is generated"
        ids, end = self.request.prompt_ids, past + new
        if scoring.decoder_ids is not None:
            ids = (0, *scoring.decoder_ids)
        first = max(past, len(ids) - scoring.num_positions)
        return [(ids[place + 1],) if place + 1 < len(ids) else scoring.last_ids for place in range(first, end)]

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
    """What a request came to. `error` is set exactly when `finish` is error.

    `text` ends before a stop string or EOS; `token_ids` are all that were generated, `logprobs` theirs, or empty. Where
    `sampling.reasoning` tells them apart, `reasoning` is what was thought, and `text` what follows.
    `scores` are those of tokens that were given, if the request has a `scoring`, or of those in masks' places, and
    `vector` what was read off the prompt, float32, if it has an `encoding`.
    `beam_score`: of a beam search, the sum of its tokens' log-probabilities behind the processors, by its length.
    `prompt_index`: the place of its prompt in the input of `Runtime.generate` or `Runtime.stream`.
    """

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
    """What a sequence has come to so far: enough to go on with it in another process.

    `generator_state` is torch's, None where nothing has been drawn yet; `logprobs` as in `Completion`. `search`: the
    beam search's that the sequence is a beam of.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    generator_state: bytes | None
    search: BeamState[BeamTrace] | None = None


def start_sequence(request: Request) -> Sequence:
    """A sequence that begins with its prompt."""
    sequence = Sequence(request=request)
    if not request.max_new_tokens:
        sequence.finish = FinishReason.length
    return sequence


def resume_sequence(request: Request, unfinished: SequenceState | None, device: torch.device) -> Sequence:
    """A sequence that goes on from the tokens that it has; from its prompt where there are none, or where its generator
    is of another kind of device, whose draws cannot go on here."""
    if unfinished is None or (request.num_beams > 1 and unfinished.search is None):
        return start_sequence(request)
    generator = None
    if unfinished.generator_state is not None:
        try:
            generator = torch.Generator(device)
            generator.set_state(torch.frombuffer(bytearray(unfinished.generator_state), dtype=torch.uint8))
        except RuntimeError as error:
            log.warning(
                "row %r begins again: the state of its generator does not fit %s: %s", request.id, device, error
            )
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
    """The sequences of one micro-batch. In a rectangle all rows have generated equally much at any time; where they
    have not, because they come out of packed lanes, such a rectangle would be wider than planned, and all of them begin
    again."""
    pairs = zip(requests, unfinished, strict=True)
    sequences = [resume_sequence(request, state, device) for request, state in pairs]
    if is_packed or len({len(s.generated) for s in sequences if s.finish is None}) <= 1:
        return sequences
    log.warning("%d rows begin again: padded lanes cannot go on from unequally many tokens", len(sequences))
    return [start_sequence(request) for request in requests]
