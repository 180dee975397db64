"""What is left of a run is told by its prediction, as its passes have corrected that."""

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from jobs.record.passes import PassRow
from jobs.run.progress import Forecast, Progress, format_time_left
from runtime.batching.balance import Block
from runtime.plan.cost.predict import Prediction
from runtime.plan.cost.simulator import PhaseTime
from runtime.sequences.sequence import Completion, Encoding, FinishReason, Request, Scoring
from runtime.units import format_rounded

NUM_PROMPT, MOST = 10, 21
REQUESTS = [Request(id=str(i), prompt_ids=(1,) * NUM_PROMPT, max_new_tokens=MOST) for i in range(8)]
BLOCKS = [Block(index=b, micro_batches=((4 * b, 4 * b + 1), (4 * b + 2, 4 * b + 3))) for b in range(2)]
# 80 prompt tokens and 2 x 20 passes of decoding: 0.5 s a token, 2 s a pass; 60 s a block.
PREDICTION = Prediction(prefill=PhaseTime(num_passes=4, seconds=40.0), decode=PhaseTime(num_passes=40, seconds=80.0))
PREFILL = PassRow(
    pass_index=0, phase="prefill", num_sequences=4, real_tokens=40, padded_tokens=40, prompt_tokens=40,
    issued_tokens=4, useful_tokens=4, seconds=20.0,
)  # fmt: skip
DECODE = replace(PREFILL, phase="decode", real_tokens=4, padded_tokens=4, prompt_tokens=0, seconds=2.0)


def waves(prediction: Prediction = PREDICTION) -> Forecast:
    return Forecast(prediction, REQUESTS, BLOCKS, is_wave=True)


def open_block(forecast: Forecast, block: int, num_known: int = 0) -> None:
    forecast.open([block], dict.fromkeys(BLOCKS[block].members, num_known))


def run_block(forecast: Forecast, block: int, *, slower: float = 1.0, num_passes: int = MOST - 1) -> Iterator[float]:
    """Seconds that are left by the forecast, after each pass."""
    open_block(forecast, block)
    rows = [PREFILL, *[DECODE] * num_passes]
    for number, row in enumerate(rows):
        if number == len(rows) - 1:
            for i in BLOCKS[block].members:
                forecast.finish_row(i, num_passes + 1)
        forecast.advance(replace(row, seconds=row.seconds * slower))
        yield forecast.seconds_left


def test_a_run_as_predicted_counts_down_to_nothing_in_both_phases() -> None:
    forecast = waves()
    assert (forecast.seconds_left, forecast.share_done) == (120.0, 0.0)
    left = [*run_block(forecast, 0), *run_block(forecast, 1)]
    expected = [120.0 - sum(([20.0] + [2.0] * 20)[: n + 1]) for n in range(21)]
    assert left == pytest.approx([*expected, *(seconds - 60 for seconds in expected)])
    assert forecast.share_done == 1.0


@pytest.mark.parametrize("slower", [0.25, 3.0])
def test_what_passes_take_corrects_all_that_is_left(slower: float) -> None:
    forecast = waves()
    left = next(run_block(forecast, 0, slower=slower))
    assert left == pytest.approx(slower * 100.0)
    assert forecast.share_done == pytest.approx(20 / 120)


def test_phases_are_corrected_apart_once_both_have_begun() -> None:
    forecast = waves()
    open_block(forecast, 0)
    forecast.advance(replace(PREFILL, seconds=10.0))
    assert forecast.seconds_left == pytest.approx(50.0)
    forecast.advance(replace(DECODE, seconds=6.0))
    assert forecast.seconds_left == pytest.approx(0.5 * 20 + 3 * (19 + 20) * 2)


def test_blocks_of_earlier_starts_are_done_and_what_rows_have_is_prefilled_again() -> None:
    forecast = waves()
    forecast.skip([0])
    assert (forecast.seconds_left, forecast.share_done) == (60.0, 0.5)
    forecast.open([1], {4: 5, 5: 15})
    assert forecast.seconds_left == pytest.approx(0.5 * (10 + 5 + 10 + 15) + 2.0 * 15)
    assert 0.5 < forecast.share_done < 1.0


def test_blocks_that_end_early_say_that_others_will() -> None:
    forecast = waves()
    list(run_block(forecast, 0, num_passes=5))
    open_block(forecast, 1)
    assert forecast.seconds_left == pytest.approx(20.0 + 2.0 * 20 * 5 / 20)


def test_rows_that_come_and_go_are_counted_by_tokens() -> None:
    forecast = Forecast(PREDICTION, REQUESTS, BLOCKS, is_wave=False)
    forecast.open([0, 1], dict.fromkeys(range(8), 0))
    assert forecast.seconds_left == pytest.approx(120.0)
    mixed = replace(PREFILL, phase="mixed", real_tokens=28, prompt_tokens=20, num_sequences=8, issued_tokens=10)
    forecast.advance(replace(mixed, seconds=14.0))  # 20 prompt tokens and 8 that are decoded, of 160: 10 + 4 s
    assert forecast.seconds_left == pytest.approx(106.0)
    for i in range(8):
        forecast.finish_row(i, MOST)
    assert forecast.seconds_left == pytest.approx(30.0)  # prompts alone


def test_answers_that_end_early_shorten_those_that_are_left() -> None:
    forecast = Forecast(PREDICTION, REQUESTS, BLOCKS, is_wave=False)
    forecast.open([0, 1], dict.fromkeys(range(8), 0))
    forecast.advance(replace(PREFILL, prompt_tokens=80, real_tokens=80, seconds=40.0))
    lefts = []
    for i in range(7):
        forecast.advance(replace(DECODE, issued_tokens=2, seconds=1.0))
        forecast.finish_row(i, 3)
        lefts.append(forecast.seconds_left)
    assert lefts == sorted(lefts, reverse=True)
    assert 0.5 < lefts[-1] < 10.0  # ten by its limit, one by those that have ended


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def progress(clock: Clock, *, is_terminal: bool = False, requests: Sequence[Request] = REQUESTS) -> Progress:
    return Progress(
        requests, BLOCKS, is_wave=True, is_terminal=is_terminal, clock=clock,
        now=lambda: datetime(2026, 1, 1, 14, 5),
    )  # fmt: skip


def play(shown: Progress, clock: Clock) -> None:
    """Both blocks, as the engine plays them: what ends in a pass is told of before the pass."""
    for block in BLOCKS:
        shown.open([block], dict.fromkeys(block.members, 0))
        for row in [PREFILL, *[DECODE] * (MOST - 2)]:
            clock.seconds += row.seconds
            shown.advance(row)
        for i in block.members:
            completion = Completion(
                request=REQUESTS[i], token_ids=(1,) * MOST, text="", finish=FinishReason.length, error=None
            )
            shown.finish_row(i, completion)
        clock.seconds += DECODE.seconds
        shown.advance(DECODE)
        shown.finish_blocks([block.index])


def test_a_log_says_at_the_start_how_long_it_takes_and_once_a_minute_how_far_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    with caplog.at_level("INFO"), progress(clock) as shown:
        shown.expect(PREDICTION, [])
        play(shown, clock)
    assert caplog.messages == [
        "generating 8 completions: about 2 min, until 14:07",
        "block 1/2 decode: 4 of 8 rows, 2.0 new tok/s, about 60 s, until 14:06",
        "block 2/2 decode: 8 of 8 rows, 2.0 new tok/s",
    ]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ({"scoring": Scoring(num_positions=1, last_ids=(1,))}, "scoring 8 rows: about 2 min, until 14:07"),
        ({"encoding": Encoding(num_read=1)}, "encoding 8 rows: about 2 min, until 14:07"),
    ],
)
def test_rows_that_generate_nothing_are_said_to_be_scored_or_encoded(
    kind: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [replace(request, **kind) for request in REQUESTS]
    with caplog.at_level("INFO"), progress(Clock(), requests=requests) as shown:
        shown.expect(PREDICTION, [])
    assert caplog.messages == [text]


def test_a_terminal_has_a_bar_of_all_blocks_and_rows_those_of_earlier_starts_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with progress(clock, is_terminal=True) as shown:
        shown.expect(PREDICTION, [0])
        shown.open([BLOCKS[1]], dict.fromkeys(BLOCKS[1].members, 0))
        clock.seconds += 20
        shown.advance(PREFILL)
    pictures = [line for line in capsys.readouterr().err.split("\r") if "rows" in line]
    assert pictures[-1].startswith(" 67% |")
    assert pictures[-1].strip().endswith("| 4/8 rows, 2.0 prompt tok/s, 40 s left")


def test_a_bar_ends_full_even_if_the_forecast_expected_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(Forecast, "share_done", 0.99)
    monkeypatch.setattr(Forecast, "seconds_left", 1.0)
    with progress(clock, is_terminal=True) as shown:
        shown.expect(PREDICTION, [])
        play(shown, clock)
    last = [line for line in capsys.readouterr().err.split("\r") if "rows" in line][-1]
    assert last.startswith("100% |")
    assert last.strip().endswith("| 8/8 rows, 2.0 new tok/s")


def test_lines_that_the_terminal_does_not_show_are_not_shown_beside_the_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, root, log = logging.StreamHandler(sys.stderr), logging.getLogger(), logging.getLogger("jobs")
    terminal.setLevel(logging.INFO)
    monkeypatch.setattr(root, "handlers", [terminal])
    monkeypatch.setattr(log, "level", logging.DEBUG)
    with progress(Clock(), is_terminal=True):
        log.debug("a detail")
        log.info("a line")
    shown = capsys.readouterr().err
    assert "a line" in shown
    assert "a detail" not in shown


def test_the_bar_is_drawn_five_times_a_second_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with progress(clock, is_terminal=True) as shown:
        shown.expect(PREDICTION, [])
        begun = capsys.readouterr().err.count("\r")
        shown.open([BLOCKS[0]], dict.fromkeys(BLOCKS[0].members, 0))
        for _ in range(100):
            clock.seconds += 0.01
            shown.advance(replace(DECODE, seconds=0.01))
        assert begun > 0
        assert capsys.readouterr().err.count("\r") <= 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (45, "45 s"), (150, "2.5 min"), (31 * 60, "31 min"), (7.4 * 3600, "7.5 h"), (26 * 3600, "26 h")],
)
def test_times_are_told_as_roughly_as_they_are_known(seconds: float, text: str) -> None:
    assert format_rounded(seconds) == text


def test_an_end_on_another_day_names_it() -> None:
    assert format_time_left(26 * 3600, datetime(2026, 1, 1, 14, 5)) == "about 26 h, until Fri 16:05"
