"""python -m jobs.status: prints the progress of a run: blocks, rows, workers and remaining time."""

import hydra

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.logs import setup_plain_logging
from jobs.config.settings import Composed, LogLevel, load
from jobs.reporting.config import StatusConfig, StatusFormat


@hydra.main(config_path="../conf", config_name="status", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(StatusConfig, composed)
    setup_plain_logging(LogLevel.warning)

    from jobs.record.run_reader import find_runs
    from jobs.reporting.status import format_json, format_text, read_status

    statuses = [read_status(run) for run in find_runs(config.names, "run")]
    print_line(format_json(statuses) if config.format is StatusFormat.json else format_text(statuses))


if __name__ == "__main__":
    run_job(main, StatusConfig)
