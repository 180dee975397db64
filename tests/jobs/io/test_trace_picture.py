"""The picture is well-formed and shows the window: each span in it once, cut at its edges, none beneath another."""

from xml.etree import ElementTree

import pytest

from jobs.io.trace_picture import COLOURS, LEFT, RIGHT, WIDTH, draw
from runtime.plan.schedule import Op
from runtime.trace import Row, Span

SVG = "{http://www.w3.org/2000/svg}"
SPANS = [
    Span(Row.disk, "read 1", 0.0, 1.0),
    Span(Row.disk, "read 2", 0.5, 1.5),
    Span(Row.compute, "run 1.0", 1.0, 2.0),
    Span(Row.compute, "run 1.1", 2.0, 3.0),
    Span(Row.cpu_attention, "attend <1> & 2", 1.0, 2.5),
]


def parsed(begin: float, end: float) -> ElementTree.Element:
    return ElementTree.fromstring(draw(SPANS, begin=begin, end=end))


def bars(svg: ElementTree.Element) -> dict[str, tuple[float, float, float]]:
    """Left and right edge and top of each span, by its name."""
    found: dict[str, tuple[float, float, float]] = {}
    for rect in svg.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and title.text is not None:
            left = float(rect.attrib["x"])
            found[title.text.partition(":")[0]] = (left, left + float(rect.attrib["width"]), float(rect.attrib["y"]))
    return found


def test_every_span_has_its_bar_at_its_time() -> None:
    found, scale = bars(parsed(0.0, 3.0)), (WIDTH - LEFT - RIGHT) / 3.0
    assert set(found) == {span.name for span in SPANS}
    for span in SPANS:
        assert found[span.name][:2] == pytest.approx((LEFT + span.begin * scale, LEFT + span.end * scale), abs=0.02)


def test_spans_that_overlap_lie_beneath_each_other_and_those_in_turn_side_by_side() -> None:
    found = bars(parsed(0.0, 3.0))
    assert found["read 1"][2] < found["read 2"][2]
    assert found["run 1.0"][2] == found["run 1.1"][2]


def test_a_window_cuts_what_reaches_out_of_it() -> None:
    found = bars(parsed(1.2, 1.8))
    assert set(found) == {"read 2", "run 1.0", "attend <1> & 2"}
    assert all(LEFT - 0.01 <= left < right <= WIDTH - RIGHT + 0.01 for left, right, _ in found.values())


def test_rows_say_what_they_are_and_how_busy_they_were() -> None:
    texts = [text.text for text in parsed(0.0, 3.0).iter(f"{SVG}text")]
    assert [text for text in texts if text in {row.value for row in Row}] == ["disk", "compute", "CPU attention"]
    assert [text for text in texts if text is not None and text.endswith("%")] == ["50%", "67%", "50%"]


def test_the_axis_has_round_seconds_within_the_window() -> None:
    texts = [text.text or "" for text in parsed(0.25, 2.9).iter(f"{SVG}text")]
    assert [text for text in texts if text.endswith(" s")] == ["0.5 s", "1 s", "1.5 s", "2 s", "2.5 s"]


def test_every_op_has_a_colour() -> None:
    assert {op.value for op in Op} - {"free", "sync"} <= set(COLOURS)
