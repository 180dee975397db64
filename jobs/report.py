"""python -m jobs.report: compares runs in a table, and writes an HTML page for a single run."""

import shutil
from pathlib import Path

import hydra

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.logs import setup_plain_logging
from jobs.config.settings import Composed, LogLevel, load, require_packages
from jobs.reporting.config import ReportConfig


@hydra.main(config_path="../conf", config_name="report", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(ReportConfig, composed)
    setup_plain_logging(LogLevel.warning)
    require_packages(config.track)

    from jobs.record.unfinished import describe_unfinished
    from jobs.reporting.directories import find_directories
    from jobs.reporting.figures import RunFigures
    from jobs.reporting.overview import make_overview, write_overview
    from jobs.reporting.text_tables import format_evaluations

    found = find_directories(config.names, "run")
    runs = [RunFigures(run=run) for run in found.all_runs]
    table = make_overview(runs)
    parts = ["\n".join(format_evaluations(found.evaluations))] if found.evaluations else []
    parts += [table.text(shutil.get_terminal_size((120, 24)).columns)] if runs or not parts else []
    print_line("\n\n".join(parts))
    if unfinished := describe_unfinished([figures.run for figures in runs]):
        print_line("\n" + "\n".join(unfinished))
    directory = Path(config.directory) if config.directory is not None else None
    if directory is not None:
        print_line(f"\nin {directory}: {', '.join(path.name for path in write_overview(table, directory))}")
    if len(runs) == 1:
        from jobs.reporting.page import write_page

        print_line(f"\npage: {write_page(runs[0], config.samples, directory)}")
    if config.track:
        from jobs.tracking.sending import send_run

        for figures in runs:
            for line in send_run(figures.run, [tracker.value for tracker in config.track]):
                print_line(line)


if __name__ == "__main__":
    run_job(main, ReportConfig)
