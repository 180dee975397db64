"""Runs to be ended, each in a process of its own."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess

from jobs import generate as job
from jobs.config.cli import run_job
from jobs.config.settings import GenerateConfig
from jobs.run.tasks.generate import generate
from tests.processes import PROCESSES


def run_and_kill(
    config: GenerateConfig,
    has_got_somewhere: Callable[[], bool],
    *,
    after_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Starts or goes on with the run, and kills it `after_seconds` after it has got somewhere. `environment`: what it
    needs of ours beside what there was as the first of such processes was started."""
    process = PROCESSES.Process(target=run_alone, args=(config, environment or {}))
    process.start()
    while process.is_alive() and not has_got_somewhere():
        time.sleep(0.005)
    time.sleep(after_seconds)
    assert process.is_alive(), "the run ended before it could be killed: make it longer"
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def start_job(*arguments: str) -> BaseProcess:
    """What `python -m jobs.generate` does with these arguments."""
    process = PROCESSES.Process(target=job_alone, args=(arguments,))
    process.start()
    return process


def job_alone(arguments: Sequence[str]) -> None:
    sys.argv = ["generate", *arguments]
    run_job(job.main, GenerateConfig)


def run_alone(config: GenerateConfig, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    generate(config, lambda: False)
