"""python -m jobs.export: writes a run's output to one JSONL, CSV or Parquet file, in the order of its input."""

import hydra

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.logs import setup_plain_logging
from jobs.config.settings import Composed, LogLevel, load
from jobs.exporting.config import ExportConfig


@hydra.main(config_path="../conf", config_name="export", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(ExportConfig, composed)
    setup_plain_logging(LogLevel.warning)

    from jobs.config.signals import StopFlag
    from jobs.exporting.export import export, resolve_output
    from jobs.exporting.shards import wait_until_finished

    resolve_output(config)  # fail early
    if config.wait:
        with StopFlag() as stop:
            wait_until_finished(config.runs, stop, print_line)
    for line in export(config).lines:
        print_line(line)


if __name__ == "__main__":
    run_job(main, ExportConfig)
