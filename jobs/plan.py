"""python -m jobs.plan: predicts the memory use and time of a run, without weights, for any machine."""

from pathlib import Path

import hydra

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.logs import setup_plain_logging
from jobs.config.process import gc_paused
from jobs.config.screen import fold_for_screen
from jobs.config.settings import Composed, LogLevel, load
from jobs.planning.config import PlanConfig


@hydra.main(config_path="../conf", config_name="plan", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(PlanConfig, composed)
    setup_plain_logging(LogLevel.info)

    with gc_paused():
        from jobs.planning.planning import make_plan, with_prompts
        from jobs.planning.report import format_plan

    config = with_prompts(config)
    planned = make_plan(config)
    print_line(fold_for_screen(format_plan(planned, config.plan.num_actions)))
    if not config.plan.writes_files:
        return

    from jobs.files.publishing import make_directory
    from jobs.planning.plan_files import run_sweep, write_timeline  # matplotlib

    directory = make_directory(Path(config.plan.directory))
    if config.plan.timeline:
        print_line(f"\ntimeline: {write_timeline(planned, directory)}, in {directory}")
    if config.plan.sweep is not None:
        print_line()
        for line in run_sweep(config, planned, directory):
            print_line(line)
        print_line(f"in {directory}")


if __name__ == "__main__":
    run_job(main, PlanConfig)
