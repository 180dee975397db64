"""python -m jobs.encode: embeddings, classes or masked tokens, read off prompts, resumably."""

import logging
import sys
import time

from jobs.config.process import start_settled, uncollected

if __name__ == "__main__":
    start_settled()  # before the imports that take long

import hydra

from jobs.config.cli import as_job, ended, run_job, say, with_kind
from jobs.config.logs import log_start
from jobs.config.settings import Composed, EncodeConfig, load

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

    # torch and transformers are loaded only once the config is known to be good
    if config.num_workers != 1:
        from jobs.workers.local import led

        if (result := led(config, sys.argv[1:], [sys.executable, *sys.orig_argv[1:]])) is not None:
            return ended(*result)
    with uncollected():
        from jobs.config.signals import StopFlag
        from jobs.exporting.export import write_batch_files
        from jobs.record.passes import Start
        from jobs.record.stored_run import add_batch_files
        from jobs.run.encoding import encoding
        from jobs.run.ranks import perform_in_ranks
        from jobs.run.row_errors import told_outcome

    with StopFlag() as stop:
        outcome = perform_in_ranks(*encoding(config), stop, Start(at=began_at, clock=began))
    if isinstance(outcome, int):
        return outcome
    if outcome.was_finished:
        say(f"{outcome.directory} is finished: nothing to do")
    say(told_outcome(outcome))
    if config.has_batch_files:
        say("\n".join(write_batch_files(outcome.directory)))
        add_batch_files(config, outcome.directory)
    say(HOW_TO_READ.format(folder=outcome.directory / "generations"))
    return outcome.exit_code


if __name__ == "__main__":
    sys.argv[1:] = with_kind(sys.argv[1:])
    run_job(main, EncodeConfig)
