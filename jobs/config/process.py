"""What libraries read once, when a process starts: a job that wants it otherwise starts itself again.

glibc's thread cache is turned off, see `runtime.stream.host_memory`. OpenMP's idle threads wait actively for a while,
on the core that the threads of our kernels and readers need: of two cores, decode passes of 0.54 s take 0.38 s without.
"""

import gc
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from runtime.stream.host_memory import HEAP_TUNABLE

from .signals import block_signals, exit_on_signals

TUNABLES, WAITING = "GLIBC_TUNABLES", ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPIN_COUNT = "1000"  # some microseconds


def prepare_process() -> None:
    """Makes this process one that can read its own command and print. Standard streams that whoever started it has
    closed lead to /dev/null: a file that is opened would take their numbers, and what libraries print would go into it.
    What the encoding of stdout lacks is printed as escapes. Where the locale has no more than ASCII and the command
    does, as in a path, this process is replaced by the same command in UTF-8 mode."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - stays open
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    is_ascii = all(word.isascii() for word in sys.orig_argv)
    if sys.getfilesystemencoding() == "ascii" and not is_ascii and os.environ.get("PYTHONUTF8") != "1":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})


def tuned_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with our tunable behind those that the user has set, and how OpenMP waits where the user has not
    said it; other libraries ignore both."""
    tunables = environment.get(TUNABLES, "")
    if HEAP_TUNABLE not in tunables:
        tunables = ":".join(filter(None, [tunables, HEAP_TUNABLE]))
    waiting = {} if any(name in environment for name in WAITING) else {WAITING[0]: SPIN_COUNT}
    return {**environment, TUNABLES: tunables, **waiting}


def restart_tuned() -> None:
    """Replaces this process by the same command with these settings; returns where that has been done. Same process
    id, and 0.1 s: call it before anything is opened, and before what takes long to import, since from here on a stop
    signal ends the process with 75."""
    prepare_process()
    exit_on_signals()
    environment = tuned_environment(os.environ)
    if sys.platform == "linux" and environment != dict(os.environ):
        block_signals()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keeps the garbage collector out of the imports in its block. What they leave stays until the process ends, and
    looking through it again and again took 0.6 of the 5.8 s of processor time that a start of `jobs.generate` took."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def exit_as_rank(code: object) -> None:
    """Ends this process with that exit code at once, where it is one of several ranks and has not left the others: the
    interpreter's own end takes the lock away from threads that still wait for those that are gone, and gloo's abort the
    process then, with 134 in place of its code. Elsewhere it returns."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(code, int) or not distributed.is_initialized():
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
