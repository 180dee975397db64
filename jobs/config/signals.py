"""Graceful stop on signals, without waiting for the main thread to leave a long matrix product.

Python runs a signal handler in the main thread between two bytecodes, so it waits for a running product. The C part of
a handler runs at once and writes the signal's number to the wakeup descriptor, which a helper thread reads. `sigwait`
would not work: threads of numpy, pyarrow and torch do not block signals, and SIGTERM delivered to one ends the process.
"""

import atexit
import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)  # ignored in background jobs (SIGINT) and under nohup (SIGHUP)
INTERRUPTED_EARLY = b"interrupted before the run started; start the same command again\n"
EXIT_INTERRUPTED = 75
STOPPING = b"\nstopping after the current pass; press Ctrl-C again to stop at once\n"
STOPPING_ONCE = b"\nstopping after the current pass\n"
STOPPED = b"\nstopped at once; start the same command again to resume from the last commit\n"
MESSAGE_SECONDS = 0.5  # that the last message may take
STOP_BYTE = 0  # no signal has this number
BURST_SECONDS = 0.5  # `timeout` and Ctrl-C in a pipeline signal the process and its group: one request, sent twice


def stop_signals() -> list[signal.Signals]:
    """The stop signals, except SIGINT and SIGHUP if the parent process has set them to ignored."""
    return [s for s in STOP_SIGNALS if s not in TERMINAL_SIGNALS or signal.getsignal(s) is not signal.SIG_IGN]


def block_signals() -> None:
    """Blocks the stop signals, also across `os.exec`, until `exit_on_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def exit_on_signals() -> None:
    """Unblocks the stop signals. Until a `StopFlag` is entered, a signal, even a pending one, exits with 75. Called
    before slow imports, while there is nothing to save."""
    for number in stop_signals():
        signal.signal(number, _exit_handler)
    atexit.register(ignore_signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _exit_handler(number: int, frame: FrameType | None) -> None:
    if not StopFlag.was_watching:  # after a StopFlag, the job has printed the reason
        os.write(2, INTERRUPTED_EARLY)
    os._exit(EXIT_INTERRUPTED)


def ignore_signals() -> None:
    """Ignores stop signals during interpreter shutdown, to keep the exit code: launchers signal the remaining processes
    once one has ended."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


class StopFlag:
    """Flag set by the first stop signal; a context manager, entered in the main thread. A second signal exits at once
    with 75 and without clean-up, which committed parts do not need."""

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
        """The signal's name, such as `SIGTERM`; empty before one arrives."""
        return self._name

    def __call__(self) -> bool:
        return self.requested

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # a signal handler must not wait for space in the pipe
        self._old_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _do_nothing) for number in stop_signals()}
        for number in self._old_handlers:
            signal.siginterrupt(number, False)  # reads in flight continue instead of failing with EINTR
        self._is_watching = StopFlag.was_watching = True
        self._thread = threading.Thread(target=self._watch, name="stop-flag", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_watching:  # in a forked child: the pipe belongs to the parent
            return
        self._restore()
        os.write(self._writer, bytes([STOP_BYTE]))  # closing is not enough: a forked child may hold the pipe open
        self._thread.join()  # before closing: the thread reads from the pipe
        os.close(self._writer)
        os.close(self._reader)

    def _restore(self) -> None:
        self._is_watching = False
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_descriptor)

    def _reset_after_fork(self) -> None:
        """Restores the handlers in a forked child, such as a worker of `datasets`: its signals must not stop the
        parent."""
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
                self._event.set()
                _write_aside(STOPPING if number in TERMINAL_SIGNALS else STOPPING_ONCE)
            elif number != first or now_seconds - first_seconds > BURST_SECONDS:
                _write_aside(STOPPED).join(MESSAGE_SECONDS)
                os._exit(EXIT_INTERRUPTED)


def _write_aside(message: bytes) -> threading.Thread:
    """Writes to stderr in a thread of its own: a blocked terminal must not hold up the second signal."""
    thread = threading.Thread(target=_write, args=(message,), name="stop-message", daemon=True)
    thread.start()
    return thread


def _write(message: bytes) -> None:
    with suppress(OSError):
        os.write(2, message)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Python-level handler: its presence installs the C handler that writes to the wakeup descriptor."""
