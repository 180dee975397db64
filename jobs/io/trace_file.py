"""A run's trace as Chrome trace events, a JSON array that ui.perfetto.dev and chrome://tracing open.

Each start of a run writes a file of its own, and closes it after every pass: what is there is valid JSON at all times,
except that a process killed in the middle of a write leaves a cut tail. Losing a trace never stops a run.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from runtime.closing import Closing
from runtime.errors import ConfigError
from runtime.trace import Row, Span, Trace

log = logging.getLogger(__name__)
ROWS = tuple(Row)
BETWEEN, CLOSE = b",\n", b"\n]\n"
MAX_TRACKS = 1000  # of a row: what tells the tracks of two rows apart
PROCESS = 1


class Tracks:
    """Spans of one row may overlap, those of one track may not: viewers drop what does. A row's first track is enough
    for spans that follow one another."""

    def __init__(self) -> None:
        self._ends: dict[Row, list[float]] = {row: [] for row in ROWS}

    def place(self, span: Span) -> int:
        """The first track of its row that is free when it begins. Spans that begin earlier should come earlier."""
        ends = self._ends[span.row]
        for track, end in enumerate(ends):
            if end <= span.begin:
                ends[track] = span.end
                return track
        ends.append(span.end)
        return min(len(ends), MAX_TRACKS) - 1


class TraceFile(Closing):
    """A context manager. `begin` is the second that becomes 0 in the file, as `Trace.begin`."""

    def __init__(self, folder: Path, begin: float):
        """Makes `<folder>/start-00000.json`, or the next number that is free."""
        self._begin, self._tracks, self._named = begin, Tracks(), set[int]()
        self._end = 0  # of the last event
        self._descriptor = -1
        try:
            folder.mkdir(exist_ok=True)
            self.path, self._descriptor = _create(folder)
            self._append(b"[\n", [_named("process_name", 0, "Millrace"), *(self._name(row, 0) for row in ROWS)])
        except OSError as error:
            self._give_up(folder, error)

    def write(self, spans: Sequence[Span]) -> None:
        """Adds them and closes the array. On an error of the disk: logs it, and takes no more from then on."""
        if self._descriptor < 0 or not spans:
            return
        events = [event for span in sorted(spans, key=lambda span: span.begin) for event in self._events(span)]
        try:
            self._append(BETWEEN, events)
        except OSError as error:
            self._give_up(self.path, error)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.close(descriptor)
            except OSError as error:
                log.warning("%s: the end of the trace may be missing: %s", self.path, error.strerror or error)

    def _events(self, span: Span) -> list[str]:
        """The span, behind its track's name if that is new. Formatted by hand, for there is one for each action of a
        run: 1.7 us against 5.6 us with `json.dumps` of the whole."""
        row, name, begin, end = span
        track = self._tracks.place(span)
        tid = _tid(row, track)
        event = (
            f'{{"name": {json.dumps(name)}, "cat": "{row.value}", "ph": "X", "ts": {(begin - self._begin) * 1e6:.3f}, '
            f'"dur": {(end - begin) * 1e6:.3f}, "pid": {PROCESS}, "tid": {tid}}}'
        )
        return [event] if tid in self._named else [self._name(row, track), event]

    def _name(self, row: Row, track: int) -> str:
        tid = _tid(row, track)
        self._named.add(tid)
        return _named("thread_name", tid, row.value if track == 0 else f"{row.value} {track + 1}")

    def _append(self, before: bytes, events: Sequence[str]) -> None:
        data = before + ",\n".join(events).encode()
        _write(self._descriptor, data + CLOSE, self._end)
        self._end += len(data)

    def _give_up(self, path: Path, error: OSError) -> None:
        log.warning("%s: no trace is written from here on: %s", path, error.strerror or error)
        with suppress(OSError):  # put the end back that the failed write went over
            if self._end:
                os.ftruncate(self._descriptor, self._end)
                _write(self._descriptor, CLOSE, self._end)
        self.close()


@contextmanager
def tracing(folder: Path, trace: Trace | None) -> Iterator[Callable[[], None]]:
    """Inside it, each call of what it gives writes all that `trace` has collected; the end of it writes the rest, also
    of a pass that was interrupted. Without a trace nothing is made and nothing happens."""
    if trace is None:
        yield lambda: None
        return
    with TraceFile(folder, trace.begin) as file:
        try:
            yield lambda: file.write(trace.take())
        finally:
            file.write(trace.take())


def read_trace(path: Path) -> list[Span]:
    """The spans in a file of `TraceFile`, in seconds since its run's begin. Raises ConfigError when it is none."""
    try:
        events = json.loads(path.read_bytes())
        if not isinstance(events, list):
            raise ValueError("not an array of events")
        found = [event for event in events if event["ph"] == "X"]
        return [Span(Row(e["cat"]), str(e["name"]), e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in found]
    except OSError as error:
        raise ConfigError(f"path={path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"path={path} is no trace of jobs.generate, or cut short ({error!r})") from error


def _tid(row: Row, track: int) -> int:
    return ROWS.index(row) * MAX_TRACKS + track


def _named(kind: str, tid: int, name: str) -> str:
    return f'{{"name": "{kind}", "ph": "M", "pid": {PROCESS}, "tid": {tid}, "args": {{"name": "{name}"}}}}'


def _create(folder: Path) -> tuple[Path, int]:
    for number in count():
        path = folder / f"start-{number:05d}.json"
        with suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    raise AssertionError("numbers do not end")


def _write(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
