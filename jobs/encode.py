"""python -m jobs.encode: computes embeddings, classes or masked tokens of prompts; resumable."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jobs.config.process import restart_tuned

if __name__ == "__main__":
    restart_tuned()  # before the imports that take long

import hydra

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.logs import log_start
from jobs.config.settings import Composed, EncodeConfig, load
from jobs.run.command import run_command

if TYPE_CHECKING:
    from jobs.run.tasks.task import Task

HOW_TO_READ = """
output: {folder}

    import pandas as pd
    rows = pd.read_parquet("{folder}")
    print(rows.drop(columns=["block", "micro_batch"]).head())"""


@hydra.main(config_path="../conf", config_name="encode", version_base=None)
@as_job
def main(composed: Composed) -> int:
    began_at, began = time.time(), time.monotonic()
    config = load(EncodeConfig, composed)
    log_start(logging.getLogger("jobs.encode"), config)
    return run_command(
        config,
        _load_task,
        lambda outcome: print_line(HOW_TO_READ.format(folder=outcome.directory / "generations")),
        at=began_at,
        clock=began,
    )


def _load_task() -> "Callable[[EncodeConfig], tuple[Task, EncodeConfig]]":
    from jobs.run.tasks.encode import encoding_task

    return encoding_task


if __name__ == "__main__":
    run_job(main, EncodeConfig)
