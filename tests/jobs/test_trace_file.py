"""What is on disk is whole JSON after every write; spans come back as they were; a full disk stops no run."""

import json
import os
from pathlib import Path

import pytest

from jobs.pictures import trace_file
from jobs.pictures.trace_file import TraceFile, Tracks, read_trace, tracing
from runtime.errors import ConfigError
from runtime.resources import Resource
from runtime.trace import Span, Trace

BEGIN = 100.0
ROWS = [row for row in Resource if row is not Resource.host_memory]  # which nothing is on by itself
SPANS = [Span(row, f"{row.name} {number}", BEGIN + number, BEGIN + number + 0.5) for number in range(3) for row in ROWS]


def events(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text())


def test_it_is_whole_json_after_every_write(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "trace", BEGIN) as file:
        for number, span in enumerate(SPANS):
            assert len(read_trace(file.path)) == number
            file.write([span])
    assert len(read_trace(file.path)) == len(SPANS)


def test_spans_come_back_in_seconds_since_the_begin(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "trace", BEGIN) as file:
        file.write(SPANS[:4])
        file.write(SPANS[4:])
    for found, span in zip(read_trace(file.path), SPANS, strict=True):
        assert found[:2] == span[:2]
        assert found[2:] == pytest.approx((span.begin - BEGIN, span.end - BEGIN))


def test_every_row_has_its_name_in_the_order_of_rows(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "trace", BEGIN) as file:
        file.write(SPANS)
    named = {e["tid"]: e["args"] for e in events(file.path) if e["name"] == "thread_name"}
    assert [named[tid] for tid in sorted(named, key=str)] == [{"name": row.value} for row in ROWS]
    spans = [e for e in events(file.path) if e["ph"] == "X"]
    assert {e["tid"] for e in spans} == set(named)
    assert all(isinstance(e["dur"], float) and e["dur"] >= 0 for e in spans)


def test_spans_that_overlap_lie_on_tracks_of_their_own(tmp_path: Path) -> None:
    """Viewers drop what overlaps on one track, also when one span is told of long after the others."""
    spans = [Span(Resource.disk, "read 1", BEGIN, BEGIN + 2), Span(Resource.disk, "read 2", BEGIN + 1, BEGIN + 3)]
    late = Span(Resource.disk, "read 3", BEGIN + 2.5, BEGIN + 4)
    with TraceFile(tmp_path / "trace", BEGIN) as file:
        file.write(spans)
        file.write([late])
    tids = [e["tid"] for e in events(file.path) if e["ph"] == "X"]
    assert tids[0] != tids[1]
    assert tids[2] == tids[0]
    names = [e["args"] for e in events(file.path) if e["name"] == "thread_name" and e["tid"] == tids[1]]
    assert names == [{"name": "disk 2"}]


def test_spans_in_turn_share_a_track() -> None:
    tracks = Tracks()
    assert {tracks.place(Span(Resource.compute, "run 0.0", begin, begin + 1)) for begin in range(5)} == {0}


def test_each_start_has_a_file_of_its_own(tmp_path: Path) -> None:
    for number in range(2):
        with TraceFile(tmp_path / "trace", BEGIN) as file:
            file.write(SPANS)
        assert file.path.name == f"start-{number:05d}.json"


def test_an_interrupted_pass_leaves_its_spans(tmp_path: Path) -> None:
    trace = Trace()
    with pytest.raises(KeyboardInterrupt), tracing(tmp_path / "trace", trace) as write:  # noqa: PT012
        trace.span(Resource.disk, "read 1", trace.begin, trace.begin + 1)
        write()
        trace.span(Resource.disk, "read 2", trace.begin + 1, trace.begin + 2)
        raise KeyboardInterrupt
    assert [span.name for span in read_trace(tmp_path / "trace" / "start-00000.json")] == ["read 1", "read 2"]


def test_without_a_trace_there_is_no_folder(tmp_path: Path) -> None:
    with tracing(tmp_path / "trace", None) as write:
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_logged_once_and_leaves_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with TraceFile(tmp_path / "trace", BEGIN) as file:
        file.write(SPANS[:5])
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
        file.write(SPANS[5:])
        file.write(SPANS[5:])
    assert len(read_trace(file.path)) == 5
    assert len(caplog.messages) == 1
    assert "No space left on device" in caplog.text


def test_what_the_system_takes_piece_by_piece_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, files = os.pwrite, list[TraceFile]()
    for name, most in (("whole", 1 << 30), ("pieces", 7)):
        monkeypatch.setattr(
            trace_file.os, "pwrite", lambda fd, data, offset, most=most: pwrite(fd, data[:most], offset)
        )
        with TraceFile(tmp_path / name, BEGIN) as file:
            file.write(SPANS)
        files.append(file)
    whole, pieces = files
    assert pieces.path.read_bytes() == whole.path.read_bytes()
    assert len(read_trace(pieces.path)) == len(SPANS)


def test_a_folder_that_cannot_be_made_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trace").write_text("in the way")
    with TraceFile(tmp_path / "trace", BEGIN) as file:
        file.write(SPANS)
    assert "tracing stopped" in caplog.text


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"ph": "X"}]', '[{"ph": "X", "cat": "moon"}]'])
def test_what_is_no_trace_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        read_trace(tmp_path / "x.json")
