"""How far a run is, and how long the rest will take: a bar on a terminal, a log line a minute anywhere else."""

import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
from runtime.units import counted

from ..record.passes import PassRow
from .forecast import Forecast

log = logging.getLogger(__name__)
SECONDS_PER_LINE, SECONDS_PER_PICTURE = 60.0, 0.2


@dataclass(kw_only=True)
class _Pace:
    """Tokens of one phase that this start has computed, and the seconds that its passes took."""

    num_tokens: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.num_tokens / self.seconds:,.1f} tok/s" if self.seconds else ""


class Progress:
    """A context manager; `advance` after each pass. Of blocks that overlap, the first that is open is shown.

    `clock` counts seconds; `now` is the time of day.
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
        """Goes by this prediction of all blocks from here on; those in `done` are committed. Says so the first time."""
        is_first = self._forecast is None
        self._done_blocks = set(done)
        self._num_rows_done = sum(len(block.members) for block in self._blocks if block.index in self._done_blocks)
        if prediction is None or len(self._done_blocks) == len(self._blocks):
            return
        self._forecast = Forecast(prediction, self._requests, self._blocks, is_wave=self._is_wave)
        self._forecast.skip(done)
        if is_first:
            num_left = self._num_rows - self._num_rows_done
            log.info("generating %s: %s", counted(num_left, "completion"), self._time_left)
        self._draw()

    def open(self, blocks: Sequence[Block], known: Mapping[int, int]) -> None:
        """Opens blocks with the requests in `known` left, each with so many tokens that it has already."""
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
            log.info("%s: %s", self._place, self._state)

    def finish_row(self, i: int, completion: Completion) -> None:
        self._num_rows_done += 1
        if self._forecast is not None:
            self._forecast.finish_row(i, len(completion.token_ids))

    def finish_blocks(self, indices: Collection[int]) -> None:
        self._done_blocks |= set(indices)

    def _draw(self) -> None:
        """Draws the bar as it is now. It never goes back: what is left may grow as answers are longer than others."""
        self._last_picture = self._clock()
        if self._forecast is not None:
            self._bar.n = max(self._bar.n, self._forecast.share_done)
        self._bar.set_description_str(self._place, refresh=False)
        self._bar.set_postfix_str(self._state, refresh=True)

    @property
    def _place(self) -> str:
        number = min(len(self._done_blocks) + 1, len(self._blocks))
        return f"block {number}/{len(self._blocks)} {self._phase}"

    @property
    def _state(self) -> str:
        pace = self._paces["prefill" if self._phase == "prefill" else "decode"]
        parts = (f"{self._num_rows_done:,} of {self._num_rows:,} rows", str(pace), self._time_left)
        return ", ".join(filter(None, parts))

    @property
    def _time_left(self) -> str:
        seconds = self._forecast.seconds_left if self._forecast is not None else 0.0
        return time_left(seconds, self._now()) if seconds else ""


def time_left(seconds: float, now: datetime) -> str:
    """`about 31 min, until 14:05`; `about 26 h, until Tue 14:05`."""
    end = now + timedelta(seconds=seconds)
    day = "" if end.date() == now.date() else f"{end:%a} "
    return f"about {roughly(seconds)}, until {day}{end:%H:%M}"


def roughly(seconds: float) -> str:
    """`45 s`, `2.5 min`, `31 min`, `7.5 h`, `26 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    value, unit = (seconds / 60, "min") if seconds < 90 * 60 else (seconds / 3600, "h")
    return f"{round(value)} {unit}" if value >= 10 else f"{round(2 * value) / 2:g} {unit}"
