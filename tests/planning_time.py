"""How long planning takes for many rows that begin alike in one way or another, beside rows that share nothing.

`python -m tests.planning_time [ROWS [ADMISSION]]` plans 100,000 rows, or as many as it is told, of a Llama of 1 B on a
made-up machine, and prints seconds of a processor: to find what prompts share, to plan without it, and with it, in
waves or as that admission has it. Prompts that share nothing must cost about the same either way.
"""

import random
import sys
import time
from array import array
from collections.abc import Iterator, Sequence

from jobs.planning.shapes import read_shape
from runtime.batching.prefixes import shared_prefixes
from runtime.config.settings import Admission, DType, OffloadConfig, PolicyConfig, RuntimeConfig, Tier
from runtime.plan.placement.memory import SequenceSize
from runtime.plan.placement.placement import Budgets
from runtime.plan.planner import find_policy
from runtime.plan.search.candidate import Problem
from runtime.units import GIB
from tests.default_table import cpu_machine

NUM_ROWS, NEW_TOKENS = 100_000, 64
SHAPE = read_shape("llama-3.2-1b", DType.float32)
Prompts = Iterator["array[int]"]
TOKENS = random.Random(1).choices(range(32_000), k=1 << 20)


def drawn(draw: random.Random, count: int) -> "array[int]":
    begin = draw.randrange(len(TOKENS) - count)
    return array("i", TOKENS[begin : begin + count])


def no_shots(draw: random.Random, num_rows: int) -> Prompts:
    """Prompts that have nothing in common: each begins with a number of its own."""
    return (array("i", [row]) + drawn(draw, draw.randint(30, 130)) for row in range(num_rows))


def one_task(draw: random.Random, num_rows: int) -> Prompts:
    """Eight examples in front of all, as GSM8K has them."""
    shots = drawn(draw, 1000)
    return (shots + drawn(draw, draw.randint(30, 130)) for _ in range(num_rows))


def samples(draw: random.Random, num_rows: int) -> Prompts:
    """Four completions of each."""
    prompts = [drawn(draw, draw.randint(30, 130)) for _ in range(-(-num_rows // 4))]
    return (prompts[row // 4] for row in range(num_rows))


def many_tasks(draw: random.Random, num_rows: int) -> Prompts:
    """27 tasks of three examples, and three choices for each question, as BBH has them."""
    shots = [drawn(draw, 700) for _ in range(27)]
    prompts = [shots[row % 27] + drawn(draw, draw.randint(60, 160)) for row in range(-(-num_rows // 3))]
    return (prompts[row // 3] + drawn(draw, 2) for row in range(num_rows))


WORKLOADS = {"no shots": no_shots, "one task": one_task, "samples of a prompt": samples, "many tasks": many_tasks}


def planned(sizes: Sequence[SequenceSize], admission: Admission) -> float:
    """Seconds of a processor."""
    machine = cpu_machine()
    config = RuntimeConfig(offload=OffloadConfig(tier=Tier.nvme), policy=PolicyConfig(admission=admission))
    problem = Problem(shape=SHAPE, config=config, budgets=Budgets(host_bytes=2 * GIB), sizes=sizes, rates=machine.rates)
    begin = time.process_time()
    find_policy(problem)
    return time.process_time() - begin


def main(num_rows: int, admission: Admission) -> None:
    print(f"{num_rows:,} rows, admission={admission.value}, seconds of a processor")
    print("| prompts | finding what they share | planned without | with |")
    print("|---|---|---|---|")
    for name, made in WORKLOADS.items():
        prompts = list(made(random.Random(7), num_rows))
        begin = time.process_time()
        prefixes = shared_prefixes(prompts, [len(prompt) - 1 for prompt in prompts])
        finding = time.process_time() - begin
        alone = [SequenceSize.interned(len(prompt), NEW_TOKENS) for prompt in prompts]
        del prompts
        sizes = [size.with_prefix(prefix) for size, prefix in zip(alone, prefixes, strict=True)]
        seconds = planned(alone, admission), planned(sizes, admission)
        print(f"| {name} | {finding:.1f} | {' | '.join(f'{each:.1f}' for each in seconds)} |", flush=True)


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    main(int(given.get(1, NUM_ROWS)), Admission(given.get(2, Admission.wave.value)))
