"""Progress and remaining time of a run: a progress bar on a terminal, otherwise a log line per minute."""

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from runtime.batching.balance import Block
from runtime.plan.cost.predict import Prediction
from runtime.sequences.sequence import Completion, Request
from runtime.units import format_count, format_rounded

from ..record.passes import PassRow


@dataclass(kw_only=True)
class _Phase:
    """Predicted and measured time of a phase, over the steps of this process. `step_seconds`: predicted, per step."""

    step_seconds: float
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0

    def add(self, num_steps: float, seconds: float) -> None:
        self.predicted_seconds += num_steps * self.step_seconds
        self.measured_seconds += seconds


class Forecast:
    """Estimates the remaining time in steps. A prefill step is one prompt token. In waves a decode step is one
    pass over a block, otherwise one token; remaining ones are scaled by `_length_ratio`. Blocks are waiting, open or
    done. Methods take indices of `requests`."""

    def __init__(self, prediction: Prediction, requests: Sequence[Request], blocks: Sequence[Block], *, is_wave: bool):
        self._requests, self._is_wave = requests, is_wave
        self._members = {block.index: [i for i in block.members if requests[i].max_new_tokens] for block in blocks}
        self._prompt_tokens = {index: sum(map(self._prompt_length, rows)) for index, rows in self._members.items()}
        limits = {index: {i: requests[i].max_new_tokens for i in rows} for index, rows in self._members.items()}
        self._steps = {index: self._max_steps(by_request) for index, by_request in limits.items()}
        self._waiting = set(self._members)
        self._prefill = _Phase(step_seconds=_per_item(prediction.prefill.seconds, sum(self._prompt_tokens.values())))
        self._decode = _Phase(step_seconds=_per_item(prediction.decode.seconds, sum(self._steps.values())))
        self._skipped_seconds = 0.0  # predicted, for work done before this process
        self._open: dict[int, int] = {}  # remaining token limit of each unfinished request
        self._prompt_tokens_left = 0
        self._open_limit, self._num_steps_done = 0, 0.0  # decode steps of open blocks
        # Prior of `_length_ratio`, since short requests finish first: a tenth of all steps, done at their limit.
        self._finished_steps = self._finished_limit = 0.0 if is_wave else sum(self._steps.values()) / 10

    def skip(self, blocks: Iterable[int]) -> None:
        """Marks blocks committed by an earlier start as done."""
        for index in self._waiting & set(blocks):
            self._waiting.remove(index)
            self._skipped_seconds += self._predicted_seconds(self._prompt_tokens[index], self._steps[index])

    def open(self, blocks: Iterable[int], num_generated: Mapping[int, int]) -> None:
        """Opens blocks. `num_generated`: tokens of an earlier start, by unfinished request; prefilled again."""
        if self._is_wave:
            self._record_finished(self._num_steps_done, self._open_limit)
        indices = self._waiting & set(blocks)
        self._waiting -= indices
        limits = {i: self._requests[i].max_new_tokens - num for i, num in num_generated.items()}
        self._open = {i: limit for i, limit in limits.items() if limit > 0}
        prompt_tokens, self._open_limit = sum(map(self._prompt_length, self._open)), self._max_steps(self._open)
        self._prompt_tokens_left = prompt_tokens + sum(num_generated[i] for i in self._open)
        skipped_tokens = sum(self._prompt_tokens[index] for index in indices) - prompt_tokens
        skipped_steps = sum(self._steps[index] for index in indices) - self._open_limit
        self._skipped_seconds += self._predicted_seconds(skipped_tokens, skipped_steps)

    def advance(self, row: PassRow) -> None:
        """Counts a pass of the open blocks."""
        share, num_steps = row.prefill_share, float(row.decode_issued)
        if self._is_wave:
            num_steps = 1.0 if share < 1.0 else 0.0
        self._prompt_tokens_left = max(0, self._prompt_tokens_left - row.prompt_tokens)
        self._num_steps_done += num_steps
        self._prefill.add(row.prompt_tokens, share * row.seconds)
        self._decode.add(num_steps, (1 - share) * row.seconds)

    def finish_row(self, i: int, num_tokens: int) -> None:
        """Removes a finished request; `num_tokens` includes those generated before it was opened."""
        limit = self._open.pop(i, None)
        if limit is not None and not self._is_wave:
            self._open_limit -= limit - 1
            self._record_finished(num_tokens - (self._requests[i].max_new_tokens - limit) - 1, limit - 1)

    @property
    def seconds_left(self) -> float:
        """Estimated seconds for the remaining work."""
        prompt_tokens = self._prompt_tokens_left + sum(self._prompt_tokens[index] for index in self._waiting)
        return (
            self._correction(self._prefill) * self._prefill.step_seconds * prompt_tokens
            + self._correction(self._decode) * self._decode.step_seconds * self._num_steps_left
        )

    @property
    def share_done(self) -> float:
        """Share of the run that is done, from 0 to 1, by predicted time."""
        done = self._skipped_seconds + self._prefill.predicted_seconds + self._decode.predicted_seconds
        prompt_tokens = self._prompt_tokens_left + sum(self._prompt_tokens[index] for index in self._waiting)
        left = self._predicted_seconds(prompt_tokens, self._num_steps_left)
        return done / (done + left) if done + left else 1.0

    @property
    def _num_steps_left(self) -> float:
        waiting = sum(self._steps[index] for index in self._waiting)
        limit = self._max_steps(self._open) if self._is_wave else self._open_limit
        expected = self._length_ratio * limit - self._num_steps_done
        return (max(1.0, expected) if self._open else 0.0) + self._length_ratio * waiting

    @property
    def _length_ratio(self) -> float:
        """Ratio of actual to maximum length, over finished requests or blocks."""
        return self._finished_steps / self._finished_limit if self._finished_limit else 1.0

    def _record_finished(self, num_steps: float, limit: float) -> None:
        """Adds a finished request or block to `_length_ratio` and removes its steps from the open ones."""
        self._finished_steps += num_steps
        self._finished_limit += limit
        self._num_steps_done -= num_steps

    def _correction(self, phase: _Phase) -> float:
        """Measured over predicted seconds of a phase; of both phases if this one has not begun."""
        phases = (phase,) if phase.predicted_seconds else (self._prefill, self._decode)
        predicted = sum(item.predicted_seconds for item in phases)
        return sum(item.measured_seconds for item in phases) / predicted if predicted else 1.0

    def _predicted_seconds(self, prompt_tokens: float, num_steps: float) -> float:
        return self._prefill.step_seconds * prompt_tokens + self._decode.step_seconds * num_steps

    def _prompt_length(self, i: int) -> int:
        return len(self._requests[i].prompt_ids)

    def _max_steps(self, limits: Mapping[int, int]) -> int:
        """Decode steps up to these limits; the first token of each request comes from prefill."""
        if self._is_wave:
            return max(limits.values(), default=1) - 1
        return sum(limit - 1 for limit in limits.values())


def _per_item(seconds: float, count: int) -> float:
    return seconds / count if count else 0.0


log = logging.getLogger(__name__)
SECONDS_PER_LINE, SECONDS_PER_REDRAW = 60.0, 0.2


@dataclass(kw_only=True)
class _PhaseThroughput:
    """Tokens of one phase computed by this process, and the seconds of its passes."""

    num_tokens: float = 0.0
    seconds: float = 0.0


@contextmanager
def _logging_above_bar() -> Iterator[None]:
    """Writes log records above a bar. tqdm's handler replaces that of the terminal, and shows the same levels here."""
    root = logging.getLogger()
    replaced = root.handlers
    with logging_redirect_tqdm():
        added = [handler for handler in root.handlers if handler not in replaced]
        removed = [handler for handler in replaced if handler not in root.handlers]
        for handler in added:
            handler.setLevel(removed[0].level if removed else root.level)
        yield


class Progress:
    """Context manager that displays progress; call `advance` after each pass. Shows the first open block. `clock`:
    monotonic seconds; `now`: time of day."""

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
        is_shown = sys.stderr.isatty() and logging.getLogger().isEnabledFor(logging.INFO)
        self._is_terminal = is_shown if is_terminal is None else is_terminal
        self._clock, self._now = clock, now
        self._forecast: Forecast | None = None
        self._done_blocks = set[int]()
        self._num_rows_done = 0
        self._num_rows = sum(len(block.members) for block in blocks)
        self._phase = "prefill"
        self._throughput = {"prefill": _PhaseThroughput(), "decode": _PhaseThroughput()}
        self._last_line = self._last_redraw = clock()

    def __enter__(self) -> Self:
        self._bar = tqdm(
            total=1.0,
            disable=not self._is_terminal,
            dynamic_ncols=True,
            mininterval=0,
            bar_format="{percentage:3.0f}% |{bar}| {desc}",
        )
        self._stack = ExitStack()
        if self._is_terminal:
            self._stack.enter_context(_logging_above_bar())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._draw()
        self._bar.close()
        self._stack.close()

    def expect(self, prediction: Prediction | None, done: Collection[int]) -> None:
        """Sets the prediction for all blocks, with those in `done` committed. The first call logs the estimate."""
        is_first = self._forecast is None
        self._done_blocks = set(done)
        self._num_rows_done = sum(len(block.members) for block in self._blocks if block.index in self._done_blocks)
        if prediction is None or len(self._done_blocks) == len(self._blocks):
            return
        self._forecast = Forecast(prediction, self._requests, self._blocks, is_wave=self._is_wave)
        self._forecast.skip(done)
        if is_first:
            num_left = self._num_rows - self._num_rows_done
            log.info("%s: %s", self._task_text(num_left), self._time_left_text)
        self._draw()

    def _task_text(self, num_rows: int) -> str:
        """`generating 8 completions`. A run does the same for all of its rows."""
        request = self._requests[0]
        if request.encoding is None and request.scoring is None:
            return f"generating {format_count(num_rows, 'completion')}"
        return f"{'scoring' if request.encoding is None else 'encoding'} {format_count(num_rows, 'row')}"

    def open(self, blocks: Sequence[Block], num_generated: Mapping[int, int]) -> None:
        """Opens blocks. `num_generated`: by unfinished request, tokens of an earlier start."""
        self._num_rows_done += sum(len(block.members) for block in blocks) - len(num_generated)
        if self._forecast is not None:
            self._forecast.open([block.index for block in blocks], num_generated)

    def advance(self, row: PassRow) -> None:
        """Counts a pass; call it after `finish_row` for the rows that ended in it."""
        self._phase, share = row.phase, row.prefill_share
        for name, num_tokens, part in (
            ("prefill", row.prompt_tokens, share),
            ("decode", row.decode_useful, 1 - share),
        ):
            self._throughput[name].num_tokens += num_tokens
            self._throughput[name].seconds += part * row.seconds
        if self._forecast is not None:
            self._forecast.advance(row)
        now = self._clock()
        if self._is_terminal and now - self._last_redraw >= SECONDS_PER_REDRAW:
            self._draw()
        if now - self._last_line >= SECONDS_PER_LINE:
            self._last_line = now
            level = logging.DEBUG if self._is_terminal else logging.INFO  # the bar shows it already
            log.log(level, "%s: %s", self._position_text, self._state_text)

    def finish_row(self, i: int, completion: Completion) -> None:
        self._num_rows_done += 1
        if self._forecast is not None:
            self._forecast.finish_row(i, len(completion.token_ids))

    def finish_blocks(self, indices: Collection[int]) -> None:
        self._done_blocks |= set(indices)

    def _draw(self) -> None:
        self._last_redraw = self._clock()
        is_done = self._num_rows_done >= self._num_rows
        if self._forecast is not None:  # the bar never moves back when the estimate grows
            self._bar.n = 1.0 if is_done else max(self._bar.n, self._forecast.share_done)
        seconds_left = f"{format_rounded(self._seconds_left)} left" if self._seconds_left and not is_done else ""
        parts = (f"{self._num_rows_done:,}/{self._num_rows:,} rows", self._rate_text, seconds_left)
        self._bar.set_description_str(", ".join(filter(None, parts)), refresh=True)

    @property
    def _position_text(self) -> str:
        number = min(len(self._done_blocks) + 1, len(self._blocks))
        return f"block {number}/{len(self._blocks)} {self._phase}"

    @property
    def _state_text(self) -> str:
        parts = (f"{self._num_rows_done:,} of {self._num_rows:,} rows", self._rate_text, self._time_left_text)
        return ", ".join(filter(None, parts))

    @property
    def _rate_text(self) -> str:
        """`2.0 new tok/s`; empty before the first pass of the phase has ended."""
        phase, tokens = ("prefill", "prompt") if self._phase == "prefill" else ("decode", "new")
        throughput = self._throughput[phase]
        return f"{throughput.num_tokens / throughput.seconds:,.1f} {tokens} tok/s" if throughput.seconds else ""

    @property
    def _seconds_left(self) -> float:
        return self._forecast.seconds_left if self._forecast is not None else 0.0

    @property
    def _time_left_text(self) -> str:
        return format_time_left(self._seconds_left, self._now()) if self._seconds_left else ""


def format_time_left(seconds: float, now: datetime) -> str:
    """`about 31 min, until 14:05`; `about 26 h, until Tue 14:05`."""
    end = now + timedelta(seconds=seconds)
    day = "" if end.date() == now.date() else f"{end:%a} "
    return f"about {format_rounded(seconds)}, until {day}{end:%H:%M}"
