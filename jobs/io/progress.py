"""How far a run is: a bar on a terminal, a log line a minute anywhere else."""

import logging
import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

from runtime.engine.records import PassRecord

log = logging.getLogger(__name__)
SECONDS_PER_LINE = 60.0


class Progress:
    """A context manager; `advance` after each pass. `num_tokens` is the most that can be generated, so a run that meets
    many ends of sequence finishes before its bar does."""

    def __init__(self, num_tokens: int, num_blocks: int):
        self._num_tokens, self._num_blocks = num_tokens, num_blocks
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

    def advance(self, record: PassRecord) -> None:
        self._bar.set_description(f"block {record.block + 1}/{self._num_blocks} {record.phase.value}", refresh=False)
        self._bar.update(record.useful_tokens)
        self._done_tokens += record.useful_tokens
        now = time.monotonic()
        if not self._is_terminal and now - self._last_line >= SECONDS_PER_LINE:
            self._last_line = now
            rate = self._done_tokens / (now - self._begin)
            left = (self._num_tokens - self._done_tokens) / rate if rate else float("inf")
            log.info(
                "block %d/%d %s: %d of at most %d tokens, %.1f tok/s, at most %.0f s left",
                record.block + 1, self._num_blocks, record.phase.value, self._done_tokens, self._num_tokens, rate, left,
            )  # fmt: skip

    def skip(self, num_tokens: int) -> None:
        """Tokens of a block that was committed before, or that ended early."""
        self._num_tokens -= num_tokens
        self._bar.total = self._num_tokens
        self._bar.refresh()
