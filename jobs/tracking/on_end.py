"""Runs the user's command at the end of a run."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress

from runtime.units import format_seconds

from ..config.signals import StopFlag

log = logging.getLogger(__name__)
POLL_SECONDS = 0.05
TERM_SECONDS = 2.0  # between SIGTERM and SIGKILL


def run_on_end(command: str, variables: Mapping[str, str], limit_seconds: float) -> None:
    """Runs `command` by /bin/sh with `variables` added to the environment, its output on stderr. Logs a failure; after
    `limit_seconds` or a stop signal the command and its children are ended. Raises nothing."""
    begin = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            shell=True,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,  # to end its children with it
        )
    except (OSError, ValueError) as error:  # no shell, an argument list that is too long, a NUL character
        log.warning("on_end could not be started: %s", error)
        return
    reason = ""
    with StopFlag() as stop:
        while process.poll() is None and not reason:
            if stop.requested:
                reason = f"was stopped by {stop.signal_name}"
            elif time.monotonic() - begin >= limit_seconds:
                reason = f"did not end within {limit_seconds:g} s (on_end_seconds) and was stopped"
            else:
                time.sleep(POLL_SECONDS)
        if reason:
            _end_group(process)
    if reason:
        log.warning("on_end %s; the run is not affected", reason)
    elif process.returncode:
        code = process.returncode
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        log.warning("on_end ended with %s; the run is not affected", how)
    else:
        log.info("on_end ended after %s", format_seconds(time.monotonic() - begin))


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERM_SECONDS)
