"""python -m jobs.plan: what a run would take of each memory and how long, without weights and without its machine."""

import hydra

from jobs.io.cli import as_job, run_job
from jobs.io.config import Composed, load
from jobs.io.plan.config import PlanConfig


@hydra.main(config_path="../conf", config_name="plan", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(PlanConfig, composed)

    from jobs.io.plan.planning import make_plan
    from jobs.io.plan.report import report

    print(report(make_plan(config), config.plan.num_actions))


if __name__ == "__main__":
    run_job(main, PlanConfig)
