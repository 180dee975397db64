"""python -m jobs.generate: generates a completion for each prompt of a data set; resumable."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from jobs.config.process import restart_tuned

if __name__ == "__main__":
    restart_tuned()  # before the imports that take long

import hydra

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.logs import log_start
from jobs.config.settings import Composed, GenerateConfig, load
from jobs.datasets.config import DatasetKind
from jobs.datasets.files import require_existing_path
from jobs.run.command import run_command
from jobs.run.summary_table import format_completions
from runtime.checkpoint_source.localize import find_local_path
from runtime.config.texts import is_url

if TYPE_CHECKING:
    from jobs.record.summary import Outcome
    from jobs.run.tasks.task import Task

HOW_TO_READ = """
output: {folder}

    import pandas as pd
    rows = pd.read_parquet("{folder}")
    print(rows[["id", "status", "completion"]].head())"""


@hydra.main(config_path="../conf", config_name="generate", version_base=None)
@as_job
def main(composed: Composed) -> int:
    began_at, began = time.time(), time.monotonic()
    config = load(GenerateConfig, composed)
    log_start(logging.getLogger("jobs.generate"), config)

    # Slow imports (torch, transformers) come after the checks of settings and paths.
    find_local_path(config.model)
    path = config.dataset.path
    if path is not None and not is_url(path) and config.dataset.kind is not DatasetKind["hub"]:
        require_existing_path(path)
    return run_command(config, _load_task, partial(_print_results, config), at=began_at, clock=began)


def _load_task() -> "Callable[[GenerateConfig], tuple[Task, GenerateConfig]]":
    from jobs.run.tasks.generate import generation_task

    return lambda config: (generation_task(config), config)


def _print_results(config: GenerateConfig, outcome: "Outcome") -> None:
    """Prints samples of the generations and how to read them."""
    folder = outcome.directory / "generations"
    if config.dataset.kind is DatasetKind["tasks"] and config.dataset.keep_columns:
        from jobs.grading.grading import format_task_answers

        print_line(f"\n{format_task_answers(folder)}")
    print_line(HOW_TO_READ.format(folder=folder))
    if config.dataset.prompt is not None:
        print_line("\n" + format_completions(folder))


if __name__ == "__main__":
    run_job(main, GenerateConfig)
