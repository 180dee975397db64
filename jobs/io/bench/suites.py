"""What is measured in which order: each suite's measurements, rounds of them, and its table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .config import BenchConfig, Suite
from .policies import Attempt, attempts, policies_table, worth_repeating
from .predictions import Case, outcomes_of, predictions_table
from .report import as_json, markdown
from .task import Result, Task
from .worker import measured, task_of

Measure = Callable[[Task], Result]
Say = Callable[[str], object]
Named = TypeVar("Named")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """`rounds` are for JSON, by what was measured."""

    table: str
    rounds: Mapping[str, object]


def run_suite(config: BenchConfig, paths: Sequence[str], say: Say, measure: Measure = measured) -> Measured:
    """`say` is told how each measurement went. Raises MillraceError where a contender fails."""
    if config.suite is Suite.policies:
        return _policies(config, paths, say, measure)
    blocks = config.blocks if config.suite is Suite.predictions else [config.num_prompts]
    tasks = {
        Case(path=path, contender=contender.value, num_sequences=block): task_of(config, contender, path, block)
        for path in paths
        for contender in config.contenders
        for block in blocks
    }
    rounds: dict[Case, list[Result]] = {case: [] for case in tasks}
    for turn in range(config.rounds):
        _measure_all(turn, tasks, rounds, say, measure)
    if config.suite is Suite.predictions:
        table = predictions_table([outcome for case in rounds for outcome in outcomes_of(case, rounds[case])])
    else:
        table = markdown({case.contender: results for case, results in rounds.items()})
    return _done(table, rounds)


def _policies(config: BenchConfig, paths: Sequence[str], say: Say, measure: Measure) -> Measured:
    """All of them once, then again those between which the others decide nothing."""
    rounds: dict[Attempt, list[Result]] = {attempt: [] for path in paths for attempt in attempts(config, path)}
    for turn in range(config.rounds):
        again = worth_repeating(rounds) if turn else rounds
        _measure_all(turn, {attempt: attempt.task for attempt in again}, rounds, say, measure)
    return _done(policies_table(rounds), rounds)


def _measure_all(
    turn: int, tasks: Mapping[Named, Task], rounds: Mapping[Named, list[Result]], say: Say, measure: Measure
) -> None:
    for name, task in tasks.items():
        result = measure(task)
        rounds[name].append(result)
        say(f"round {turn + 1} {name}: {result.seconds:.1f} s")


def _done(table: str, rounds: Mapping[Named, Sequence[Result]]) -> Measured:
    return Measured(table=table, rounds={str(name): as_json(results) for name, results in rounds.items()})
