"""python -m jobs.status: prints the progress of a run: blocks, rows, workers and remaining time; that of the runs of
an evaluation or of a server's batches."""

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

    from jobs.reporting.directories import find_directories
    from jobs.reporting.status import format_json, format_text, read_statuses

    statuses = read_statuses(find_directories(config.names, "run"))
    print_line(format_json(statuses) if config.format is StatusFormat.json else format_text(statuses))


if __name__ == "__main__":
    run_job(main, StatusConfig)
