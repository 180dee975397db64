"""Traces of runs as Chrome trace events: a JSON array for ui.perfetto.dev and chrome://tracing. Each start and each
worker writes its own file. It closes the array after every pass, so that the file is valid JSON, except if the process
is killed during a write. Errors of traces never stop a run.

Second 0 of a file is its first action. Predicted passes follow one another on a clock of their own, each under the name
of the measured pass that it predicts.
"""

import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.closing import Closing
from runtime.errors import ConfigError
from runtime.resources import Resource
from runtime.trace import Span, Trace, TracedPass

from ..files.named import publish_named
from ..files.publishing import read_regular_file, write_all

if TYPE_CHECKING:  # importing the planner takes long
    from runtime.plan.cost.simulator import SimulatedPass

MAX_TRACKS = 1000  # per row; thread ids are row * MAX_TRACKS + track
RUN, PREDICTED = "Weightstream", "Weightstream, predicted"  # process names in viewers
PROCESSES = {RUN: 1, PREDICTED: 2}  # process ids
PASS = "pass"  # category of passes, which are a row of their own
PASS_ROW = len(Resource)
STAGE = re.compile(r"[a-z]+ (\d+)")


class Tracks:
    """Assigns spans to tracks of their rows, so that spans of a track do not overlap: viewers would drop them."""

    def __init__(self) -> None:
        self._ends: dict[Resource, list[int]] = {row: [] for row in Resource}

    def place(self, span: Span) -> int:
        """Returns the first track of the row that is free at the span's begin, but for errors of rounding. Call in
        order of begin."""
        ends, begin = self._ends[span.resource], round(span.begin * 1e9)
        for track, end in enumerate(ends):
            if end <= begin:
                ends[track] = round(span.end * 1e9)
                return track
        ends.append(round(span.end * 1e9))
        return min(len(ends), MAX_TRACKS) - 1


class TraceEvents:
    """Formats the events of one file, under one of `PROCESSES`. `begin`: time of the file's origin, in seconds; None:
    the first event. `trace` has the names of stages."""

    def __init__(self, process: str, trace: Trace, begin: float | None = None):
        self._process, self._number, self._trace, self._begin = process, PROCESSES[process], trace, begin
        self._tracks, self._named = Tracks(), set[int]()

    def format_header(self) -> list[str]:
        """Formats the events that name the process and every row."""
        rows = (row for row in Resource if row is not Resource.host_memory)
        passes = self._event_of_name("thread_name", PASS_ROW * MAX_TRACKS, "passes")
        names = [self._event_of_name("process_name", 0, self._process), passes]
        return names + [self._track_name(row, 0) for row in rows]

    def format_spans(self, spans: Sequence[Span], passes: Sequence[TracedPass] = ()) -> list[str]:
        """Formats spans and passes, in any order. None may begin before the first of an earlier call."""
        if self._begin is None:
            self._begin = min((each.begin for each in (*spans, *passes)), default=None)
        origin = self._begin or 0.0
        shifted = [each._replace(begin=each.begin - origin, end=each.end - origin) for each in spans]
        events = [self._pass_event(each._replace(begin=each.begin - origin, end=each.end - origin)) for each in passes]
        return events + [event for span in sorted(shifted, key=attrgetter("begin")) for event in self._events(span)]

    def _events(self, span: Span) -> list[str]:
        """The event of a span, after that of its track's name if new. Formatted by hand, since there is one per action:
        1.7 us instead of 5.6 us with `json.dumps`."""
        track = self._tracks.place(span)
        tid = _tid(span.resource, track)
        event = self._event(json.dumps(span.name), span.resource.value, span, tid, self._arguments(span))
        return [event] if tid in self._named else [self._track_name(span.resource, track), event]

    def _pass_event(self, each: TracedPass) -> str:
        rows = f'"rows": {each.num_rows}' if each.num_rows else ""
        return self._event(json.dumps(each.name), PASS, each, PASS_ROW * MAX_TRACKS, rows)

    def _event(self, name: str, category: str, timed: Span | TracedPass, tid: int, arguments: str) -> str:
        begin, end = round(timed.begin * 1e9), round(timed.end * 1e9)
        times = f'"ts": {begin / 1e3:.3f}, "dur": {(end - begin) / 1e3:.3f}'
        more = f', "args": {{{arguments}}}' if arguments else ""
        head = f'"name": {name}, "cat": "{category}", "ph": "X", {times}'
        return f'{{{head}, "pid": {self._number}, "tid": {tid}{more}}}'

    def _arguments(self, span: Span) -> str:
        """What a viewer shows of a selected span: stage, bytes and rows, as far as known."""
        match, names = STAGE.match(span.name), self._trace.stage_names
        index = int(match[1]) if match is not None else len(names)
        stage = f'"stage": {json.dumps(names[index])}' if index < len(names) else ""
        num_bytes = f'"bytes": {span.num_bytes}' if span.num_bytes else ""
        rows = f'"rows": {span.num_rows}' if span.num_rows else ""
        return ", ".join(text for text in (stage, num_bytes, rows) if text)

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
    """The file of a trace, as a context manager."""

    def __init__(self, folder: Path, trace: Trace, name: str = "start"):
        """Creates `<folder>/<name>-00000.json`, or the next free number."""
        self._trace, self._num_passes = trace, 0
        self._events, self._predicted = TraceEvents(RUN, trace), TraceEvents(PREDICTED, trace, 0.0)
        self._predicted_end: float | None = None  # on the clock of predictions
        self._end = 0  # of the last event
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

    def write(self, predicted: "SimulatedPass | None" = None) -> None:
        """Appends what the trace has collected, and the prediction of its last pass, and closes the array. On a disk
        error, logs a warning and ignores further calls."""
        spans, passes = self._trace.take(), self._trace.take_passes()
        if self._descriptor < 0 or not (spans or passes):
            return
        first, self._num_passes = self._num_passes, self._num_passes + len(passes)
        passes = [each._replace(name=f"{each.name} pass {number}") for number, each in enumerate(passes, start=first)]
        events = self._events.format_spans(spans, passes)
        if predicted is not None and passes:
            events += self._format_predicted(predicted, passes[-1])
        try:
            self._append(BETWEEN, events)
        except OSError as error:
            self._give_up(self.path, error)

    def _format_predicted(self, predicted: "SimulatedPass", measured: TracedPass) -> list[str]:
        """The events of a predicted pass, which begins at the end of the one before."""
        head = list[str]()
        if self._predicted_end is None:
            head, first = self._predicted.format_header(), min(span.begin for span in predicted.spans)
            self._predicted_end = predicted.begin - min(first, predicted.begin)  # its reads may begin before the pass
        offset = self._predicted_end - predicted.begin
        self._predicted_end = predicted.end + offset
        spans = [Span(s.resource, str(s.action), s.begin + offset, s.end + offset) for s in predicted.spans]
        traced = measured._replace(begin=predicted.begin + offset, end=self._predicted_end)
        return head + self._predicted.format_spans(spans, [traced])

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
    """Yields a function that writes what `trace` has collected, and its argument, the prediction of the last pass. The
    end of the context writes the rest, including that of an interrupted pass. With `is_worker` the file is named by
    host and process. Does nothing without a trace."""
    if trace is None:
        yield lambda predicted=None: None
        return
    name = f"worker-{re.sub(r'[^A-Za-z0-9.-]', '-', socket.gethostname())}-{os.getpid()}" if is_worker else "start"
    with TraceFile(folder, trace, name) as file:
        try:
            yield file.write
        finally:
            file.write()


def publish_trace(
    path: Path, process: str, spans: Sequence[Span], passes: Sequence[TracedPass], stage_names: Sequence[str] = ()
) -> None:
    """Publishes a complete trace file; replaces an older one. Raises OutputError."""
    trace = Trace()
    trace.stage_names = stage_names
    events = TraceEvents(process, trace, 0.0)
    data = OPEN + _lines([*events.format_header(), *events.format_spans(spans, passes)]) + CLOSE
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


@dataclass(frozen=True, kw_only=True)
class TracedProcess:
    """The spans and passes of a trace file under one of `PROCESSES`, on its clock."""

    spans: Sequence[Span] = field(default_factory=list)
    passes: Sequence[TracedPass] = field(default_factory=list)

    @property
    def begin(self) -> float:
        return min((each.begin for each in (*self.spans, *self.passes)), default=0.0)

    @property
    def end(self) -> float:
        return max((each.end for each in (*self.spans, *self.passes)), default=0.0)


def read_trace(path: Path) -> TracedProcess:
    """The measured part of a trace file. Raises ConfigError if it is not a trace."""
    return next(iter(read_processes(path).values()), TracedProcess())


def read_processes(path: Path) -> dict[str, TracedProcess]:
    """The content of a trace file by process name, measured before predicted. Raises ConfigError for other files."""
    try:
        events = json.loads(read_regular_file(path)[0])
        if not isinstance(events, list):
            raise ValueError("not an array of events")
        processes = dict[str, TracedProcess]()
        for process, number in PROCESSES.items():
            found = [event for event in events if event["pid"] == number]
            timed = [event for event in found if event["ph"] == "X"]
            if found:
                processes[process] = TracedProcess(
                    spans=[Span(Resource(e["cat"]), str(e["name"]), *_seconds(e)) for e in timed if e["cat"] != PASS],
                    passes=[TracedPass(str(e["name"]), *_seconds(e)) for e in timed if e["cat"] == PASS],
                )
        return processes
    except OSError as error:
        raise ConfigError(f"cannot read run={path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"run={path} is not a trace of Weightstream, or truncated ({error!r})") from error


def _seconds(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def read_all(paths: Sequence[Path]) -> list[tuple[Path, dict[str, TracedProcess]]]:
    """`read_processes` of each file. Skips truncated files of killed workers with a warning. Raises ConfigError if
    none can be read."""
    traces, errors = list[tuple[Path, dict[str, TracedProcess]]](), list[ConfigError]()
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
