"""Runs to be killed, each in a process of its own that is forked off one which has loaded the libraries."""

import multiprocessing
import signal
import time
from collections.abc import Callable

from jobs.io.config import GenerateConfig
from jobs.io.generation import generate

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["jobs.io.generation", "runtime.cache.attention_kernel"])


def run_and_kill(config: GenerateConfig, has_got_somewhere: Callable[[], bool], *, after_seconds: float) -> None:
    """Starts or goes on with the run, and kills it `after_seconds` after it has got somewhere."""
    process = PROCESSES.Process(target=run_alone, args=(config,))
    process.start()
    while process.is_alive() and not has_got_somewhere():
        time.sleep(0.005)
    time.sleep(after_seconds)
    assert process.is_alive(), "the run ended before it could be killed: make it longer"
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def run_alone(config: GenerateConfig) -> None:
    generate(config, lambda: False)
