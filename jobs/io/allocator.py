"""glibc reads its tunables once, when a process starts: a job that wants them starts itself again with them."""

import os
import sys

from runtime.stream.host_memory import HEAP_TUNABLE, is_heap_exact

VARIABLE = "GLIBC_TUNABLES"


def with_tunable(environment: dict[str, str]) -> dict[str, str]:
    """`environment` with our tunable behind those that the user has set; another C library ignores it."""
    return environment | {VARIABLE: ":".join(filter(None, [environment.get(VARIABLE), HEAP_TUNABLE]))}


def start_with_tunable() -> None:
    """Replaces this process by the same command with the tunable set; returns where that has been done. Same process
    id, and 0.3 s: call it before anything is opened."""
    if sys.platform == "linux" and not is_heap_exact():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], with_tunable(dict(os.environ)))
