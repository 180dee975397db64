"""The picture shows the window: each span in it once, cut at its edges, none beneath another; as SVG or PNG."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from jobs.pictures.trace_file import TracedProcess
from jobs.pictures.trace_picture import COLORS, Bar, TimeWindow, draw, draw_panels, lay_out
from runtime.plan.schedule.schedule import Op
from runtime.resources import Resource
from runtime.trace import Span, TracedPass

SPANS = [
    Span(Resource.disk, "read 1", 0.0, 1.0),
    Span(Resource.disk, "read 2", 0.5, 1.5),
    Span(Resource.compute, "run 1.0", 1.0, 2.0),
    Span(Resource.compute, "run 1.1", 2.0, 3.0),
    Span(Resource.cpu_attention, "attend <1> & 2", 1.0, 2.5),
]
PASSES = [TracedPass("prefill pass 0", 0.5, 1.5), TracedPass("decode pass 1", 2.0, 3.0)]
TRACED = TracedProcess(spans=SPANS, passes=PASSES)
ALL = TimeWindow(begin=0.0, end=3.0)


def bars(window: TimeWindow) -> dict[str, Bar]:
    return {bar.span.name: bar for lane in lay_out(TRACED, window) for bar in lane.bars}


def test_every_span_has_its_bar_at_its_time() -> None:
    assert {name: (bar.begin, bar.end) for name, bar in bars(ALL).items()} == {s.name: (s.begin, s.end) for s in SPANS}


def test_spans_that_overlap_lie_beneath_each_other_and_those_in_turn_side_by_side() -> None:
    found = bars(ALL)
    assert found["read 1"].top + 1 == found["read 2"].top
    assert found["run 1.0"].top == found["run 1.1"].top > found["read 2"].top + 1


def test_a_window_cuts_what_reaches_out_of_it() -> None:
    found = bars(TimeWindow(begin=1.2, end=1.8))
    assert set(found) == {"read 2", "run 1.0", "attend <1> & 2"}
    assert all(1.2 <= bar.begin < bar.end <= 1.8 for bar in found.values())


def test_rows_say_what_they_are_and_how_busy_they_were() -> None:
    """Over the time in passes, as in the summary: readers add up, and time between passes does not count."""
    lanes = [(lane.resource, round(lane.busy, 2)) for lane in lay_out(TRACED, ALL)]
    assert lanes == [(Resource.disk, 1.0), (Resource.compute, 1.0), (Resource.cpu_attention, 0.75)]
    part = [round(lane.busy, 2) for lane in lay_out(TRACED, TimeWindow(begin=1.0, end=2.5))]
    assert part == [0.5, 1.5, 1.5], "half a second of each pass"
    without = [round(lane.busy, 2) for lane in lay_out(TracedProcess(spans=SPANS), ALL)]
    assert without == [0.67, 0.67, 0.5], "a trace without passes: over the window"


def test_a_row_without_a_span_in_the_window_stays() -> None:
    assert [lane.busy for lane in lay_out(TRACED, TimeWindow(begin=2.6, end=3.0))] == [0, 1, 0]


def test_an_svg_has_the_words_of_the_picture_as_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.svg"
    draw(path, TRACED, [ALL, TimeWindow(begin=1.0, end=1.5, title="closer")])
    texts = {text.text for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}
    assert {"disk", "compute", "CPU attention", "100%", "75%", "time [s]", "time [ms]", "closer"} <= texts
    assert {"prefill pass 0", "decode pass 1"} <= texts
    assert "no action in this window" not in texts
    assert {"read 1", "attend <1> & 2", "read", "run", "attend"} <= texts


def test_a_window_without_actions_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.svg"
    draw_panels(path, [(TRACED, TimeWindow(begin=5.0, end=6.0)), (TracedProcess(), ALL)])
    assert path.read_text().count(">no action in this window<") == 2


def test_a_predicted_window_has_the_passes_of_the_measured_one() -> None:
    """Predicted passes of two seconds each, with a read half a second before the first."""
    predicted = TracedProcess(
        spans=[Span(Resource.disk, "read 1", 0.0, 1.0)],
        passes=[TracedPass("prefill pass 0", 0.5, 2.5), TracedPass("decode pass 1", 2.5, 4.5)],
    )

    def shown(begin: float, end: float) -> tuple[float, float] | None:
        window = TimeWindow(begin=begin, end=end).predicted(TRACED, predicted)
        return None if window is None else (window.begin, window.end)

    assert shown(0.0, 3.0) == (0.0, 4.5)
    assert shown(1.0, 2.5) == (1.5, 3.5), "from the middle of the one to the middle of the other"
    assert shown(1.7, 2.0) == shown(1.5, 1.9) is None, "between two passes"
    assert shown(2.0, 2.25) == (2.5, 3.0)


def test_the_same_spans_make_the_same_file(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        draw(tmp_path / name, TRACED, [ALL])
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_the_suffix_says_what_is_written(tmp_path: Path) -> None:
    draw(tmp_path / "trace.png", TRACED, [ALL])
    data = (tmp_path / "trace.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == 1200


@pytest.mark.parametrize("op", [op.value for op in Op if op not in (Op.free, Op.sync)])
def test_every_op_has_a_color_of_its_own(op: str) -> None:
    assert [other for other in COLORS if COLORS[other] == COLORS[op]] == [op]
