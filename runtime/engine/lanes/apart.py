"""A padded lane of which each row is a rectangle by itself: for classes that give a row other tokens beside padding.
Beams of one request are equally long and share one, which has none.

All rows pass a stage while its weights are there, one behind the other; to the engine they are one lane.
"""

from collections.abc import Sequence as Rows

import torch
from greenlet import GreenletExit

from ...cache.base import KVCache
from ...events import Event, LaneRun, NeedStage, need_stage, need_tensor
from ...sequences.beam_search import of_searches
from ...sequences.sequence import Sequence
from ..records import PassCounts
from .lane import Lane, LaneContext
from .padded import PaddedLane


class ApartLane(Lane):
    """Rows of finished sequences leave it."""

    def __init__(self, context: LaneContext, sequences: Rows[Sequence]):
        super().__init__(context, sequences)
        self._rows = [PaddedLane(context, beams) for beams in of_searches(sequences)]
        self._runs: list[LaneRun] = []
        self._at = 0  # the row that runs

    @property
    def cache(self) -> None:
        """Each row has its own."""

    @property
    def kv(self) -> KVCache:
        return _TogetherKV([row.kv for row in self._rows])

    @property
    def is_filling(self) -> bool:
        return any(row.is_filling for row in self._rows)

    def close(self) -> None:
        for row in self._rows:
            row.close()

    def is_running(self, run: object) -> bool:
        return run in self._runs or super().is_running(run)

    def rows_with(self, marks: torch.Tensor) -> list[bool]:
        """The tokens are those of the row that runs."""
        return [row == self._at and bool(marks.any()) for row, lane in enumerate(self._rows) for _ in lane.sequences]

    def _prepare(self) -> None:
        for row in self._rows:
            row._prepare()

    def _forward(self) -> None:
        runs = self._runs = [row.make_run() for row in self._rows]
        try:
            events = [run.switch() for run in runs]
            while any(event is not None for event in events):
                for self._at, run in enumerate(runs):
                    events[self._at] = _through_stage(run, events[self._at])
        finally:
            for run in runs:
                run.throw(GreenletExit)
            self._runs = []

    def draw(self) -> torch.Tensor:
        return torch.cat([row.draw() for row in self._rows])

    def _sampled_sequences(self) -> list[Sequence]:
        """Each row draws by itself."""
        return []

    def _finish(self, drawn: torch.Tensor) -> PassCounts:
        parts = drawn.split([row.num_drawn for row in self._rows])
        counts = PassCounts.total([row.end_pass(part) for row, part in zip(self._rows, parts, strict=True)])
        for row in self._rows:
            if row.is_done:
                row.close()
        self._rows = [row for row in self._rows if not row.is_done]
        self.sequences = [sequence for row in self._rows for sequence in row.sequences]
        return counts


def _through_stage(run: LaneRun, event: Event | None) -> Event | None:
    """Asks for a row what it asks for, until it wants the next stage; None when its forward has ended."""
    assert isinstance(event, NeedStage), f"a row waits for {event!r} before a stage"
    stage = event.stage
    while event is not None and not (isinstance(event, NeedStage) and event.stage != stage):
        answer = need_stage(stage) if isinstance(event, NeedStage) else need_tensor(event)
        event = run.switch(answer)
        if run.dead:
            return None
    return event


class _TogetherKV(KVCache):
    """The travelling layers of rows, one behind the other."""

    def __init__(self, parts: Rows[KVCache]):
        self._parts = parts

    @property
    def pages(self) -> list[int]:
        return [page for part in self._parts for page in part.pages]

    @property
    def changed(self) -> range:
        return range(len(self.pages))

    def bind(self, layer: int, pages: torch.Tensor) -> None:
        for part, own in zip(self._parts, pages.split([len(part.pages) for part in self._parts]), strict=True):
            part.bind(layer, own)

    def unbind(self, layer: int) -> None:
        for part in self._parts:
            part.unbind(layer)

    def close(self) -> None:
        for part in self._parts:
            part.close()
