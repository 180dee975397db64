"""The one door of runs: what generate, score and encode do with settings that are good, whatever is asked of a row."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..config.cli import print_and_return, print_line
from ..config.process import gc_paused
from ..config.settings import GenerateConfig, RunSettings, run_directory

if TYPE_CHECKING:
    from .run import Outcome
    from .tasks.task import Task

Settings = TypeVar("Settings", bound=RunSettings)
HOW_TO_READ_TURNS = """
output: {folder}/turn-1/generations and so on, a run for each turn; as one file:

    weightstream export run={folder} out=answers.jsonl"""


def run_door(
    config: Settings,
    load_task: "Callable[[], Callable[[Settings], tuple[Task, RunSettings]]]",
    tell: "Callable[[Outcome], None]",
    *,
    at: float,
    clock: float,
) -> int:
    """Runs the job to its end, together with the workers or ranks that the settings name, says what came of it and
    returns the exit code. `load_task` imports what takes long, torch among it, and returns what makes the task, and the
    settings that it takes. `tell`: says what there is to see beside the table. `at`, `clock`: when the process was
    started, by the wall and by the monotonic clock. Raises the errors of runtime.errors."""
    if config.num_workers != 1:
        from ..workers.local import supervise_workers

        if (result := supervise_workers(config, sys.argv[1:], [sys.executable, *sys.orig_argv[1:]])) is not None:
            return print_and_return(*result)
    with gc_paused():
        from ..config.signals import StopFlag
        from ..exporting.export import write_batch_files
        from ..record.passes import Start
        from ..record.stored_run import add_batch_files
        from .ranks import follow, ranks_of
        from .run import perform
        from .summary_table import outcome_text
        from .tasks.converse import converse, follow_turns

        task_of = load_task()
    start = Start(at=at, clock=clock)
    with StopFlag() as stop, ranks_of(config.devices, stop) as ranks:
        if isinstance(config, GenerateConfig) and config.dataset.has_turns:
            if ranks is not None and ranks.rank:
                return follow_turns(config, stop, ranks)
            code = 0
            for turn, outcome in enumerate(converse(config, stop, start, ranks), start=1):
                print_line(f"turn {turn}{': finished, nothing to do' if outcome.was_finished else ''}")
                print_line(outcome_text(outcome))
                code = max(code, outcome.exit_code)
            print_line(HOW_TO_READ_TURNS.format(folder=run_directory(config)))
            return code  # of the worst turn
        task, settings = task_of(config)
        if ranks is not None and ranks.rank:
            return follow(task, settings, stop, ranks)
        outcome = perform(task, settings, stop, start, ranks)
    if outcome.was_finished:
        print_line(f"{outcome.directory} is finished: nothing to do")
    print_line(outcome_text(outcome))
    if config.has_batch_files:
        print_line("\n".join(write_batch_files(outcome.directory)))
        add_batch_files(config, outcome.directory)
    tell(outcome)
    return outcome.exit_code
