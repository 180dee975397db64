"""Generates open blocks and commits each part once its last row is complete; a checkpoint holds finished rows of open
parts. In waves, blocks run one after another; with continuous admission all are open together. Parts and checkpoints
are written between two passes."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from runtime.batching.balance import Block
from runtime.engine.records import PassRecord
from runtime.engine.session import ignore_pass
from runtime.errors import WeightstreamError
from runtime.plan.cost.predict import Prediction
from runtime.sequences.sequence import Completion, Request, SequenceState

from ..record.output_rows import GenerationRow
from ..record.parts import PartStore
from ..record.passes import PassRow, Start, pass_row
from ..record.run_checkpoint import RequestKey, RunCheckpoint, RunCheckpointFile
from ..tracking.feed import RunFeed
from .progress import Progress
from .requests import RequestBatch, completed_rows

log = logging.getLogger(__name__)


OnPass = Callable[[PassRecord], None]
Completions = Iterator[tuple[int, Completion]]


class BlockSession(Protocol):
    """Subset of `runtime.engine.session.Session`. Integers are positions in `requests`."""

    def wave(
        self,
        block: Block,
        remaining: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, SequenceState],
        on_pass: OnPass,
    ) -> Completions:
        """`stream` for one block, with its `remaining` requests admitted together."""
        ...

    def stream(
        self,
        order: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, SequenceState],
        on_pass: OnPass,
    ) -> Completions:
        """Admits requests in `order`, resumes those in `unfinished`, and yields completions as they finish. Calls
        `on_pass` after each pass, once its completions are consumed. Raises Interrupted."""
        ...

    def snapshot(self) -> dict[int, SequenceState]:
        """The admitted, unfinished sequences; valid after Interrupted too."""
        ...


class OpenParts:
    """Rows of incomplete parts, and passes that no part contains yet. A pass is recorded in the next committed part
    only."""

    def __init__(self, store: PartStore, blocks: Sequence[Block]):
        self._store = store
        self.num_stops = 0  # interruptions inside the block, in waves; recorded in its part
        self._block_by_key = {request.key: block.index for block in blocks for request in store.blocks[block.index]}
        self._num_missing = {block.index: len(store.blocks[block.index]) for block in blocks}
        self._complete: list[int] = []
        self.rows: dict[RequestKey, GenerationRow] = {}
        self.passes: list[PassRow] = []

    def __len__(self) -> int:
        return len(self._num_missing)

    @property
    def are_split(self) -> bool:
        """True if some parts are complete, and others are not."""
        return 0 < len(self._complete) < len(self._num_missing)

    def add(self, row: GenerationRow) -> None:
        assert row.key not in self.rows, f"{row.key} was added before"
        self.rows[row.key] = row
        block = self._block_by_key[row.key]
        self._num_missing[block] -= 1
        if not self._num_missing[block]:
            self._complete.append(block)

    def commit_complete(self) -> list[int]:
        """Commits complete parts and returns their blocks. Raises OutputError."""
        complete = sorted(self._complete)
        for block in complete:
            keys = [request.key for request in self._store.blocks[block]]
            if self._store.commit(block, [self.rows[key] for key in keys], self.passes, num_stops=self.num_stops):
                self.passes = []  # in this part now: a pass must not be counted twice
            for key in keys:
                del self.rows[key]
            del self._num_missing[block]
        self._complete = []
        return complete


@dataclass(kw_only=True, eq=False)
class OpenBlocks:
    """The blocks that are open together in this process: all remaining ones, or one in waves. Resumes from a
    checkpoint. `checkpoint_seconds`: interval; None neither saves nor resumes."""

    session: BlockSession
    blocks: Sequence[Block]
    batch: RequestBatch
    store: PartStore
    is_wave: bool
    checkpoint_seconds: float | None
    progress: Progress
    start: Start = field(default_factory=Start)
    after_pass: Callable[[PassRecord], None] = ignore_pass
    prediction: Prediction | None = None
    feed: RunFeed = field(default_factory=RunFeed)

    def __post_init__(self) -> None:
        store, blocks = self.store, self.blocks
        recorded = frozenset[int]() if self.is_wave else frozenset(row.pass_index for row in store.read_passes())
        self._parts = OpenParts(store, blocks)
        self._checkpoint = RunCheckpointFile(
            directory=store.directory,
            manifest=store.manifest,
            plan=store.plan,
            block=blocks[0].index if self.is_wave else None,
        )
        self._order = [i for block in blocks for i in block.members]
        self._unfinished: dict[int, SequenceState] = {}  # from the checkpoint, not finished since
        self._num_passes = 1 + max(recorded, default=-1)
        if self.checkpoint_seconds is not None:
            self._restore(self._checkpoint.load(), recorded)
        num_generated = {i: len(self._unfinished[i].token_ids) if i in self._unfinished else 0 for i in self._order}
        self.progress.open(blocks, num_generated)
        self._saved_at = time.monotonic()

    def generate(self) -> None:
        """Generates the open blocks and commits parts as they complete. Saves checkpoints periodically and on a
        WeightstreamError. Raises Interrupted or OutputError."""
        batch, session = self.batch, self.session
        stream = partial(session.wave, self.blocks[0]) if self.is_wave else session.stream
        try:
            for i, completion in stream(self._order, batch.computed, dict(self._unfinished), self._end_pass):
                for row in completed_rows(batch, i, completion):
                    self._add_row(row)
                self._unfinished.pop(i, None)
                self.progress.finish_row(i, completion)
        except WeightstreamError:  # raised between passes; other exceptions may leave half a pass, so they save nothing
            self._save()
            raise
        self._commit_complete()
        self._checkpoint.remove()  # after the commit: a crash in between only leaves an unused file
        self.store.copy.try_remove(self._checkpoint.path)

    def _restore(self, checkpoint: RunCheckpoint, recorded_passes: frozenset[int]) -> None:
        """Restores a checkpoint, which may be older than the parts: drops rows and passes that parts contain."""
        batch = self.batch
        positions = {batch.requests[member].key: (i, member) for i in self._order for member in batch.joined[i].members}
        finished = [(row, *positions[row.key]) for row in checkpoint.finished if row.key in positions]
        for row, _, member in finished:
            source_row = batch.request_rows[member]
            self._add_row(replace(row, columns=source_row.columns, source_file=source_row.source_file))
        done = {i for _, i, _ in finished}
        self._order = [i for i in self._order if i not in done]
        keys = {i: batch.computed[i].key for i in self._order}
        self._unfinished = {i: checkpoint.unfinished[key] for i, key in keys.items() if key in checkpoint.unfinished}
        self._parts.passes = [row for row in checkpoint.passes if row.pass_index not in recorded_passes]
        self._num_passes = 1 + max({*recorded_passes, *(row.pass_index for row in checkpoint.passes)}, default=-1)
        has_begun = bool(self._parts.rows or self._unfinished)
        self._parts.num_stops = checkpoint.num_stops + has_begun if self.is_wave else 0
        if has_begun:
            log.info(
                "resuming: %d rows of open parts are finished, %d are partly generated, with %d tokens",
                len(self._parts.rows),
                len(self._unfinished),
                sum(len(unfinished.token_ids) for unfinished in self._unfinished.values()),
            )

    def _add_row(self, row: GenerationRow) -> None:
        self._parts.add(row)
        self.feed.finish_row(row.status)

    def _end_pass(self, record: PassRecord) -> None:
        row = pass_row(record, self._num_passes, self.prediction, self.start)
        self._parts.passes.append(row)
        self._num_passes += 1
        self.progress.advance(row)
        self.feed.advance(row)
        self.after_pass(record)
        if self._parts.are_split:  # the part has passes of other rows too, which must not run again after a crash
            self._save()
        self._commit_complete()
        seconds = self.checkpoint_seconds
        if len(self._parts) and seconds is not None and time.monotonic() - self._saved_at >= seconds:
            self._save()

    def _commit_complete(self) -> None:
        self.progress.finish_blocks(self._parts.commit_complete())

    def _save(self) -> None:
        if self.checkpoint_seconds is None:
            return
        # The snapshot lacks restored sequences that still wait for admission.
        states = {**self._unfinished, **self.session.snapshot()}
        checkpoint = RunCheckpoint(
            finished=list(self._parts.rows.values()),
            unfinished={self.batch.computed[i].key: state for i, state in states.items()},
            passes=self._parts.passes,
            num_stops=self._parts.num_stops,
        )
        if self._checkpoint.save(checkpoint):
            self.store.copy.try_upload(self._checkpoint.path)
        self._saved_at = time.monotonic()
