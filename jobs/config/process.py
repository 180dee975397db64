"""Process settings that libraries read once at start; a job with other settings re-executes itself.

glibc's thread cache is turned off, see `runtime.stream.host_memory`. Idle OpenMP threads must not spin for long: reader
threads need their cores.
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

TUNABLES, SPIN_VARIABLES = "GLIBC_TUNABLES", ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPIN_COUNT = "1000"  # some microseconds
WORKER_VARIABLE = "WEIGHTSTREAM_WORKER"  # of a worker: descriptor, number of workers and pid of the parent


def prepare_process() -> None:
    """Opens closed standard streams on /dev/null, so that other files do not get descriptors 0 to 2. Characters that
    stdout cannot encode are printed as escapes. Re-executes the process in UTF-8 mode if the locale is ASCII and the
    command is not."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - stays open
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    is_ascii = all(word.isascii() for word in sys.orig_argv)
    if sys.getfilesystemencoding() == "ascii" and not is_ascii and os.environ.get("PYTHONUTF8") != "1":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})


def tuned_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with the heap tunable added, and OpenMP's spin count unless the user has set one."""
    tunables = environment.get(TUNABLES, "")
    if HEAP_TUNABLE not in tunables:
        tunables = ":".join(filter(None, [tunables, HEAP_TUNABLE]))
    spin = {} if any(name in environment for name in SPIN_VARIABLES) else {SPIN_VARIABLES[0]: SPIN_COUNT}
    return {**environment, TUNABLES: tunables, **spin}


def restart_tuned() -> None:
    """Re-executes this process with `tuned_environment` and the same process id; returns if it is already set. Stop
    signals exit with 75 from here on. Call it before slow imports and before opening files."""
    prepare_process()
    exit_on_signals()
    environment = tuned_environment(os.environ)
    if sys.platform == "linux" and environment != dict(os.environ):
        block_signals()  # exec resets handlers: until they are set again, a signal would kill the process
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the garbage collector during imports: it takes 10 % of startup, and imported objects stay until exit."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def exit_as_rank(code: object) -> None:
    """Exits at once with `code` if this process is a rank of an initialized process group; otherwise returns."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(code, int) or not distributed.is_initialized():
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal interpreter exit would let gloo abort with 134
