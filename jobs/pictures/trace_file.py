"""Trace files of runs: Chrome trace events, a JSON array for ui.perfetto.dev and chrome://tracing.

A span is an action with its begin and end. Spans of a resource are a row of the viewer; spans that overlap are on
several tracks of the row. Each start and each worker of a run writes a file of its own. The array is closed after every
pass, so that the file is valid JSON, except if the process is killed during a write. An error while writing a trace
never stops the run.
"""

import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from runtime.closing import Closing
from runtime.errors import ConfigError
from runtime.resources import Resource
from runtime.trace import Span, Trace

from ..files.named import publish_named
from ..files.publishing import read_regular_file, write_all

MAX_TRACKS = 1000  # of a row; the thread id of an event is row * MAX_TRACKS + track
RUN, PREDICTED = "Weightstream", "Weightstream, predicted"  # process names in viewers
PROCESSES = {RUN: 1, PREDICTED: 2}  # process ids by name


class Tracks:
    """Assigns spans to tracks of their rows, so that spans of a track do not overlap: viewers would drop them."""

    def __init__(self) -> None:
        self._ends: dict[Resource, list[float]] = {row: [] for row in Resource}

    def place(self, span: Span) -> int:
        """Returns the first track of the row that is free when the span begins. Spans must be placed in order of their
        begin."""
        ends = self._ends[span.resource]
        for track, end in enumerate(ends):
            if end <= span.begin:
                ends[track] = span.end
                return track
        ends.append(span.end)
        return min(len(ends), MAX_TRACKS) - 1


class TraceEvents:
    """Formats the events of a process of `PROCESSES`. `begin`: the time, in seconds, from which the file counts."""

    def __init__(self, process: str, begin: float):
        self._process, self._number, self._begin = process, PROCESSES[process], begin
        self._tracks, self._named = Tracks(), set[int]()

    def format_header(self) -> list[str]:
        """Formats the events that name the process and every row."""
        rows = (row for row in Resource if row is not Resource.host_memory)
        return [self._event_of_name("process_name", 0, self._process), *(self._track_name(row, 0) for row in rows)]

    def format_spans(self, spans: Sequence[Span]) -> list[str]:
        return [event for span in sorted(spans, key=lambda span: span.begin) for event in self._events(span)]

    def _events(self, span: Span) -> list[str]:
        """The event of a span. If its track is new, an event with the name of the track comes before. Formatted without
        `json.dumps`, which takes 5.6 us instead of 1.7 us: there is an event for each action."""
        row, name, begin, end = span
        track = self._tracks.place(span)
        tid = _tid(row, track)
        event = (
            f'{{"name": {json.dumps(name)}, "cat": "{row.value}", "ph": "X", "ts": {(begin - self._begin) * 1e6:.3f}, '
            f'"dur": {(end - begin) * 1e6:.3f}, "pid": {self._number}, "tid": {tid}}}'
        )
        return [event] if tid in self._named else [self._track_name(row, track), event]

    def _track_name(self, row: Resource, track: int) -> str:
        tid = _tid(row, track)
        self._named.add(tid)
        return self._event_of_name("thread_name", tid, row.value if track == 0 else f"{row.value} {track + 1}")

    def _event_of_name(self, kind: str, tid: int, name: str) -> str:
        return f'{{"name": "{kind}", "ph": "M", "pid": {self._number}, "tid": {tid}, "args": {{"name": "{name}"}}}}'


def _tid(row: Resource, track: int) -> int:
    return row.number * MAX_TRACKS + track


log = logging.getLogger(__name__)
OPEN, BETWEEN, CLOSE = b"[\n", b",\n", b"\n]\n"


class TraceFile(Closing):
    """A trace file that is written during a run. A context manager. `begin`: as `Trace.begin`, the time, in seconds,
    from which the file counts."""

    def __init__(self, folder: Path, begin: float, name: str = "start"):
        """Creates `<folder>/<name>-00000.json`, or a file with the next free number."""
        self._events, self._predicted = TraceEvents(RUN, begin), TraceEvents(PREDICTED, begin)
        self._has_predicted = False
        self._end = 0  # offset in the file, after the last event
        self._descriptor = -1
        try:
            folder.mkdir(exist_ok=True)
            for number in count():
                self.path = folder / f"{name}-{number:05d}.json"
                with suppress(FileExistsError):  # O_EXCL: starts and workers may try the same number
                    self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                    break
            self._append(OPEN, self._events.format_header())
        except OSError as error:
            self._give_up(folder, error)

    def write(self, spans: Sequence[Span], predicted: Sequence[Span] = ()) -> None:
        """Appends spans and closes the array. `predicted`: spans of a separate process in viewers. On a disk error,
        logs a warning and ignores later calls."""
        if self._descriptor < 0 or not (spans or predicted):
            return
        head = self._predicted.format_header() if predicted and not self._has_predicted else []
        self._has_predicted |= bool(predicted)
        try:
            self._append(BETWEEN, [*self._events.format_spans(spans), *head, *self._predicted.format_spans(predicted)])
        except OSError as error:
            self._give_up(self.path, error)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.close(descriptor)
            except OSError as error:
                log.warning("%s: the trace may lack its end: %s", self.path, error.strerror or error)

    def _append(self, before: bytes, events: Sequence[str]) -> None:
        data = before + _lines(events)
        _write(self._descriptor, data + CLOSE, self._end)  # overwrites the end of the array
        self._end += len(data)

    def _give_up(self, path: Path, error: OSError) -> None:
        log.warning("%s: tracing stopped: %s", path, error.strerror or error)
        with suppress(OSError):  # restore the array's end, which the failed write has overwritten
            if self._end:
                os.ftruncate(self._descriptor, self._end)
                _write(self._descriptor, CLOSE, self._end)
        self.close()


@contextmanager
def tracing(folder: Path, trace: Trace | None, *, is_worker: bool = False) -> Iterator[Callable[..., None]]:
    """Yields a function that writes the spans which `trace` has collected, and predicted spans, its argument. At the
    end of the context, writes remaining spans, such as those of an interrupted pass. `is_worker`: the file name has
    host and process id. If `trace` is None, writes nothing."""
    if trace is None:
        yield lambda predicted=(): None
        return
    name = f"worker-{re.sub(r'[^A-Za-z0-9.-]', '-', socket.gethostname())}-{os.getpid()}" if is_worker else "start"
    with TraceFile(folder, trace.begin, name) as file:
        try:
            yield lambda predicted=(): file.write(trace.take(), predicted)
        finally:
            file.write(trace.take())


def publish_trace(path: Path, process: str, spans: Sequence[Span]) -> None:
    """Writes a trace file with all `spans`. Replaces an older file. Raises OutputError."""
    events = TraceEvents(process, 0.0)
    data = OPEN + _lines([*events.format_header(), *events.format_spans(spans)]) + CLOSE
    publish_named(path, lambda file: write_all(file, data))


def find_trace_files(path: Path) -> list[Path]:
    """Returns the file `path`, or all trace files in `path`: a run, a chat with a run for each turn, or a folder of
    traces. Raises ConfigError if there is none."""
    if not path.is_dir():
        return [path]
    files = [file for folder in (".", "trace", "turn-*/trace") for file in sorted(path.glob(f"{folder}/*-?????.json"))]
    if not files:
        raise ConfigError(f"run={path} has no trace: start the run with trace=true")
    return files


def read_trace(path: Path) -> list[Span]:
    """The measured spans of a trace file, in seconds after its begin. Raises ConfigError if the file is not a trace."""
    return next(iter(read_processes(path).values()), [])


def read_processes(path: Path) -> dict[str, list[Span]]:
    """The spans of a trace file by process name, first measured and then predicted ones. Raises ConfigError if the file
    is not a trace."""
    try:
        events = json.loads(read_regular_file(path)[0])
        if not isinstance(events, list):
            raise ValueError("not an array of events")
        return {
            process: [
                Span(Resource(event["cat"]), str(event["name"]), begin := event["ts"] / 1e6, begin + event["dur"] / 1e6)
                for event in events
                if event["ph"] == "X" and event["pid"] == number
            ]
            for process, number in PROCESSES.items()
            if any(event["pid"] == number for event in events)
        }
    except OSError as error:
        raise ConfigError(f"cannot read run={path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"run={path} is not a trace of Weightstream, or truncated ({error!r})") from error


def read_all(paths: Sequence[Path]) -> list[tuple[Path, dict[str, list[Span]]]]:
    """The path and the result of `read_processes` for each file. Skips truncated files of killed workers with a
    warning. Raises ConfigError if no file can be read."""
    traces, errors = list[tuple[Path, dict[str, list[Span]]]](), list[ConfigError]()
    for path in paths:
        try:
            traces.append((path, read_processes(path)))
        except ConfigError as error:
            errors.append(error)
    if not traces:
        raise errors[0]
    for error in errors:
        log.warning("skipped: %s", error)
    return traces


def _lines(events: Sequence[str]) -> bytes:
    return ",\n".join(events).encode()


def _write(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
