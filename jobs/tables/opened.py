"""The model that this process holds open for tables: engines make, copy and drop their functions as they like, and
weights stay."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock

from runtime.config.settings import RuntimeConfig
from runtime.library.api import Runtime
from runtime.library.full_blocks import MANY_ROWS, few_rows
from runtime.library.prompt import Prompt, make_requests
from runtime.sequences.sequence import Request

log = logging.getLogger(__name__)

_one_at_a_time = RLock()  # an engine may call from several threads, and a model is asked by one


@dataclass(kw_only=True)
class Opened:
    """An open runtime, the settings and the process that it is of, and whether it was looked how full its blocks
    are."""

    config: RuntimeConfig
    process: int
    runtime: Runtime
    has_looked: bool = False

    def warn_of_few(self, prompts: Sequence[Prompt]) -> None:
        """Warns, once, where these rows are far fewer than a block takes, and that costs speed."""
        if self.has_looked or not prompts:
            return
        self.has_looked = True
        if len(prompts) >= MANY_ROWS:
            return
        asked = make_requests(self.runtime.model, self.runtime.config.sampling, list(enumerate(prompts)))
        found = few_rows(self.runtime.planner, [each.size for each in asked if isinstance(each, Request)])
        if found is not None:
            log.warning("%s", found)


_latest: Opened | None = None


@contextmanager
def opened(config: RuntimeConfig) -> Iterator[Opened]:
    """The open runtime of these settings; for as long as the block lasts it is nobody else's. One of other settings is
    closed first, and one that a parent process has left behind is not touched. Raises what `Runtime` raises."""
    global _latest
    with _one_at_a_time:
        if _latest is None or (_latest.process, _latest.config) != (os.getpid(), config):
            close()
            _latest = Opened(config=config, process=os.getpid(), runtime=Runtime(config).open())
        yield _latest


def close() -> None:
    """Frees the weights that this process holds for tables; the next table reads them again."""
    global _latest
    with _one_at_a_time:
        if _latest is not None and _latest.process == os.getpid():
            _latest.runtime.close()
        _latest = None
