"""python -m jobs.generate: one completion for each prompt of a data set, resumably. `--help` lists what can be
chosen."""

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.config.process import start_settled, uncollected

if __name__ == "__main__":
    start_settled()  # before the imports that take long

import hydra

from jobs.config.cli import as_job, ended, run_job, say, with_kind, with_prompt
from jobs.config.logs import log_start
from jobs.config.settings import Composed, GenerateConfig, load, run_directory
from jobs.datasets.config import DatasetKind
from jobs.datasets.files import require_there
from runtime.config.texts import is_url
from runtime.origin.place import local_place

if TYPE_CHECKING:
    from jobs.run.generation import Outcome

HOW_TO_READ_TURNS = """
output: {folder}/turn-1/generations and so on, a run for each turn; as one file:

    millrace export run={folder} out=answers.jsonl"""
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

    # torch and transformers are loaded only once the config and what it points at are known to be there
    local_place(config.model)
    path = config.dataset.path
    if path is not None and not is_url(path) and config.dataset.kind is not DatasetKind["hub"]:
        require_there(path)
    if config.num_workers != 1:
        from jobs.workers.local import led

        if (result := led(config, sys.argv[1:], [sys.executable, *sys.orig_argv[1:]])) is not None:
            return ended(*result)
    with uncollected():
        from jobs.config.signals import StopFlag
        from jobs.exporting.export import write_batch_files
        from jobs.record.passes import Start
        from jobs.record.stored_run import add_batch_files
        from jobs.run.conversation import converse, follow_turns
        from jobs.run.generation import generation
        from jobs.run.ranks import perform_in_ranks, ranks_of
        from jobs.run.row_errors import told_outcome

    with StopFlag() as stop:
        start = Start(at=began_at, clock=began)
        if config.dataset.has_turns:
            with ranks_of(config.devices, stop) as ranks:
                if ranks is not None and ranks.rank:
                    return follow_turns(config, stop, ranks)
                return _told_of_turns(converse(config, stop, start, ranks), run_directory(config))
        outcome = perform_in_ranks(generation(config), config, stop, start)
    if isinstance(outcome, int):
        return outcome
    if outcome.was_finished:
        say(f"{outcome.directory} is finished: nothing to do")
    say(told_outcome(outcome))
    if config.has_batch_files:
        say("\n".join(write_batch_files(outcome.directory)))
        add_batch_files(config, outcome.directory)
    _tell_of_rows(config, outcome.directory / "generations")
    return outcome.exit_code


def _tell_of_rows(config: GenerateConfig, folder: Path) -> None:
    """Says what there is to see in a run's generations, and how."""
    if config.dataset.kind is DatasetKind["tasks"] and config.dataset.keep_columns:
        from jobs.grading.grading import told

        say(f"\n{told(folder)}")
    say(HOW_TO_READ.format(folder=folder))
    if config.dataset.prompt is not None:
        say("\n" + answers(folder))


def _told_of_turns(outcomes: Iterator["Outcome"], directory: Path) -> int:
    """Says what each turn came to, as it ends; the exit code of the worst of them."""
    from jobs.run.row_errors import told_outcome

    code = 0
    for turn, outcome in enumerate(outcomes, start=1):
        say(f"turn {turn}{': finished, nothing to do' if outcome.was_finished else ''}")
        say(told_outcome(outcome))
        code = max(code, outcome.exit_code)
    say(HOW_TO_READ_TURNS.format(folder=directory))
    return code


def answers(folder: Path) -> str:
    """The completions of a run of one prompt, or what is wrong with them."""
    import pyarrow.parquet as pq

    rows = pq.read_table(folder, columns=["completion", "error"]).to_pylist()
    return "\n\n".join(row["error"] or row["completion"] for row in rows)


if __name__ == "__main__":
    sys.argv[1:] = with_kind(with_prompt(sys.argv[1:]))
    run_job(main, GenerateConfig)
