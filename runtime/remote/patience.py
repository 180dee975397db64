"""Patience with a store that fails: a call is tried again, ever more seldom, for a bounded time."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..errors import Interrupted, MillraceError, StorageError

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
STOP_SECONDS = 0.2  # how often a pause looks whether the job shall stop
MAX_CHARACTERS = 200
T = TypeVar("T")


def never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long what fails is tried again, and who may end that. `key`: the setting that says how long."""

    seconds: float = 300.0
    should_stop: Callable[[], bool] = never
    key: str | None = None

    def hold(self, what: str, call: Callable[[], T], *, lasting: tuple[type[Exception], ...] = ()) -> T:
        """What `call` comes to, which does `what`. Errors of ours, FileExistsError and `lasting` ones pass at once.

        Every other Exception is a failure that may pass, since what the libraries of stores raise has no common root.
        Raises StorageError when time is up, Interrupted when the job shall stop.
        """
        until, pause = time.monotonic() + self.seconds, FIRST_PAUSE_SECONDS
        while True:
            try:
                return call()
            except (MillraceError, FileExistsError, *lasting):
                raise
            except Exception as error:
                left = until - time.monotonic()
                if left <= 0:
                    raise StorageError(self._given_up(what, error)) from error
                pause = min(pause, left)
                log.warning("%s failed: %s; once more in %.1f s, for %.0f s in all", what, told(error), pause, left)
            self._wait(what, pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _wait(self, what: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self.should_stop():
                raise Interrupted(f"stopped while {what} was to be tried again; the same command goes on from here")
            time.sleep(min(left, STOP_SECONDS))

    def _given_up(self, what: str, error: Exception) -> str:
        key = f" ({self.key})" if self.key is not None else ""
        return (
            f"{what} failed: {told(error)}; it was tried for {self.seconds:g} s{key}. "
            "Nothing is lost: start the same command again"
        )


def told(error: Exception) -> str:
    """Its type and text in one line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
