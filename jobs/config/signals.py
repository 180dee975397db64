"""Stopping in time: a signal sets a flag at once, even while the main thread sits in a long product.

Python runs a signal handler in the main thread between two bytecodes, so it waits for a running matrix product; but
the C part of a handler runs at once, in whichever thread the kernel picked, and writes the signal's number into the
wakeup descriptor. A helper thread reads it there. (Blocking the signals and calling `sigwait` would not do: numpy,
pyarrow and torch start threads on import that block nothing, the kernel may hand SIGTERM to one of those, and its
default action ends the process.)
"""

import atexit
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)  # a shell has a background job ignore the one, nohup the other
NOTHING_BEGUN = b"interrupted: nothing was begun; start the same command again to go on\n"
EXIT_INTERRUPTED = 75
STOP_BYTE = 0  # no signal has this number
BURST_SECONDS = 0.5  # `timeout` and Ctrl-C in a pipeline signal the process and its group: one request, sent twice


def stop_signals() -> list[signal.Signals]:
    """Those that ask this process to stop. What whoever started it has had ignored goes on being ignored."""
    return [s for s in STOP_SIGNALS if s not in TERMINAL_SIGNALS or signal.getsignal(s) is not signal.SIG_IGN]


def block_signals() -> None:
    """Lets them wait, also across `os.exec`, until `exit_on_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def exit_on_signals() -> None:
    """Lets a signal, also one that has waited, end the process with 75 from now on, until a `StopFlag` takes over: a
    job calls this first, as imports from a cold file system can take long and there is nothing to save yet."""
    for number in stop_signals():
        signal.signal(number, _exit_handler)
    atexit.register(ignore_signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _exit_handler(number: int, frame: FrameType | None) -> None:
    if not StopFlag.was_watching:  # what ends behind it has said why
        os.write(2, NOTHING_BEGUN)
    os._exit(EXIT_INTERRUPTED)


def ignore_signals() -> None:
    """Has the process end with the exit code that it is about to end with: while the interpreter goes down, a signal
    would otherwise end it as if nobody listened, and launchers send one as soon as another process has ended."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


class StopFlag:
    """Says whether the run was asked to stop; a context manager to be entered in the main thread.

    The first SIGTERM, SIGUSR1, SIGINT or SIGHUP sets `requested`. A second one ends the process at once with exit code
    75, without any clean-up: committed parts need none.
    """

    was_watching = False

    def __init__(self) -> None:
        self._event = threading.Event()
        self._name = ""
        self._is_watching = False
        os.register_at_fork(after_in_child=self._reset_after_fork)

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    @property
    def signal_name(self) -> str:
        """`SIGTERM`, or an empty string as long as nothing was requested."""
        return self._name

    def __call__(self) -> bool:
        return self.requested

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._old_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _do_nothing) for number in stop_signals()}
        for number in self._old_handlers:
            signal.siginterrupt(number, False)  # reads in flight go on instead of failing with EINTR
        self._is_watching = StopFlag.was_watching = True
        self._thread = threading.Thread(target=self._watch, name="stop-flag", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_watching:  # a forked child that unwinds: the pipe is its parent's
            return
        self._restore()
        os.write(self._writer, bytes([STOP_BYTE]))  # closing would not do: a forked child may hold the pipe open
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def _restore(self) -> None:
        self._is_watching = False
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_descriptor)

    def _reset_after_fork(self) -> None:
        """Forgets the parent in a forked child, such as a worker of `datasets`: its signals are its own and must not
        stop the parent."""
        if self._is_watching:
            self._restore()

    def _watch(self) -> None:
        first, first_seconds = 0, 0.0
        while (number := os.read(self._reader, 1)[0]) != STOP_BYTE:
            if number not in self._old_handlers:
                continue
            now_seconds = time.monotonic()
            if not first:
                first, first_seconds = number, now_seconds
                self._name = signal.Signals(number).name
                self._event.set()  # nothing is logged here: a blocked terminal must not hold up the second signal
            elif number != first or now_seconds - first_seconds > BURST_SECONDS:
                os._exit(EXIT_INTERRUPTED)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Its only use is to exist: with it, Python installs the C handler that wakes the watcher."""
