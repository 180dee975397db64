"""A lane carries one micro-batch through the model's own forward pass, as a greenlet that parks wherever it needs the
engine. Its kinds are `PackedLane`, `PaddedLane` and `Seq2SeqLane`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial

import torch
from greenlet import GreenletExit
from transformers import Cache, PreTrainedModel

from ...attention.upload import upload
from ...cache.pages import KVCache, PagePool
from ...events import Event, LaneRun, NeedStage, Weights, need_stage
from ...model.head import HasLogits, sliced_logits
from ...model.rope_lengths import RopeLengths
from ...ranks.pipeline import run_local_stages
from ...sequences.reading import (
    PoolingTargets,
    ScoringTargets,
    TokenScorer,
    read_vectors,
    record_scores,
    record_vectors,
)
from ...sequences.sampler import Sampler
from ...sequences.sequence import FinishReason, Sequence
from ...stream.device import ComputeDevice
from ..records import PassCounts


@dataclass(frozen=True, kw_only=True)
class LaneContext:
    """What the lanes of a run share. Keys and values of layers in `travels` live in a tier; `rope_lengths` is there
    where rotary embeddings depend on a sequence's length."""

    model: PreTrainedModel
    sampler: Sampler
    device: ComputeDevice
    pool: PagePool
    offloaded_layers: frozenset[int]
    prefill_chunk_tokens: int
    has_whole_prompts: bool = False  # in padded lanes
    head_rows: int = 1  # scored tokens whose logits are made at a time
    last_stage: int = 0
    rope_lengths: RopeLengths | None = None
    skipped_layers: frozenset[int] = frozenset()  # that other ranks compute


class Lane(ABC):
    """`begin_pass`, then `advance` until it returns None, then `draw` and `end_pass`; `sequences` holds those still
    unfinished."""

    def __init__(self, context: LaneContext, sequences: Rows[Sequence]):
        self._model, self._sampler, self._device = context.model, context.sampler, context.device.torch_device
        self.sequences = list(sequences)
        self._rope_lengths = context.rope_lengths
        self._run: LaneRun | None = None
        self._logits_BV: torch.Tensor | None = None
        self._drawing: list[Sequence] = []
        self._head_rows, self._last_stage = context.head_rows, context.last_stage
        self._targets: ScoringTargets | PoolingTargets | None = (
            None  # what the prepared pass scores or reads; None where it generates
        )
        self._readout: torch.Tensor | None = None  # what it has found there
        self._num_passes = 0
        self._is_prepared = False

    @property
    def is_prefilled(self) -> bool:
        return all(sequence.is_prefilled for sequence in self.sequences)

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompts come first: it is prefilled before it decodes."""
        return not self.is_prefilled

    @property
    def is_done(self) -> bool:
        return not self.sequences

    def choose_tokens(self) -> Rows[int] | None:
        """How many tokens of each sequence the next pass carries; None where that is not for the lane to choose."""
        return None

    def begin_pass(self, new_tokens: Rows[int] | None = None) -> NeedStage:
        """Starts the forward; returns the first stage that it asks for. `new_tokens`: see `PackedLane`."""
        if not self._is_prepared:
            self.prepare_pass(new_tokens)
        self._is_prepared = False
        self._run = self.make_run()
        event = self._run.switch()
        assert isinstance(event, NeedStage), f"the lane asked for {event!r} instead of a stage"
        return event

    def prepare_pass(self, new_tokens: Rows[int] | None = None) -> None:
        """Lays the tokens of the pass out, which `begin_pass` then does not."""
        self._prepare()
        self._is_prepared = True

    def make_run(self) -> LaneRun:
        """The forward of a pass that is prepared."""
        return LaneRun(partial(run_local_stages, self._forward), self.cache, self._lengths())

    def advance(self, answer: Weights | torch.Tensor) -> Event | None:
        """Runs on with what was asked for, up to the next question; None when the forward has ended."""
        assert self._run is not None, "advance before begin_pass"
        event = self._run.switch(answer)
        return None if self._run.dead else event

    @property
    def entering(self) -> torch.Tensor | None:
        """Where hidden states go that another rank sends, see `LaneRun`."""
        return self._run.entering if self._run is not None else None

    @property
    def leaving(self) -> torch.Tensor | None:
        return self._run.leaving if self._run is not None else None

    def expect_tokens(self) -> int:
        """Has another rank choose the next tokens, in place of `draw`; of how many sequences."""
        self._drawing = self._sampled_sequences()
        self._sampler.expect(self._drawing)
        return len(self._drawing)

    def sample(self) -> torch.Tensor:
        """Begins to choose the next tokens. Returns what `end_pass` wants of them, once it is in host memory: a row for
        each sequence that asks."""
        if self._readout is not None and self._targets is not None:
            self._drawing, read, self._readout = list(self._targets.sequences), self._readout, None
            return read
        assert self._logits_BV is not None, "the pass has not ended"
        self._drawing, logits_BV = self._sampled_sequences(), self._logits_BV
        self._logits_BV = None
        return self._sampler.sample(self._drawing, logits_BV)

    def end_pass(self, drawn: torch.Tensor) -> PassCounts:
        """Hands out the tokens, drops finished sequences and says what the pass amounted to."""
        counts = self._finish(drawn)
        self._drawing, self._run, self._is_prepared = [], None, False
        self._num_passes += 1
        return counts

    @property
    def num_sampled(self) -> int:
        """Rows of what `draw` gave."""
        return len(self._drawing)

    def is_running(self, run: object) -> bool:
        """Whether it is this lane's pass that `run` is."""
        return self._run is run

    def abandon(self) -> None:
        """Ends a pass that will not be finished. A parked greenlet would keep all that it has seen for good."""
        self._is_prepared = False
        if self._run is not None:
            self._run.throw(GreenletExit)
            self._run = None

    def _lengths_of(self, sequence: Sequence, places: Rows[int]) -> list[int]:
        assert self._rope_lengths is not None, "asked of a model whose embeddings know no lengths"
        return self._rope_lengths.of(places, num_prompt=len(sequence.request.prompt_ids), num_known=sequence.num_known)

    def _needs_restart(self, sequence: Sequence) -> bool:
        """Whether the class's own `generate` would compute all of its keys once more, with the token that it was just
        given."""
        lengths = self._rope_lengths
        if lengths is None or sequence.finish is not None or sequence.request.scoring is not None:
            return False
        return lengths.is_restart(num_cached=sequence.num_cached, num_known=sequence.num_known)

    def _accept(self, drawn: torch.Tensor) -> int:
        """Those who asked; returns how many got a token, or a score."""
        if isinstance(self._targets, PoolingTargets):
            return record_vectors(self._drawing, drawn, self._num_passes)
        if self._targets is not None:
            return record_scores(self._drawing, drawn, self._num_passes)
        self._sampler.accept(self._drawing, drawn, self._num_passes)
        asked = [sequence for sequence in self._drawing if sequence.request.is_returned]
        return sum(sequence.finish is not FinishReason.error for sequence in asked)

    def _take_sources(self) -> list[int] | None:
        """The row that each of `sequences` goes on from, as beams change their ways; None where all go on from their
        own."""
        if all(sequence.source is None for sequence in self.sequences):
            return None
        rows = {id(sequence): row for row, sequence in enumerate(self.sequences)}
        found = [rows[id(sequence.source or sequence)] for sequence in self.sequences]
        for sequence in self.sequences:
            sequence.source = None
        return found

    @property
    def _reads_prompts(self) -> bool:
        """Whether its prompts are read, and nothing is generated."""
        return any(not sequence.request.generates for sequence in self.sequences)

    def _make_targets(
        self, parts: Iterable[tuple[Sequence, int, list[tuple[int, ...]]]]
    ) -> ScoringTargets | PoolingTargets:
        """What the pass scores or reads: of each sequence, the place behind its last token, and what is given at its
        last ones. Of a run, all are scored, or all are read."""
        kind = ScoringTargets if any(s.request.num_scores for s in self.sequences) else PoolingTargets
        return kind.from_sequences((sequence, end - len(tokens), tokens) for sequence, end, tokens in parts)

    def _read_targets(self, forward: Callable[[], HasLogits]) -> None:
        """Runs the model. Its head over a slice of what is scored at a time; of hidden states none but that of
        classes."""
        given, text = self._targets, self._model.config.get_text_config()
        if isinstance(given, PoolingTargets):
            num_rows = 1 if getattr(text, "pad_token_id", None) is None else self._head_rows
            self._readout = read_vectors(self._model, given, forward, self._device, num_rows)
            need_stage(self._last_stage)  # where no module of the class has asked for it
            return
        assert given is not None, "asked of a pass that generates"
        num_top = max((s.request.encoding.num_top for s in self.sequences if s.request.encoding is not None), default=0)
        scores = TokenScorer(given, max(num_top, self._sampler.num_top), self._device)
        for begin, logits_NV in sliced_logits(forward, upload(given.places, self._device), self._head_rows):
            scores.add(begin, logits_NV)
        self._readout = scores.numbers

    def _marked_slice_rows(self, marks: torch.Tensor) -> list[bool] | None:
        """`rows_with` of what the head is given a slice of; None where it is given no slice."""
        head = self._run.head if self._run is not None else None
        if head is None or head.hidden_1ND is None or self._targets is None:
            return None
        marked = set(torch.nonzero(marks.flatten()).flatten().tolist())
        pairs = zip(self._targets.rows, self._targets.owners, strict=True)
        found = {id(sequence) for row, sequence in pairs if row - head.begin in marked}
        return [id(sequence) in found for sequence in self.sequences]

    @abstractmethod
    def close(self) -> None:
        """Gives back the KV pages that the lane holds."""

    @property
    @abstractmethod
    def cache(self) -> Cache | None:
        """The cache that the model's layers are handed in a pass; None where each row has its own."""

    @property
    @abstractmethod
    def kv(self) -> KVCache:
        """The lane's keys and values, to whoever carries those of layers that travel."""

    @abstractmethod
    def marked_rows(self, marks: torch.Tensor) -> list[bool]:
        """Whether one of its tokens is marked, of each of `sequences`. `marks`, bool: of the tokens of a hidden state
        of the pass, as the lane has laid them out."""

    @abstractmethod
    def _prepare(self) -> None: ...

    def _lengths(self) -> torch.Tensor | None:
        """The length of each prepared token's sequence, as `LaneRun` wants it; None where none is asked for."""
        return None

    @abstractmethod
    def _forward(self) -> None: ...

    @abstractmethod
    def _sampled_sequences(self) -> list[Sequence]:
        """Whose next token the logits of the pass give, row by row."""

    @abstractmethod
    def _finish(self, drawn: torch.Tensor) -> PassCounts: ...
