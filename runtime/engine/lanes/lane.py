"""Base class of lanes: a lane runs one micro-batch through the model's own forward pass, in a greenlet that pauses
whenever it needs the engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows  # `Sequence` is a running request
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
from ...sequences.drafts import Drafts
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
    """Settings of all lanes of a run. `offloaded_layers`: layers with keys and values in a KV tier. `rope_lengths`: set
    if rotary embeddings depend on a sequence's length."""

    model: PreTrainedModel
    sampler: Sampler
    device: ComputeDevice
    pool: PagePool
    offloaded_layers: frozenset[int]
    prefill_chunk_tokens: int
    has_whole_prompts: bool = False  # padded lanes prefill each prompt in one pass
    head_rows: int = 1  # scored positions per slice of the head
    last_stage: int = 0
    rope_lengths: RopeLengths | None = None
    skipped_layers: frozenset[int] = frozenset()  # computed by other ranks
    drafts: Drafts | None = None  # guesses tokens of sequences that decode
    drafts_beside_prompts: bool = False  # also in passes that prefill other sequences
    keeps_hidden: bool = False  # packed lanes keep the hidden states of all tokens of a pass


class Lane(ABC):
    """One micro-batch. A pass is `begin_pass`, `advance` until it returns None, `sample`, `end_pass`. `sequences` holds
    the unfinished ones."""

    def __init__(self, context: LaneContext, sequences: Rows[Sequence]):
        self._model, self._sampler, self._device = context.model, context.sampler, context.device.torch_device
        self.sequences = list(sequences)
        self._rope_lengths, self._keeps_hidden = context.rope_lengths, context.keeps_hidden
        self._run: LaneRun | None = None
        self._logits_BV: torch.Tensor | None = None
        self._sampled: list[Sequence] = []
        self._head_rows, self._last_stage = context.head_rows, context.last_stage
        self._targets: ScoringTargets | PoolingTargets | None = None  # of the prepared pass; None if it generates
        self._readout: torch.Tensor | None = None  # scores or vectors of the targets
        self._num_passes = 0
        self._is_prepared = False

    @property
    def is_prefilled(self) -> bool:
        return all(sequence.is_prefilled for sequence in self.sequences)

    @property
    def is_prefilling(self) -> bool:
        """True if the lane must prefill before it may decode."""
        return not self.is_prefilled

    @property
    def is_done(self) -> bool:
        return not self.sequences

    def choose_tokens(self) -> Rows[int] | None:
        """The number of tokens of each sequence in the next pass; None if the lane type has no choice."""
        return None

    def begin_pass(self, new_tokens: Rows[int] | None = None) -> NeedStage:
        """Starts the forward pass. Returns its first event, a stage. `new_tokens`: see `PackedLane.prepare_pass`."""
        if not self._is_prepared:
            self.prepare_pass(new_tokens)
        self._is_prepared = False
        self._run = self.make_run()
        event = self._run.switch()
        assert isinstance(event, NeedStage), f"the lane waits for {event!r} instead of a stage"
        return event

    def prepare_pass(self, new_tokens: Rows[int] | None = None) -> None:
        """Lays out the tokens of the pass. `begin_pass` calls it if it was not called before."""
        self._prepare()
        self._is_prepared = True

    def make_run(self) -> LaneRun:
        """Creates the greenlet of a prepared pass."""
        forward = partial(run_local_stages, self._forward)
        return LaneRun(forward, self.cache, self._lengths(), keeps_hidden=self._keeps_hidden)

    def advance(self, answer: Weights | torch.Tensor) -> Event | None:
        """Resumes the forward pass with the answer to its last event. Returns the next event; None at the end."""
        assert self._run is not None, "advance before begin_pass"
        event = self._run.switch(answer)
        return None if self._run.dead else event

    @property
    def hidden_in(self) -> torch.Tensor | None:
        """Buffer for hidden states from the previous rank, see `LaneRun`."""
        return self._run.hidden_in if self._run is not None else None

    @property
    def hidden_out(self) -> torch.Tensor | None:
        return self._run.hidden_out if self._run is not None else None

    def expect_tokens(self) -> int:
        """Replaces `sample` if another rank samples. Returns the number of rows that `end_pass` expects."""
        self._sampled = self._sampled_sequences()
        self._sampler.expect(self._sampled)
        return len(self._sampled)

    def sample(self) -> torch.Tensor:
        """Queues the sampling of the next tokens. Returns one row per sampled sequence, for `end_pass` after a copy to
        host memory."""
        if self._readout is not None and self._targets is not None:
            self._sampled, read, self._readout = list(self._targets.sequences), self._readout, None
            return read
        assert self._logits_BV is not None, "the pass has not ended"
        self._sampled, logits_BV = self._sampled_sequences(), self._logits_BV
        self._logits_BV = None
        return self._sampler.sample(self._sampled, logits_BV)

    def end_pass(self, drawn: torch.Tensor) -> PassCounts:
        """Appends the sampled tokens, removes finished sequences and returns the token counts of the pass."""
        counts = self._finish(drawn)
        self._sampled, self._run, self._is_prepared = [], None, False
        self._num_passes += 1
        return counts

    @property
    def num_sampled(self) -> int:
        """Number of rows that `sample` returned."""
        return len(self._sampled)

    def is_running(self, run: object) -> bool:
        """True if `run` is this lane's current pass."""
        return self._run is run

    def abandon(self) -> None:
        """Ends an unfinished pass."""
        self._is_prepared = False
        if self._run is not None:
            self._run.throw(GreenletExit)  # a paused greenlet would keep all of its tensors alive
            self._run = None

    def _lengths_of(self, sequence: Sequence, positions: Rows[int]) -> list[int]:
        assert self._rope_lengths is not None, "the embeddings do not depend on lengths"
        return self._rope_lengths.token_lengths(
            positions, num_prompt=len(sequence.request.prompt_ids), num_known=sequence.num_known
        )

    def _needs_restart(self, sequence: Sequence) -> bool:
        """True if the class's `generate` would recompute all keys, as rotary embeddings change at this length."""
        lengths = self._rope_lengths
        if lengths is None or sequence.finish is not None or sequence.request.scoring is not None:
            return False
        return lengths.is_restart(num_cached=sequence.num_cached, num_known=sequence.num_known)

    def _accept(self, drawn: torch.Tensor) -> int:
        """Appends sampled tokens, scores or vectors. Returns the number of sequences that got one."""
        if isinstance(self._targets, PoolingTargets):
            return record_vectors(self._sampled, drawn, self._num_passes)
        if self._targets is not None:
            return record_scores(self._sampled, drawn, self._num_passes)
        self._sampler.accept(self._sampled, drawn, self._num_passes)
        returned = [sequence for sequence in self._sampled if sequence.request.is_returned]
        return sum(sequence.finish is not FinishReason.error for sequence in returned)

    def _take_sources(self) -> list[int] | None:
        """Takes `source` of each sequence: the row that it continues after a beam search. None if no row moves."""
        if all(sequence.source is None for sequence in self.sequences):
            return None
        rows = {id(sequence): row for row, sequence in enumerate(self.sequences)}
        sources = [rows[id(sequence.source or sequence)] for sequence in self.sequences]
        for sequence in self.sequences:
            sequence.source = None
        return sources

    @property
    def _reads_prompts(self) -> bool:
        """True if prompts are scored or pooled and nothing is generated."""
        return any(not sequence.request.generates for sequence in self.sequences)

    def _make_targets(
        self, parts: Iterable[tuple[Sequence, int, list[tuple[int, ...]]]]
    ) -> ScoringTargets | PoolingTargets:
        """The positions that the pass scores or pools; a run never does both. `parts`: each sequence, the index after
        its last token, and the target tokens of its last positions."""
        kind = ScoringTargets if any(s.request.num_scores for s in self.sequences) else PoolingTargets
        return kind.from_sequences((sequence, end - len(tokens), tokens) for sequence, end, tokens in parts)

    def _read_targets(self, forward: Callable[[], HasLogits]) -> None:
        """Runs the model and reads scores, with the head on a slice of the positions at a time, or vectors."""
        targets, text = self._targets, self._model.config.get_text_config()
        if isinstance(targets, PoolingTargets):
            num_rows = 1 if getattr(text, "pad_token_id", None) is None else self._head_rows
            self._readout = read_vectors(self._model, targets, forward, self._device, num_rows)
            need_stage(self._last_stage)  # some classes never enter the last stage themselves
            return
        assert targets is not None, "the pass generates"
        num_top = max((s.request.encoding.num_top for s in self.sequences if s.request.encoding is not None), default=0)
        scores = TokenScorer(targets, max(num_top, self._sampler.num_top), self._device)
        for begin, logits_NV in sliced_logits(forward, upload(targets.positions, self._device), self._head_rows):
            scores.add(begin, logits_NV)
        self._readout = scores.packed_scores

    def _marked_slice_rows(self, marks: torch.Tensor) -> list[bool] | None:
        """`marked_rows` for a slice of the head's input; None if the head gets no slice."""
        head = self._run.head if self._run is not None else None
        if head is None or head.hidden_1ND is None or self._targets is None:
            return None
        marked = set(torch.nonzero(marks.flatten()).flatten().tolist())
        pairs = zip(self._targets.rows, self._targets.owners, strict=True)
        marked_ids = {id(sequence) for row, sequence in pairs if row - head.begin in marked}
        return [id(sequence) in marked_ids for sequence in self.sequences]

    @abstractmethod
    def close(self) -> None:
        """Frees the lane's KV pages."""

    @property
    @abstractmethod
    def cache(self) -> Cache | None:
        """The cache that layers get in a pass; None if each row has its own."""

    @property
    @abstractmethod
    def kv(self) -> KVCache:
        """The lane's keys and values, for the stream that moves offloaded layers."""

    @abstractmethod
    def marked_rows(self, marks: torch.Tensor) -> list[bool]:
        """True for each sequence with a marked token. `marks`: bool, in the layout of the pass's hidden states."""

    @abstractmethod
    def _prepare(self) -> None: ...

    def _lengths(self) -> torch.Tensor | None:
        """The sequence length of each prepared token, as `LaneRun` expects; None if embeddings do not depend on it."""
        return None

    @abstractmethod
    def _forward(self) -> None: ...

    @abstractmethod
    def _sampled_sequences(self) -> list[Sequence]:
        """The sequence of each row of the pass's logits."""

    @abstractmethod
    def _finish(self, drawn: torch.Tensor) -> PassCounts: ...
