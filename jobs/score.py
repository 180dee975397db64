"""python -m jobs.score: log-probabilities of given targets behind their prompts, or of documents, resumably."""

import logging
import sys
import time

from jobs.config.process import start_settled, uncollected

if __name__ == "__main__":
    start_settled()  # before the imports that take long

import hydra

from jobs.config.cli import as_job, ended, run_job, say, with_kind
from jobs.config.logs import log_start
from jobs.config.settings import Composed, ScoreConfig, load

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

    # torch and transformers are loaded only once the config is known to be good
    if config.num_workers != 1:
        from jobs.workers.local import led

        if (result := led(config, sys.argv[1:], [sys.executable, *sys.orig_argv[1:]])) is not None:
            return ended(*result)
    with uncollected():
        from jobs.config.signals import StopFlag
        from jobs.record.passes import Start
        from jobs.run.ranks import perform_in_ranks
        from jobs.run.row_errors import told_outcome
        from jobs.run.scoring import scoring, sentence

    with StopFlag() as stop:
        outcome = perform_in_ranks(*scoring(config), stop, Start(at=began_at, clock=began))
    if isinstance(outcome, int):
        return outcome
    if outcome.was_finished:
        say(f"{outcome.directory} is finished: nothing to do")
    say(told_outcome(outcome))
    say(HOW_TO_READ.format(folder=outcome.directory / "generations"))
    say(f"\n{sentence(outcome.summary.totals or {})}")
    return outcome.exit_code


if __name__ == "__main__":
    sys.argv[1:] = with_kind(sys.argv[1:])
    run_job(main, ScoreConfig)
