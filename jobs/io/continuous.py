"""Continuous admission: requests enter as soon as others have finished, so parts overlap. A part is committed once its
last row is there; a checkpoint keeps what no part holds yet.

All is recorded between two passes, when every row of the last one is known: a pass goes into the part that is
committed next, and into no other.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from runtime.batching.balance import Block
from runtime.engine.records import PassRecord
from runtime.engine.sequence import Completion, Request, Unfinished
from runtime.errors import MillraceError
from runtime.plan.predict import Prediction

from .output_rows import GenerationRow
from .parts import PartStore
from .passes import pass_row
from .progress import Progress
from .requests import Asked, completed_row
from .running import RequestKey, Running, RunningFile
from .summary import PassRow

log = logging.getLogger(__name__)


class StreamingSession(Protocol):
    """What is asked of `runtime.api.Session`. Requests go by their positions in `requests`."""

    def stream(
        self,
        order: Sequence[int],
        requests: Sequence[Request],
        unfinished: Mapping[int, Unfinished],
        on_pass: Callable[[PassRecord], None],
    ) -> Iterator[tuple[int, Completion]]:
        """Completions as they finish, of requests that are admitted in `order` and go on from `unfinished`. `on_pass`
        is called after each pass, once the completions that ended in it have been taken. Raises Interrupted."""
        ...

    def snapshot(self) -> dict[int, Unfinished]:
        """Of the sequences that `stream` has admitted and not finished, also after it raised Interrupted."""
        ...


class OpenParts:
    """The rows of the parts that lack some, and the passes that no part has yet."""

    def __init__(self, store: PartStore, blocks: Sequence[Block]):
        self._store = store
        self._block_of = {request.key: block.index for block in blocks for request in store.blocks[block.index]}
        self._num_missing = {block.index: len(store.blocks[block.index]) for block in blocks}
        self._complete: list[int] = []
        self.rows: dict[RequestKey, GenerationRow] = {}
        self.passes: list[PassRow] = []

    def __len__(self) -> int:
        return len(self._num_missing)

    def add(self, row: GenerationRow) -> None:
        """Each row once."""
        assert row.key not in self.rows, f"{row.key} was added before"
        self.rows[row.key] = row
        block = self._block_of[row.key]
        self._num_missing[block] -= 1
        if not self._num_missing[block]:
            self._complete.append(block)

    def commit_complete(self) -> int:
        """Commits the parts that lack no row; returns how many. Raises OutputError."""
        num_complete = len(self._complete)
        for block in sorted(self._complete):
            keys = [request.key for request in self._store.blocks[block]]
            if self._store.commit(block, [self.rows[key] for key in keys], self.passes):
                self.passes = []
            for key in keys:
                del self.rows[key]
            del self._num_missing[block]
        self._complete = []
        return num_complete


class ContinuousRun:
    """One start of a run with continuous admission. Reads what an earlier start has saved."""

    def __init__(
        self,
        session: StreamingSession,
        asked: Asked,
        blocks: Sequence[Block],
        store: PartStore,
        *,
        after_pass: Callable[[], None] = lambda: None,
        checkpoint_seconds: float,
        prediction: Prediction | None = None,
    ):
        self._session, self._asked, self._prediction = session, asked, prediction
        self._after_pass, self._checkpoint_seconds = after_pass, checkpoint_seconds
        self._parts = OpenParts(store, blocks)
        self._checkpoint = RunningFile(directory=store.directory, manifest=store.manifest, plan=store.plan)
        self._order = [i for block in blocks for i in block.members]
        self._unfinished: dict[int, Unfinished] = {}  # of an earlier start, and not finished by this one
        self._restore(self._checkpoint.load(), {row.pass_index for row in store.passes()})
        num_known = sum(len(unfinished.token_ids) for unfinished in self._unfinished.values())
        num_tokens = sum(asked.requests[i].max_new_tokens for i in self._order) - num_known
        self._progress = Progress(num_tokens, len(self._parts))
        self._saved_at = time.monotonic()

    def finish(self) -> None:
        """Generates what is open and commits each part as it is complete. Saves the rest every `checkpoint_seconds`,
        and when the run is interrupted. Raises Interrupted or OutputError."""
        requests, unfinished = self._asked.requests, dict(self._unfinished)
        with self._progress:
            try:
                for i, completion in self._session.stream(self._order, requests, unfinished, self._end_pass):
                    self._parts.add(completed_row(self._asked.request_rows[i], completion))
                    self._unfinished.pop(i, None)
                    self._progress.finish_row(completion)
            except MillraceError:
                self._save()
                raise
            self._commit_complete()
        self._checkpoint.remove()

    def _restore(self, saved: Running, recorded: set[int]) -> None:
        """Drops what parts have: rows, and passes by their index. They were saved before the parts were committed."""
        place_of = {self._asked.requests[i].key: i for i in self._order}
        for row in saved.finished:
            if row.key in place_of:
                columns = self._asked.request_rows[place_of.pop(row.key)].columns
                self._parts.add(replace(row, columns=columns))
        self._order = list(place_of.values())
        self._unfinished = {i: saved.unfinished[key] for key, i in place_of.items() if key in saved.unfinished}
        self._parts.passes = [row for row in saved.passes if row.pass_index not in recorded]
        self._num_passes = 1 + max({*recorded, *(row.pass_index for row in saved.passes)}, default=-1)
        if self._parts.rows or self._unfinished:
            log.info(
                "going on: %d rows of open parts are finished, %d are begun",
                len(self._parts.rows),
                len(self._unfinished),
            )

    def _end_pass(self, record: PassRecord) -> None:
        self._parts.passes.append(pass_row(record, self._num_passes, self._prediction))
        self._num_passes += 1
        self._progress.advance(record)
        self._after_pass()
        self._commit_complete()
        if time.monotonic() - self._saved_at >= self._checkpoint_seconds:
            self._save()

    def _commit_complete(self) -> None:
        for _ in range(self._parts.commit_complete()):
            self._progress.finish_block()

    def _save(self) -> None:
        """A sequence that waits to go on since an earlier start is not in the session's snapshot."""
        known = {**self._unfinished, **self._session.snapshot()}
        unfinished = {self._asked.requests[i].key: state for i, state in known.items()}
        self._checkpoint.save(
            Running(finished=list(self._parts.rows.values()), unfinished=unfinished, passes=self._parts.passes)
        )
        self._saved_at = time.monotonic()
