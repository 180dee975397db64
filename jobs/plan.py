"""python -m jobs.plan: what a run would take of each memory and how long, without weights and without its machine."""

from pathlib import Path
from typing import TYPE_CHECKING

import hydra

from jobs.config.cli import as_job, run_job, say
from jobs.config.process import uncollected
from jobs.config.settings import Composed, load
from jobs.planning.config import PlanConfig

if TYPE_CHECKING:
    from jobs.planning.planning import Planned


@hydra.main(config_path="../conf", config_name="plan", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(PlanConfig, composed)

    with uncollected():
        from jobs.planning.planning import make_plan
        from jobs.planning.report import report

    planned = make_plan(config)
    say(report(planned, config.plan.num_actions))
    if config.plan.draws:
        _write(config, planned)


def _write(config: PlanConfig, planned: "Planned") -> None:
    """Tables and pictures: here alone matplotlib is loaded."""
    from jobs.files.publishing import make_directory
    from jobs.planning.plan_files import run_sweep, write_timeline

    directory = make_directory(Path(config.plan.directory))
    if config.plan.timeline:
        say(f"\ntimeline: {write_timeline(planned, directory)}, in {directory}")
    if config.plan.sweep is not None:
        say()
        for line in run_sweep(config, planned, directory):
            say(line)
        say(f"in {directory}")


if __name__ == "__main__":
    run_job(main, PlanConfig)
