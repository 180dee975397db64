"""Runs each suite: its measurements in rounds, and its table.

A refusal is the reason why a contender cannot run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from runtime.config.settings import Gather
from runtime.errors import WeightstreamError
from runtime.kernels.compiler import has_compiler

from .blocks import block_rates, block_sizes, blocks_table, draw_blocks, needed_sequences
from .config import BenchConfig, Suite, make_task
from .contenders import Contender, OwnContender, Peer
from .devices import RanksCase, devices_table, measure_ranks
from .evaluation import run_evaluation
from .floor import compute_floors, floors_table, product_seconds
from .gpu.suite import run_gpu
from .instruction_sets import restrict_instructions
from .larger_than_memory import run_larger
from .policies import Attempt, policies_table, policy_attempts, select_repeated
from .predictions import BlockCase, median_predictions, predictions_table
from .prefixes import make_prefix_task, prefixes_table, prompts_file
from .products import measure_products, products_table
from .report import commit, hardware, speed_table
from .runner import run_measurement
from .scale import ModelScale, measure_rows, measure_sizes, scale_table
from .task import BenchmarkTask, Measure, Result, Say, SuiteResult

Named = TypeVar("Named")  # what identifies a measured case: a name, or an object such as BlockCase

SEARCH_PROMPTS, SEARCH_NEW_TOKENS = 128, 8  # limits while a batch size is searched


def run_suite(config: BenchConfig, paths: Sequence[str], say: Say, measure: Measure = run_measurement) -> SuiteResult:
    """Runs a suite; `say` gets a line for each measurement. With suite=speed and predictions, a contender that cannot
    run is left out, and the table says why. Raises WeightstreamError if none can run, or if Weightstream fails in a
    measurement."""
    with restrict_instructions(config.isa):
        return _run_suite(config, paths, say, measure)


def _run_suite(config: BenchConfig, paths: Sequence[str], say: Say, measure: Measure) -> SuiteResult:
    """Runs a suite, as `run_suite`. The code below the conditions is for suite=speed and suite=predictions."""
    if config.suite is Suite.gpu:
        return run_gpu(config.gpu, config.prompt_tokens, config.rounds, say)
    if config.suite is Suite.evaluation:
        return run_evaluation(config, say)
    if config.suite is Suite.larger_than_memory:
        return run_larger(config, say, measure)
    if config.suite is Suite.devices:
        return _run_devices(config, paths[0], say)
    if config.suite is Suite.policies:
        return _run_policies(config, paths, say, measure)
    if config.suite is Suite.scale:
        return _run_scale(config, say)
    if config.suite is Suite.blocks:
        return _run_blocks(config, paths[0], say, measure)
    if config.suite is Suite.floor:
        return _run_floor(config, paths, say, measure)
    if config.suite is Suite.prefixes:
        return _run_prefixes(config, paths[0], say, measure)
    blocks = config.blocks if config.suite is Suite.predictions else [config.num_prompts]
    tasks = {case: task for path in paths for case, task in _cases(config, path, config.contenders, blocks).items()}
    rounds: dict[BlockCase, list[Result]] = {case: [] for case in tasks}
    refusals = _check_budgets(tasks, say, measure)
    if len(refusals) == len(tasks):
        raise WeightstreamError("no contender can run: " + "; ".join(refusals.values()))
    refusals |= _choose_batch_sizes(tasks, say, measure)
    for number in range(1, config.rounds + 1):
        remaining = {case: task for case, task in tasks.items() if case not in refusals}
        refusals |= _run_round(number, remaining, rounds, say, measure)
    rounds = {case: results for case, results in rounds.items() if case not in refusals}
    if config.suite is Suite.predictions:
        table = predictions_table([outcome for case in rounds for outcome in median_predictions(case, rounds[case])])
    else:
        table = speed_table({case.contender: results for case, results in rounds.items()}) if rounds else "Nothing ran."
        table += "".join(f"\n\n{case.contender} is left out: {why}" for case, why in refusals.items())
    return _make_result(table, rounds, [case for case in rounds if isinstance(tasks[case].entry, Peer)])


def _run_policies(config: BenchConfig, paths: Sequence[str], say: Say, measure: Measure) -> SuiteResult:
    """Measures all policies in the first round, and only the searched and the fastest ones in later rounds."""
    rounds: dict[Attempt, list[Result]] = {attempt: [] for path in paths for attempt in policy_attempts(config, path)}
    for number in range(1, config.rounds + 1):
        measured = rounds if number == 1 else select_repeated(rounds)
        _run_round(number, {attempt: attempt.task for attempt in measured}, rounds, say, measure)
    return _make_result(policies_table(rounds), rounds)


def _check_budgets(tasks: Mapping[Named, BenchmarkTask], say: Say, measure: Measure) -> dict[Named, str]:
    """Plans Weightstream's tasks without measuring. Returns the errors of tasks that do not fit into memory."""
    refusals: dict[Named, str] = {}
    for name, task in tasks.items():
        if isinstance(task.entry, OwnContender):
            try:
                measure(replace(task, is_check=True))
            except WeightstreamError as error:
                refusals[name] = str(error)
                say(f"{name} is left out: {error}")
    return refusals


def _choose_batch_sizes(tasks: dict[Named, BenchmarkTask], say: Say, measure: Measure) -> dict[Named, str]:
    """Sets batch sizes in `tasks`. Returns the errors of peers that fail."""
    refusals: dict[Named, str] = {}
    for name, task in tasks.items():
        try:
            tasks[name] = choose_batch_size(task, measure, say)
        except WeightstreamError as error:
            refusals[name] = _peer_refusal(task, error)
            say(f"{name}: {error}")
    return refusals


def choose_batch_size(task: BenchmarkTask, measure: Measure, say: Say) -> BenchmarkTask:
    """Returns the task with the batch size after which the rate falls or the peer fails. Returns it unchanged if the
    size is set, or if the contender has no batch size. Raises WeightstreamError if the smallest size fails."""
    entry = task.entry
    if task.batch_size is not None or not isinstance(entry, Peer) or not entry.batch_sizes:
        return task
    num_prompts = min(task.num_prompts, SEARCH_PROMPTS)
    sizes = [size for size in entry.batch_sizes if size <= num_prompts] or [num_prompts]
    if len(sizes) == 1:
        return replace(task, batch_size=sizes[0])
    part = replace(task, num_prompts=num_prompts, num_new_tokens=min(task.num_new_tokens, SEARCH_NEW_TOKENS))
    best, best_rate = sizes[0], 0.0
    for size in sizes:
        try:
            rate = measure(replace(part, batch_size=size)).rate
        except WeightstreamError as error:
            if size == sizes[0]:
                raise
            say(f"{task.contender} in batches of {size}: {error}")
            break
        say(f"{task.contender} in batches of {size}: {rate:.1f} tok/s")
        if rate < best_rate:
            break
        best, best_rate = size, rate
    return replace(task, batch_size=best)


def _run_devices(config: BenchConfig, path: str, say: Say) -> SuiteResult:
    task = make_task(config, Contender.nvme_unshared, path, config.num_prompts)
    rate = config.ranks.read_mb_per_second * 1e6
    cases = [
        RanksCase(num_ranks=size, bytes_per_second=rate, gather=gather.value)
        for size in config.ranks.sizes
        for gather in (config.ranks.gathers if size > 1 else [Gather.memory])
    ]
    rounds = {case: list[Result]() for case in cases}
    for number in range(1, config.rounds + 1):
        for case, results in rounds.items():
            results.append(measure_ranks(case, task))
            say(f"round {number} {case}: {results[-1].seconds:.1f} s")
    return _make_result(devices_table(rounds), rounds)


def _run_scale(config: BenchConfig, say: Say) -> SuiteResult:
    sizes, rows = measure_sizes(ModelScale(), config.rounds, config.num_threads, say), measure_rows(say)
    return _make_result(
        scale_table(ModelScale(), sizes, rows), {**sizes, **{each: [result] for each, result in rows.items()}}
    )


def _run_blocks(config: BenchConfig, path: str, say: Say, measure: Measure) -> SuiteResult:
    tasks = _cases(config, path, [Contender.nvme], block_sizes(config.num_prompts))
    rounds = _run_rounds(config.rounds, tasks, say, measure)
    largest = max(rounds, key=lambda case: case.num_sequences)
    needed = needed_sequences(tasks[largest])
    rates = block_rates({case.num_sequences: results for case, results in rounds.items()}, config.num_new_tokens)

    def draw(folder: Path) -> None:
        draw_blocks(folder / "blocks.png", rates, needed, f"{largest.name}, {hardware()}, commit {commit()}")

    return replace(_make_result(blocks_table(largest.name, rates, needed), rounds), draw=draw)


def _run_prefixes(config: BenchConfig, path: str, say: Say, measure: Measure) -> SuiteResult:
    rounds: dict[str, list[Result]] = {contender.value: [] for contender in config.contenders}
    refusals: dict[str, str] = {}
    with prompts_file(config, path) as file:
        tasks = {contender.value: make_prefix_task(config, contender, path, file) for contender in config.contenders}
        for number in range(1, config.rounds + 1):
            remaining = {name: task for name, task in tasks.items() if name not in refusals}
            refusals |= _run_round(number, remaining, rounds, say, measure)
    rounds = {name: results for name, results in rounds.items() if name not in refusals}
    text = prefixes_table(rounds) if rounds else "Nothing ran."
    text += "".join(f"\n\n{name} is left out: {why}" for name, why in refusals.items())
    return _make_result(text, rounds, [name for name in rounds if isinstance(tasks[name].entry, Peer)])


def _run_floor(config: BenchConfig, paths: Sequence[str], say: Say, measure: Measure) -> SuiteResult:
    """Measures the plain reader in every round, because the disk's rate varies. Measures products of storage formats if
    there is a C compiler."""
    tables: list[str] = []
    rounds: dict[BlockCase, list[Result]] = {}
    for path in paths:
        tasks = _cases(config, path, [Contender.plain_read], [1])
        tasks |= _cases(config, path, config.contenders, config.blocks)
        path_rounds = _run_rounds(config.rounds, tasks, say, measure)
        reading, *cases = path_rounds
        seconds = product_seconds(tasks[reading])
        rate = median(result.rate for result in path_rounds[reading])
        floors = [f for case in cases for f in compute_floors(case, tasks[case], path_rounds[case], rate, seconds)]
        tables.append(floors_table(floors))
        rounds |= path_rounds
    if has_compiler():
        sizes = asdict(config.products)
        products = measure_products(**sizes, num_threads=config.num_threads, rounds=config.rounds)
        tables.append(products_table(products))
    return _make_result("\n\n".join(tables), rounds)


def _cases(
    config: BenchConfig, path: str, contenders: Sequence[Contender], blocks: Sequence[int]
) -> dict[BlockCase, BenchmarkTask]:
    return {
        BlockCase(path=path, contender=contender.value, num_sequences=block): make_task(config, contender, path, block)
        for contender in contenders
        for block in blocks
    }


def _run_rounds(
    num_rounds: int, tasks: Mapping[Named, BenchmarkTask], say: Say, measure: Measure
) -> dict[Named, list[Result]]:
    rounds: dict[Named, list[Result]] = {name: [] for name in tasks}
    for number in range(1, num_rounds + 1):
        _run_round(number, tasks, rounds, say, measure)
    return rounds


def _run_round(
    number: int, tasks: Mapping[Named, BenchmarkTask], rounds: Mapping[Named, list[Result]], say: Say, measure: Measure
) -> dict[Named, str]:
    """Measures all tasks once and appends to `rounds`. Returns the errors of peers that fail."""
    refusals: dict[Named, str] = {}
    for name, task in tasks.items():
        try:
            result = measure(task)
        except WeightstreamError as error:
            refusals[name] = _peer_refusal(task, error)
            say(f"round {number} {name}: {error}")
            continue
        rounds[name].append(result)
        say(f"round {number} {name}: {result.seconds:.1f} s")
    return refusals


def _peer_refusal(task: BenchmarkTask, error: WeightstreamError) -> str:
    """Returns the error of a peer as text. Raises an error of Weightstream."""
    if not isinstance(task.entry, Peer):
        raise error
    return str(error)


def _make_result(table: str, rounds: Mapping[Named, Sequence[Result]], peers: Sequence[Named] = ()) -> SuiteResult:
    named = {str(name): results for name, results in rounds.items()}
    return SuiteResult(table=table, rounds=named, peers=[str(name) for name in peers])
