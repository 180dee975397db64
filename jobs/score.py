"""python -m jobs.score: computes log-probabilities of targets after their prompts, or of documents; resumable."""

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
from jobs.config.settings import Composed, ScoreConfig, load
from jobs.run.command import run_command
from jobs.run.summary_table import format_totals

if TYPE_CHECKING:
    from jobs.record.summary import Outcome
    from jobs.run.tasks.task import Task

HOW_TO_READ = """
output: {folder}

    import pandas as pd
    rows = pd.read_parquet("{folder}")
    print(rows[["id", "target_index", "logprob", "is_greedy"]].head())"""


@hydra.main(config_path="../conf", config_name="score", version_base=None)
@as_job
def main(composed: Composed) -> int:
    began_at, began = time.time(), time.monotonic()
    config = load(ScoreConfig, composed)
    log_start(logging.getLogger("jobs.score"), config)
    return run_command(config, _load_task, _print_results, at=began_at, clock=began)


def _load_task() -> "Callable[[ScoreConfig], tuple[Task, ScoreConfig]]":
    from jobs.run.tasks.score import scoring_task

    return scoring_task


def _print_results(outcome: "Outcome") -> None:
    print_line(HOW_TO_READ.format(folder=outcome.directory / "generations"))
    print_line(f"\n{format_totals(outcome.summary.totals or {})}")


if __name__ == "__main__":
    run_job(main, ScoreConfig)
