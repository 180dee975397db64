"""What is on disk is whole JSON after every write; spans come back as they were; a full disk stops no run."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs.pictures import trace_file
from jobs.pictures.trace_file import PREDICTED, RUN, TraceFile, Tracks, read_processes, read_trace, tracing
from runtime.errors import ConfigError
from runtime.plan.cost.simulator import SimulatedPass, SimulatedSpan
from runtime.plan.schedule.actions import Action, Op
from runtime.resources import Resource
from runtime.trace import Span, Trace, TracedPass

BEGIN = 100.0
ROWS = [row for row in Resource if row is not Resource.host_memory]  # which nothing is on by itself
SPANS = [Span(row, f"{row.name} {number}", BEGIN + number, BEGIN + number + 0.5) for number in range(3) for row in ROWS]


@contextmanager
def opened(folder: Path) -> Iterator[tuple[TraceFile, Callable[[Sequence[Span]], None]]]:
    """A trace file and a function that reports spans and writes them."""
    trace = Trace()
    with TraceFile(folder, trace) as file:

        def write(spans: Sequence[Span]) -> None:
            for span in spans:
                trace.span(*span[:4], num_bytes=span.num_bytes, num_rows=span.num_rows)
            file.write()

        yield file, write


def events(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text())


def test_it_is_whole_json_after_every_write(tmp_path: Path) -> None:
    with opened(tmp_path / "trace") as (file, write):
        for number, span in enumerate(SPANS):
            assert len(read_trace(file.path).spans) == number
            write([span])
    assert len(read_trace(file.path).spans) == len(SPANS)


def test_spans_come_back_in_seconds_since_the_begin(tmp_path: Path) -> None:
    with opened(tmp_path / "trace") as (file, write):
        write(SPANS[:4])
        write(SPANS[4:])
    for found, span in zip(read_trace(file.path).spans, SPANS, strict=True):
        assert found[:2] == span[:2]
        assert found[2:4] == pytest.approx((span.begin - BEGIN, span.end - BEGIN))


def test_every_row_has_its_name_in_the_order_of_rows(tmp_path: Path) -> None:
    with opened(tmp_path / "trace") as (file, write):
        write(SPANS)
    named = {e["tid"]: e["args"] for e in events(file.path) if e["name"] == "thread_name"}
    assert [named[tid] for tid in sorted(named, key=str)] == [{"name": row.value} for row in ROWS] + [
        {"name": "passes"}
    ]
    spans = [e for e in events(file.path) if e["ph"] == "X"]
    assert {e["tid"] for e in spans} == {tid for tid, args in named.items() if args != {"name": "passes"}}
    assert all(isinstance(e["dur"], float) and e["dur"] >= 0 for e in spans)


def test_spans_that_overlap_lie_on_tracks_of_their_own(tmp_path: Path) -> None:
    """Viewers drop what overlaps on one track, also when one span is told of long after the others."""
    spans = [Span(Resource.disk, "read 1", BEGIN, BEGIN + 2), Span(Resource.disk, "read 2", BEGIN + 1, BEGIN + 3)]
    late = Span(Resource.disk, "read 3", BEGIN + 2.5, BEGIN + 4)
    with opened(tmp_path / "trace") as (file, write):
        write(spans)
        write([late])
    tids = [e["tid"] for e in events(file.path) if e["ph"] == "X"]
    assert tids[0] != tids[1]
    assert tids[2] == tids[0]
    names = [e["args"] for e in events(file.path) if e["name"] == "thread_name" and e["tid"] == tids[1]]
    assert names == [{"name": "disk 2"}]


def test_spans_in_turn_share_a_track_also_with_errors_of_rounding() -> None:
    tracks = Tracks()
    assert {tracks.place(Span(Resource.compute, "run 0.0", begin, begin + 1 + 1e-12)) for begin in range(5)} == {0}
    assert tracks.place(Span(Resource.compute, "run 0.0", 4.9, 6)) == 1


def test_a_file_begins_at_its_first_action(tmp_path: Path) -> None:
    with opened(tmp_path / "trace") as (file, write):
        write(
            [
                Span(Resource.compute, "run 0.0", BEGIN + 7, BEGIN + 8),
                Span(Resource.disk, "read 1", BEGIN + 5, BEGIN + 6),
            ]
        )
        write([Span(Resource.compute, "run 1.0", BEGIN + 9, BEGIN + 9.5)])
    assert [(span.name, span.begin) for span in read_trace(file.path).spans] == [
        ("read 1", 0.0), ("run 0.0", 2.0), ("run 1.0", 4.0),
    ]  # fmt: skip


def test_a_selected_event_says_which_stage_and_how_many_bytes_and_rows(tmp_path: Path) -> None:
    trace = Trace()
    trace.stage_names = ["embedding", 'layer "0"']
    with TraceFile(tmp_path / "trace", trace) as file:
        trace.span(Resource.disk, "read 1#2", BEGIN, BEGIN + 1, num_bytes=794_624)
        trace.span(Resource.compute, "run 0.3", BEGIN, BEGIN + 1, num_rows=8)
        trace.span(Resource.cpu_attention, "replay", BEGIN, BEGIN + 1)
        trace.span(Resource.disk, "read 9", BEGIN, BEGIN + 1)
        trace.add_pass(TracedPass("prefill", BEGIN, BEGIN + 2, 8))
        file.write()
    found = {e["name"]: e.get("args") for e in events(file.path) if e["ph"] == "X"}
    assert found == {
        "read 1#2": {"stage": 'layer "0"', "bytes": 794_624},
        "run 0.3": {"stage": "embedding", "rows": 8},
        "replay": None,
        "read 9": None,
        "prefill pass 0": {"rows": 8},
    }


def test_predicted_passes_follow_one_another_and_carry_the_names_of_the_measured_ones(tmp_path: Path) -> None:
    """Passes of a second each; prediction says three, and reads that begin half a second before."""
    trace, action = Trace(), Action(Op.run, 0, 0)
    simulated = SimulatedPass(
        10.0,
        13.0,
        [
            SimulatedSpan(Resource.disk, Action(Op.read, 1), 9.5, 10.5),
            SimulatedSpan(Resource.compute, action, 10.0, 11.0),
            SimulatedSpan(Resource.compute, action, 11.0, 13.0),
        ],
    )
    with TraceFile(tmp_path / "trace", trace) as file:
        for number, phase in enumerate(("prefill", "decode", "decode")):
            trace.add_pass(TracedPass(phase, BEGIN + number, BEGIN + number + 1))
            file.write(simulated if number != 1 else None)
    processes = read_processes(file.path)
    assert [each[:3] for each in processes[RUN].passes] == [
        ("prefill pass 0", 0.0, 1.0), ("decode pass 1", 1.0, 2.0), ("decode pass 2", 2.0, 3.0),
    ]  # fmt: skip
    assert [each[:3] for each in processes[PREDICTED].passes] == [
        ("prefill pass 0", 0.5, 3.5),
        ("decode pass 2", 3.5, 6.5),
    ]
    computed = [span for span in processes[PREDICTED].spans if span.resource is Resource.compute]
    assert [(span.begin, span.end) for span in computed] == [(0.5, 1.5), (1.5, 3.5), (3.5, 4.5), (4.5, 6.5)]
    tids = {e["tid"] for e in events(file.path) if e.get("cat") == "compute" and e["pid"] == 2}
    assert len(tids) == 1, "no bar lies over another"


def test_each_start_has_a_file_of_its_own(tmp_path: Path) -> None:
    for number in range(2):
        with opened(tmp_path / "trace") as (file, write):
            write(SPANS)
        assert file.path.name == f"start-{number:05d}.json"


def test_an_interrupted_pass_leaves_its_spans(tmp_path: Path) -> None:
    trace = Trace()
    with pytest.raises(KeyboardInterrupt), tracing(tmp_path / "trace", trace) as write:  # noqa: PT012
        trace.span(Resource.disk, "read 1", BEGIN, BEGIN + 1)
        write()
        trace.span(Resource.disk, "read 2", BEGIN + 1, BEGIN + 2)
        raise KeyboardInterrupt
    assert [span.name for span in read_trace(tmp_path / "trace" / "start-00000.json").spans] == ["read 1", "read 2"]


def test_without_a_trace_there_is_no_folder(tmp_path: Path) -> None:
    with tracing(tmp_path / "trace", None) as write:
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_logged_once_and_leaves_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "trace") as (file, write):
        write(SPANS[:5])
        pwrite, num_calls = os.pwrite, 0

        def fill_up(descriptor: int, data: bytes, offset: int) -> int:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                return pwrite(descriptor, data[:50], offset)
            if num_calls == 2:
                raise OSError(28, "No space left on device")
            return pwrite(descriptor, data, offset)

        monkeypatch.setattr(trace_file.os, "pwrite", fill_up)
        write(SPANS[5:])
        write(SPANS[5:])
    assert len(read_trace(file.path).spans) == 5
    assert len(caplog.messages) == 1
    assert "No space left on device" in caplog.text


def test_what_the_system_takes_piece_by_piece_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, files = os.pwrite, list[TraceFile]()
    for name, most in (("whole", 1 << 30), ("pieces", 7)):
        monkeypatch.setattr(
            trace_file.os, "pwrite", lambda fd, data, offset, most=most: pwrite(fd, data[:most], offset)
        )
        with opened(tmp_path / name) as (file, write):
            write(SPANS)
        files.append(file)
    whole, pieces = files
    assert pieces.path.read_bytes() == whole.path.read_bytes()
    assert len(read_trace(pieces.path).spans) == len(SPANS)


def test_a_folder_that_cannot_be_made_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trace").write_text("in the way")
    with opened(tmp_path / "trace") as (_, write):
        write(SPANS)
    assert "tracing stopped" in caplog.text


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"ph": "X"}]', '[{"ph": "X", "cat": "moon"}]'])
def test_what_is_no_trace_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        read_trace(tmp_path / "x.json")
