"""Spans as Chrome trace events: lines of JSON that ui.perfetto.dev and chrome://tracing take, in an array."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.resources import Resource
from runtime.trace import Span

MAX_TRACKS = 1000  # of a row: what tells the tracks of two rows apart


@dataclass(frozen=True, kw_only=True)
class Process:
    """What viewers show spans under; files of different numbers can be put into one."""

    name: str
    number: int


RUN = Process(name="Millrace", number=1)
PREDICTED = Process(name="Millrace, predicted", number=2)


class Tracks:
    """Spans of one row may overlap, those of one track may not: viewers drop what does. A row's first track is enough
    for spans that follow one another."""

    def __init__(self) -> None:
        self._ends: dict[Resource, list[float]] = {row: [] for row in Resource}

    def place(self, span: Span) -> int:
        """The first track of its row that is free when it begins. Spans that begin earlier should come earlier."""
        ends = self._ends[span.resource]
        for track, end in enumerate(ends):
            if end <= span.begin:
                ends[track] = span.end
                return track
        ends.append(span.end)
        return min(len(ends), MAX_TRACKS) - 1


class TraceEvents:
    """The events of one file. `begin` is the second that becomes 0 in it."""

    def __init__(self, process: Process, begin: float):
        self._process, self._begin = process, begin
        self._tracks, self._named = Tracks(), set[int]()

    def head(self) -> list[str]:
        """The names of the process and of every row that a span can be on."""
        rows = (row for row in Resource if row is not Resource.host_memory)
        return [self._event_of_name("process_name", 0, self._process.name), *(self._name(row, 0) for row in rows)]

    def of(self, spans: Sequence[Span]) -> list[str]:
        return [event for span in sorted(spans, key=lambda span: span.begin) for event in self._events(span)]

    def _events(self, span: Span) -> list[str]:
        """The span, behind its track's name if that is new. Formatted by hand, for there is one for each action of a
        run: 1.7 us against 5.6 us with `json.dumps` of the whole."""
        row, name, begin, end = span
        track = self._tracks.place(span)
        tid = _tid(row, track)
        event = (
            f'{{"name": {json.dumps(name)}, "cat": "{row.value}", "ph": "X", "ts": {(begin - self._begin) * 1e6:.3f}, '
            f'"dur": {(end - begin) * 1e6:.3f}, "pid": {self._process.number}, "tid": {tid}}}'
        )
        return [event] if tid in self._named else [self._name(row, track), event]

    def _name(self, row: Resource, track: int) -> str:
        tid = _tid(row, track)
        self._named.add(tid)
        return self._event_of_name("thread_name", tid, row.value if track == 0 else f"{row.value} {track + 1}")

    def _event_of_name(self, kind: str, tid: int, name: str) -> str:
        number = self._process.number
        return f'{{"name": "{kind}", "ph": "M", "pid": {number}, "tid": {tid}, "args": {{"name": "{name}"}}}}'


def _tid(row: Resource, track: int) -> int:
    return row.number * MAX_TRACKS + track
