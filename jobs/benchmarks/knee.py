"""Where the link no longer bounds decode: `python -m jobs.benchmarks.knee JSON` answers with the sequences that HRM
says.

From rates that are measured on the checkpoint's own layers, as a run measures them.
"""

import json
import sys

from runtime.api import Runtime
from runtime.config import (
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    SamplingConfig,
    Tier,
)
from runtime.plan.cost.layer_work import LayerWork
from runtime.plan.cost.machine import Machine
from runtime.plan.search.ridge_points import Standing, standing

from .isolated import answer
from .millrace import requests_of
from .task import Task, prompts


def needed_sequences(task: Task) -> float:
    """N that reaches P2, in a process of its own."""
    numbers = ("num_prompts", "prompt_tokens", "num_new_tokens", "num_threads")
    keys = ("path", *numbers, "micro_batch_size", "num_micro_batches")
    return answer("jobs.benchmarks.knee", {key: getattr(task, key) for key in keys})["needed_sequences"]


def stand(
    *,
    path: str,
    num_prompts: int,
    prompt_tokens: int,
    num_new_tokens: int,
    num_threads: int,
    micro_batch_size: int | None,
    num_micro_batches: int,
) -> Standing:
    """Of a block of all prompts, whose weights are streamed from disk."""
    config = RuntimeConfig(
        model=ModelConfig(name="bench", path=path),
        offload=OffloadConfig(tier=Tier.nvme),
        policy=PolicyConfig(
            kind=PolicyKind.fixed,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
        ),
        sampling=SamplingConfig(max_new_tokens=num_new_tokens, ignore_eos=True),
        machine=MachineConfig(num_threads=num_threads),
    )
    runtime = Runtime(config)
    shape = runtime.model.shape
    plan = runtime.plan(requests_of(runtime, prompts(num_prompts, shape.vocab_size, prompt_tokens)))
    assert plan.rates is not None, "a plan measures them"
    budgets = runtime.budgets()
    machine = Machine(
        name="this machine", host_bytes=budgets.host_bytes, device_bytes=budgets.device_bytes, rates=plan.rates
    )
    return standing(LayerWork.of(shape), machine, Tier.nvme, num_sequences=num_prompts, num_rows=plan.lane_size)


if __name__ == "__main__":
    found = stand(**json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps({"needed_sequences": found.needed_sequences}) + "\n")
