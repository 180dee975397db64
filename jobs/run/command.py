"""Common main function of the jobs generate, score and encode."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from runtime.errors import require

from ..config.cli import print_and_return, print_line
from ..config.error_log import log_errors
from ..config.process import gc_paused
from ..config.settings import GenerateConfig, RunSettings, ScoreConfig, SummaryFormat, run_directory
from ..datasets.config import check_first_rows
from ..exporting.config import SUFFIXES, ExportConfig
from ..exporting.export import export, resolve_output, write_batch_files
from ..record.finished import find_finished, input_state, record_inputs
from ..record.passes import Start
from ..record.run_dir import RunDirectory, require_writable
from ..record.summary import Outcome
from ..tracking.feed import RunFeed
from ..tracking.follower import RunFollower
from .summary_table import format_completions, format_outcome

if TYPE_CHECKING:
    from runtime.ranks.ranks import Ranks

    from .tasks.task import Task

Settings = TypeVar("Settings", bound=RunSettings)
HOW_TO_READ_TURNS = """
output: {folder}/turn-*/generations, a run for each turn; as one file:

    weightstream export run={folder} out=answers.jsonl"""


def run_command(
    config: Settings,
    load_task: "Callable[[], Callable[[Settings], tuple[Task, RunSettings]]]",
    print_results: Callable[[Outcome], None],
    *,
    at: float,
    clock: float,
) -> int:
    """Runs the job, prints the result and returns the exit code. `load_task` imports torch and returns a function from
    settings to the task and its adjusted settings. `print_results`: prints results below the summary table. `at`,
    `clock`: start of the process, in Unix and monotonic seconds. Raises the errors of runtime.errors."""
    if config.out is not None:
        known = ", ".join(f".{name}" for name in SUFFIXES)
        require(Path(config.out).suffix[1:] in SUFFIXES, f"out={config.out} must end in one of {known}")
        resolve_output(_export_config(config))
    start = Start(at=at, clock=clock)
    with RunFollower(config, run_directory(config), start) as follower, log_errors():
        state = input_state(config)  # before the inputs are read
        if (finished := find_finished(config, state)) is not None:
            follower.exit_code = _print_outcome(config, finished, print_results)
            return follower.exit_code
        # Checks that need neither torch nor the model come first.
        require_writable(run_directory(config))
        target_field = None
        if isinstance(config, ScoreConfig) and not config.score.rolling:
            target_field = config.score.target_field
        check_first_rows(config.dataset, target_field)
        if config.num_workers != 1:
            from ..workers.local import supervise_workers

            if (result := supervise_workers(config, sys.argv[1:], [sys.executable, *sys.orig_argv[1:]])) is not None:
                follower.exit_code = print_and_return(*result)
                return follower.exit_code
        with gc_paused():
            from ..config.signals import StopFlag
            from .ranks import follow_run, join_ranks
            from .run import run_task
            from .tasks.converse import follow_turns

            make_task = load_task()
        with StopFlag() as stop, join_ranks(config.devices, stop) as ranks:
            if isinstance(config, GenerateConfig) and config.dataset.has_turns:
                if ranks is not None and ranks.rank:
                    return follow_turns(config, stop, ranks)
                follower.exit_code = _run_turns(config, stop, start, ranks, follower.feed)
                return follower.exit_code
            task, settings = make_task(config)
            if ranks is not None and ranks.rank:
                return follow_run(task, settings, stop, ranks)
            outcome = run_task(task, settings, stop, start, ranks, feed=follower.feed)
        record_inputs(outcome.directory, state)
        follower.exit_code = _print_outcome(config, outcome, print_results)
        return follower.exit_code


def _run_turns(
    config: GenerateConfig, should_stop: Callable[[], bool], start: Start, ranks: "Ranks | None", feed: RunFeed
) -> int:
    """Runs the turns of chats and prints the summary of each as it ends. Returns the exit code of the worst."""
    from .tasks.converse import run_turns

    outcomes: list[Outcome] = []
    for turn, outcome in enumerate(run_turns(config, should_stop, start, ranks, feed), start=1):
        outcomes.append(outcome)
        if config.prints_tables:
            print_line(f"turn {turn}{': finished, nothing to do' if outcome.was_finished else ''}")
            print_line(format_outcome(outcome))
    exported = _write_out(config)
    if config.summary is SummaryFormat.json:
        print_line(json.dumps({"turns": [outcome.values for outcome in outcomes]}))
    elif config.prints_tables:
        print_line("\n".join([*exported, HOW_TO_READ_TURNS.format(folder=run_directory(config))]))
    return max(outcome.exit_code for outcome in outcomes)


def _print_outcome(config: RunSettings, outcome: Outcome, print_results: Callable[[Outcome], None]) -> int:
    """Writes OpenAI's batch files and `config.out`; prints the summary and results. Returns the exit code."""
    if config.prints_tables:
        if outcome.was_finished:
            print_line(f"{outcome.directory} is finished: nothing to do")
        print_line(format_outcome(outcome))
    exported: list[str] = []
    if config.has_batch_files:
        from ..record.stored_run import upload_batch_files

        exported += write_batch_files(outcome.directory)
        upload_batch_files(config, outcome.directory)
    if RunDirectory(path=outcome.directory).success.exists():  # otherwise the worker that finishes the run writes it
        exported += _write_out(config)
    if config.summary is SummaryFormat.json:
        print_line(json.dumps(outcome.values))
    elif config.prints_tables:
        if exported:
            print_line("\n".join(["", *exported]))
        print_results(outcome)
    elif isinstance(config, GenerateConfig) and config.dataset.prompt is not None:
        print_line(format_completions(outcome.directory / "generations"))
    return outcome.exit_code


def _write_out(config: RunSettings) -> list[str]:
    """Writes `config.out`, if set; returns the lines that describe it."""
    return export(_export_config(config)).lines if config.out is not None else []


def _export_config(config: RunSettings) -> ExportConfig:
    return ExportConfig(run=str(run_directory(config)), out=config.out)
