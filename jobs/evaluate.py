"""python -m jobs.evaluate: runs tasks of lm-evaluation-harness; resumable."""

import json
import time
from importlib.util import find_spec
from pathlib import Path

from jobs.config.process import gc_paused, restart_tuned

if __name__ == "__main__":
    restart_tuned()  # before the imports that take long

import hydra

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.error_log import log_errors
from jobs.config.logs import setup_logging
from jobs.config.settings import Composed, SummaryFormat, load
from jobs.evaluating.config import EvaluateConfig, evaluation_directory
from jobs.record.passes import Start
from jobs.record.run_dir import require_writable
from jobs.tracking.follower import RunFollower
from runtime.errors import require


@hydra.main(config_path="../conf", config_name="evaluate", version_base=None)
@as_job
def main(composed: Composed) -> None:
    began_at, began = time.time(), time.monotonic()
    config = load(EvaluateConfig, composed)
    require(find_spec("lm_eval") is not None, "weightstream evaluate needs the extra: pip install 'weightstream[eval]'")
    setup_logging(config.log_level, quiet=config.quiet)

    start = Start(at=began_at, clock=began)
    with RunFollower(config, evaluation_directory(config), start) as follower, log_errors():
        # Slow imports (torch, transformers) come after the checks of settings and tasks.
        require_writable(Path(config.output_root))
        with gc_paused():
            from jobs.evaluating.task_index import find_tasks

            manager = find_tasks(config.tasks, [*config.harness.include_path])
            from jobs.config.signals import StopFlag
            from jobs.evaluating.harness import evaluate

        with StopFlag() as stop:
            evaluation = evaluate(config, manager, stop, start, follower.feed)
        if config.summary is SummaryFormat.json:
            print_line(json.dumps({"directory": str(evaluation.directory), "results": evaluation.results}))
        else:
            print_line("\n".join(evaluation.lines))


if __name__ == "__main__":
    run_job(main, EvaluateConfig)
