"""Progress and remaining time of a run: a progress bar on a terminal, otherwise one log line per minute."""

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from runtime.batching.balance import Block
from runtime.plan.cost.predict import Prediction
from runtime.sequences.sequence import Completion, Request
from runtime.units import format_count

from ..record.passes import PassRow


@dataclass(kw_only=True)
class _Phase:
    """`step_seconds`: predicted seconds of one step. The others: seconds of the steps done by this start."""

    step_seconds: float
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0

    def add(self, num_steps: float, seconds: float) -> None:
        self.predicted_seconds += num_steps * self.step_seconds
        self.measured_seconds += seconds


class Forecast:
    """Estimates the remaining time from steps: prompt tokens in prefill; in decode, passes over a block in waves, else
    tokens. Lengths of finished blocks or requests, relative to their limits, scale those that remain.

    A block is waiting, open or done. Requests are positions in `requests`.
    """

    def __init__(self, prediction: Prediction, requests: Sequence[Request], blocks: Sequence[Block], *, is_wave: bool):
        self._requests, self._is_wave = requests, is_wave
        self._members = {block.index: [i for i in block.members if requests[i].max_new_tokens] for block in blocks}
        self._prompts = {index: sum(map(self._num_prompt_tokens, rows)) for index, rows in self._members.items()}
        limits = {index: {i: requests[i].max_new_tokens for i in rows} for index, rows in self._members.items()}
        self._steps = {index: self._max_steps(most) for index, most in limits.items()}
        self._waiting = set(self._members)
        self._prefill = _Phase(step_seconds=_per_item(prediction.prefill.seconds, sum(self._prompts.values())))
        self._decode = _Phase(step_seconds=_per_item(prediction.decode.seconds, sum(self._steps.values())))
        self._skipped_seconds = 0.0  # predicted, of what earlier starts have done
        self._open: dict[int, int] = {}  # by request that is not finished, the most tokens it may still get
        self._num_prompts_left = 0
        self._begun_most, self._num_steps_done = 0, 0.0  # steps of what is open: its limit, and those that are done
        # Of what has ended. Of tokens a tenth is held as if it ran to its limit: what ends first is what is short.
        self._finished_steps = self._finished_most = 0.0 if is_wave else sum(self._steps.values()) / 10

    def skip(self, blocks: Iterable[int]) -> None:
        """Marks blocks committed by an earlier start as done."""
        for index in self._waiting & set(blocks):
            self._waiting.remove(index)
            self._skipped_seconds += self._predicted_seconds(self._prompts[index], self._steps[index])

    def open(self, blocks: Iterable[int], known: Mapping[int, int]) -> None:
        """Opens blocks with the remaining requests in `known`, by number of tokens generated before. Those are
        prefilled again."""
        if self._is_wave:
            self._finish(self._num_steps_done, self._begun_most)
        indices = self._waiting & set(blocks)
        self._waiting -= indices
        self._open = {i: most for i, num in known.items() if (most := self._requests[i].max_new_tokens - num) > 0}
        num_prompts, self._begun_most = sum(map(self._num_prompt_tokens, self._open)), self._max_steps(self._open)
        self._num_prompts_left = num_prompts + sum(known[i] for i in self._open)
        fresh_prompts = sum(self._prompts[index] for index in indices)
        fresh_steps = sum(self._steps[index] for index in indices)
        self._skipped_seconds += self._predicted_seconds(fresh_prompts - num_prompts, fresh_steps - self._begun_most)

    def advance(self, row: PassRow) -> None:
        """Counts a pass of the open blocks."""
        share, num_steps = row.prefill_share, float(row.decode_issued)
        if self._is_wave:
            num_steps = 1.0 if share < 1.0 else 0.0
        self._num_prompts_left = max(0, self._num_prompts_left - row.prompt_tokens)
        self._num_steps_done += num_steps
        self._prefill.add(row.prompt_tokens, share * row.seconds)
        self._decode.add(num_steps, (1 - share) * row.seconds)

    def finish_row(self, i: int, num_tokens: int) -> None:
        """Removes a finished request; `num_tokens` includes those it had when opened."""
        most = self._open.pop(i, None)
        if most is not None and not self._is_wave:
            self._begun_most -= most - 1
            self._finish(num_tokens - (self._requests[i].max_new_tokens - most) - 1, most - 1)

    @property
    def seconds_left(self) -> float:
        """Estimated seconds for the remaining work."""
        num_prompts = self._num_prompts_left + sum(self._prompts[index] for index in self._waiting)
        return (
            self._correction(self._prefill) * self._prefill.step_seconds * num_prompts
            + self._correction(self._decode) * self._decode.step_seconds * self._num_steps_left
        )

    @property
    def share_done(self) -> float:
        """Share of the run that is done, from 0 to 1, by predicted time."""
        done = self._skipped_seconds + self._prefill.predicted_seconds + self._decode.predicted_seconds
        num_prompts = self._num_prompts_left + sum(self._prompts[index] for index in self._waiting)
        left = self._predicted_seconds(num_prompts, self._num_steps_left)
        return done / (done + left) if done + left else 1.0

    @property
    def _num_steps_left(self) -> float:
        waiting = sum(self._steps[index] for index in self._waiting)
        most = self._max_steps(self._open) if self._is_wave else self._begun_most
        likely = self._length_ratio * most - self._num_steps_done
        return (max(1.0, likely) if self._open else 0.0) + self._length_ratio * waiting

    @property
    def _length_ratio(self) -> float:
        """Ratio of actual to maximum length, over finished requests or blocks."""
        return self._finished_steps / self._finished_most if self._finished_most else 1.0

    def _finish(self, num_steps: float, most: float) -> None:
        self._finished_steps += num_steps
        self._finished_most += most
        self._num_steps_done -= num_steps

    def _correction(self, phase: _Phase) -> float:
        """Measured over predicted seconds of a phase; of both phases if this one has not begun."""
        phases = (phase,) if phase.predicted_seconds else (self._prefill, self._decode)
        predicted = sum(each.predicted_seconds for each in phases)
        return sum(each.measured_seconds for each in phases) / predicted if predicted else 1.0

    def _predicted_seconds(self, num_prompts: float, num_steps: float) -> float:
        return self._prefill.step_seconds * num_prompts + self._decode.step_seconds * num_steps

    def _num_prompt_tokens(self, i: int) -> int:
        return len(self._requests[i].prompt_ids)

    def _max_steps(self, limits: Mapping[int, int]) -> int:
        """Decode steps up to these limits; the first token of each request comes from prefill."""
        if self._is_wave:
            return max(limits.values(), default=1) - 1
        return sum(most - 1 for most in limits.values())


def _per_item(seconds: float, count: int) -> float:
    return seconds / count if count else 0.0


log = logging.getLogger(__name__)
SECONDS_PER_LINE, SECONDS_PER_PICTURE = 60.0, 0.2


@dataclass(kw_only=True)
class _Pace:
    """Tokens of one phase computed by this start, and the seconds of its passes."""

    num_tokens: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.num_tokens / self.seconds:,.1f} tok/s" if self.seconds else ""


class Progress:
    """Context manager that displays progress; call `advance` after each pass. With overlapping blocks the first open
    one is shown.

    `clock`: monotonic seconds; `now`: the time of day.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        blocks: Sequence[Block],
        *,
        is_wave: bool,
        is_terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ):
        self._requests, self._blocks, self._is_wave = requests, blocks, is_wave
        self._is_terminal = sys.stderr.isatty() if is_terminal is None else is_terminal
        self._clock, self._now = clock, now
        self._forecast: Forecast | None = None
        self._done_blocks = set[int]()
        self._num_rows_done = 0
        self._num_rows = sum(len(block.members) for block in blocks)
        self._phase = "prefill"
        self._paces = {"prefill": _Pace(), "decode": _Pace()}
        self._last_line = self._last_picture = clock()

    def __enter__(self) -> Self:
        self._bar = tqdm(
            total=1.0,
            disable=not self._is_terminal,
            dynamic_ncols=True,
            mininterval=0,
            bar_format="{desc} |{bar}| {percentage:3.0f}%{postfix}",
        )
        self._stack = ExitStack()
        if self._is_terminal:
            self._stack.enter_context(logging_redirect_tqdm())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._draw()
        self._bar.close()
        self._stack.close()

    def expect(self, prediction: Prediction | None, done: Collection[int]) -> None:
        """Uses this prediction of all blocks from now on; blocks in `done` are committed. Logs the estimate the first
        time."""
        is_first = self._forecast is None
        self._done_blocks = set(done)
        self._num_rows_done = sum(len(block.members) for block in self._blocks if block.index in self._done_blocks)
        if prediction is None or len(self._done_blocks) == len(self._blocks):
            return
        self._forecast = Forecast(prediction, self._requests, self._blocks, is_wave=self._is_wave)
        self._forecast.skip(done)
        if is_first:
            num_left = self._num_rows - self._num_rows_done
            log.info("generating %s: %s", format_count(num_left, "completion"), self._time_left_text)
        self._draw()

    def open(self, blocks: Sequence[Block], known: Mapping[int, int]) -> None:
        """Opens blocks with the remaining requests in `known`, by number of tokens generated before."""
        self._num_rows_done += sum(len(block.members) for block in blocks) - len(known)
        if self._forecast is not None:
            self._forecast.open([block.index for block in blocks], known)

    def advance(self, row: PassRow) -> None:
        """Counts a pass, once the rows that ended in it are finished."""
        self._phase, share = row.phase, row.prefill_share
        for name, num_tokens, part in (
            ("prefill", row.prompt_tokens, share),
            ("decode", row.decode_useful, 1 - share),
        ):
            self._paces[name].num_tokens += num_tokens
            self._paces[name].seconds += part * row.seconds
        if self._forecast is not None:
            self._forecast.advance(row)
        now = self._clock()
        if self._is_terminal and now - self._last_picture >= SECONDS_PER_PICTURE:
            self._draw()
        elif not self._is_terminal and now - self._last_line >= SECONDS_PER_LINE:
            self._last_line = now
            log.info("%s: %s", self._position_text, self._state_text)

    def finish_row(self, i: int, completion: Completion) -> None:
        self._num_rows_done += 1
        if self._forecast is not None:
            self._forecast.finish_row(i, len(completion.token_ids))

    def finish_blocks(self, indices: Collection[int]) -> None:
        self._done_blocks |= set(indices)

    def _draw(self) -> None:
        """Draws the bar. It never moves back, although estimates may grow."""
        self._last_picture = self._clock()
        if self._forecast is not None:
            self._bar.n = max(self._bar.n, self._forecast.share_done)
        self._bar.set_description_str(self._position_text, refresh=False)
        self._bar.set_postfix_str(self._state_text, refresh=True)

    @property
    def _position_text(self) -> str:
        number = min(len(self._done_blocks) + 1, len(self._blocks))
        return f"block {number}/{len(self._blocks)} {self._phase}"

    @property
    def _state_text(self) -> str:
        pace = self._paces["prefill" if self._phase == "prefill" else "decode"]
        parts = (f"{self._num_rows_done:,} of {self._num_rows:,} rows", str(pace), self._time_left_text)
        return ", ".join(filter(None, parts))

    @property
    def _time_left_text(self) -> str:
        seconds = self._forecast.seconds_left if self._forecast is not None else 0.0
        return format_time_left(seconds, self._now()) if seconds else ""


def format_time_left(seconds: float, now: datetime) -> str:
    """`about 31 min, until 14:05`; `about 26 h, until Tue 14:05`."""
    end = now + timedelta(seconds=seconds)
    day = "" if end.date() == now.date() else f"{end:%a} "
    return f"about {format_rounded(seconds)}, until {day}{end:%H:%M}"


def format_rounded(seconds: float) -> str:
    """`45 s`, `2.5 min`, `31 min`, `7.5 h`, `26 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    value, unit = (seconds / 60, "min") if seconds < 90 * 60 else (seconds / 3600, "h")
    return f"{round(value)} {unit}" if value >= 10 else f"{round(2 * value) / 2:g} {unit}"
