"""Importing this makes waiting for the disk a no-op in this process and in what is forked off it: tests kill processes,
after which all that was written is there; power does not fail."""

import os
from collections.abc import Callable
from typing import Any, cast


def _skip(descriptor: int) -> None: ...


os.fsync = cast(Callable[[Any], None], _skip)
