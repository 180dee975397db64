"""How far a run is: a bar on a terminal, a log line a minute anywhere else."""

import logging
import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

from runtime.engine.records import PassRecord
from runtime.engine.sequence import Completion

log = logging.getLogger(__name__)
SECONDS_PER_LINE = 60.0


class Progress:
    """A context manager; `advance` after each pass. `num_tokens` is the most that can be generated: each row that ends
    before its limit takes off what it leaves. Of blocks that overlap, the first that is open is shown."""

    def __init__(self, num_tokens: int, num_blocks: int):
        self._num_tokens, self._num_blocks = num_tokens, num_blocks
        self._num_finished_blocks = 0
        self._is_terminal = sys.stderr.isatty()
        self._done_tokens = 0
        self._begin = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._bar = tqdm(total=self._num_tokens, unit="tok", disable=not self._is_terminal, dynamic_ncols=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def know(self, num_tokens: int) -> None:
        """So many need not be generated: an earlier start has."""
        self._num_tokens -= num_tokens
        self._bar.total = self._num_tokens

    def advance(self, record: PassRecord) -> None:
        place = f"block {self._num_finished_blocks + 1}/{self._num_blocks} {record.phase.value}"
        self._bar.set_description(place, refresh=False)
        self._bar.update(record.counts.useful_tokens)
        self._done_tokens += record.counts.useful_tokens
        now = time.monotonic()
        if not self._is_terminal and now - self._last_line >= SECONDS_PER_LINE:
            self._last_line = now
            rate = self._done_tokens / (now - self._begin)
            left = (self._num_tokens - self._done_tokens) / rate if rate else float("inf")
            log.info(
                "%s: %d of at most %d tokens, %.1f tok/s, at most %.0f s left",
                place, self._done_tokens, self._num_tokens, rate, left,
            )  # fmt: skip

    def finish_row(self, completion: Completion) -> None:
        self._num_tokens -= completion.request.max_new_tokens - len(completion.token_ids)
        self._bar.total = self._num_tokens

    def finish_block(self) -> None:
        self._num_finished_blocks += 1
        self._bar.refresh()
