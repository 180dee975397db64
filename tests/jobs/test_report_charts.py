"""The charts of a page as numbers: what a bin of time holds, how busy a resource was, where an axis ends."""

import pytest

from jobs.pictures.trace_file import TracedProcess
from jobs.record.passes import PassRow
from jobs.reporting.charts import NUM_BINS, PHASES, make_busy_strips, round_axis_limit
from jobs.reporting.page import ENVIRONMENT
from runtime.resources import Resource
from runtime.trace import Span, TracedPass
from tests.jobs.parsed_html import Parsed, outside


def test_text_is_escaped_and_markup_of_ours_is_not() -> None:
    ours = "{% macro b(text) %}<b>{{ text }}</b>{% endmacro %}"
    template = ENVIRONMENT.from_string(ours + '<p aria-label="{{ a }}">{{ c }}<br>&amp;{{ b(d) }}</p>')
    made = template.render(a='"<', c="<a>", d="x\u202e")
    assert made == '<p aria-label="&#34;&lt;">&lt;a&gt;<br>&amp;<b>x\\u202e</b></p>'


def test_bins_share_out_tokens_and_time_as_passes_lasted() -> None:
    def row(phase: str, seconds: float) -> PassRow:
        counts = {"num_sequences": 1, "real_tokens": 10, "padded_tokens": 10, "issued_tokens": 10, "useful_tokens": 10}
        prompt_tokens = 10 if phase == "prefill" else 0
        return PassRow(pass_index=0, phase=phase, seconds=seconds, prompt_tokens=prompt_tokens, **counts)  # pyright: ignore[reportArgumentType]

    prefill, decode = (phase.binned([row("prefill", 1.0), row("decode", 3.0)]) for phase in PHASES)
    quarter = NUM_BINS // 4
    assert prefill == pytest.approx([10.0] * quarter + [None] * 3 * quarter)
    assert decode == pytest.approx([None] * quarter + [10 / 3] * 3 * quarter)


SPANS = [Span(Resource.disk, "a", 1.0, 2.0), Span(Resource.disk, "b", 1.5, 2.5), Span(Resource.disk, "c", 4.0, 5.0)]


def test_a_strip_begins_at_the_first_action_and_shows_overlapping_spans_once() -> None:
    strips = make_busy_strips(TracedProcess(spans=SPANS))
    assert list(strips) == ["disk"]
    assert sum(strips["disk"].shares) / NUM_BINS == pytest.approx(2.5 / 4)
    assert strips["disk"].shares[0] == 1.0
    assert max(strips["disk"].shares) <= 1.0


def test_the_mean_of_a_strip_is_over_the_time_in_passes() -> None:
    """As in the summary of a run: time before and between passes does not count, readers add up."""
    passes = [TracedPass("prefill pass 0", 1.0, 2.5), TracedPass("decode pass 1", 4.0, 4.5)]
    assert make_busy_strips(TracedProcess(spans=SPANS, passes=passes))["disk"].mean == pytest.approx(3.0 / 2.0)


@pytest.mark.parametrize(
    ("most", "top"), [(0.0, 0.1), (0.3, 0.5), (1.0, 1.0), (99.0, 100.0), (130.0, 200.0), (2400.0, 2500.0)]
)
def test_an_axis_ends_in_a_round_number(most: float, top: float) -> None:
    assert round_axis_limit(most) == pytest.approx(top)


def test_the_check_sees_what_leads_outside() -> None:
    for text in (
        "<img src=x>", "<p onclick=y>", "<a href='//x'>", "<style>@import 'x'</style>", "<p style='background:url(x)'>",
        "<svg><use href=x></use></svg>", "<meta http-equiv=refresh content=0>", "<link rel=x>",
    ):  # fmt: skip
        assert list(outside(Parsed(text))), text
    assert list(outside(Parsed("<a href='#x'><p style='width:5%'>"))) == []
