"""What chunks of prompts and lanes bring in front of an accelerator, by the plans of `jobs.plan`; prints Markdown.

    python -m tests.chunk_table

By each machine's data sheet, with weights in host memory (of 256 GiB, wherever) and on its disk: 256 prompts of 100
tokens in the mean and 300 at most, 32 new tokens each; last a model that stays on the device whole. `before`:
micro-batches of 64 in chunks of 512, as every plan for a device had them; both by today's times and ledgers.
"""

from collections.abc import Iterator

from jobs.planning.config import PlanConfig, WorkloadConfig
from jobs.planning.planning import Planned, plan_for_machine
from runtime.config.settings import ModelConfig, OffloadConfig, PolicyConfig, PolicyKind, SamplingConfig, Tier
from runtime.errors import BudgetError
from tests.published import machine

MACHINES = ("rtx3060", "rtx4090", "t4", "l4", "a100-40")
MODELS = ("mixtral", "llama-3.3-70b")
RESIDENT = (("rtx4090", "llama-3.1-8b"), ("a100-40", "llama-3.1-8b"))  # all of it stays on the device
WORKLOAD = WorkloadConfig(num_requests=256, mean_prompt_tokens=100, max_prompt_tokens=300)
BEFORE = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=64, num_micro_batches=4, prefill_chunk_tokens=512)
HEADER = (
    "| machine, model, offload | before: lanes, chunk | prefill s | decode tok/s | total s "
    "| lanes, chunk | prefill s | decode tok/s | total s | times as fast |\n|" + "---|" * 10
)


def config(model: str, tier: Tier, policy: PolicyConfig) -> PlanConfig:
    return PlanConfig(
        model=ModelConfig(name=model),
        offload=OffloadConfig(tier=tier, host_memory_gib=256 if tier is Tier.cpu else None),
        policy=policy,
        sampling=SamplingConfig(max_new_tokens=32),
        workload=WORKLOAD,
    )


def planned(name: str, model: str, tier: Tier, policy: PolicyConfig) -> Planned | None:
    """None where it is refused."""
    try:
        return plan_for_machine(machine(name), config(model, tier, policy))
    except BudgetError:
        return None


def cells(plan: Planned) -> tuple[str, ...]:
    run, predicted = plan.run, plan.prediction
    lanes = f"{run.num_lanes} x {run.lane_size}, {run.policy.prefill_chunk_tokens:,}"
    decode = plan.throughput[1] or 0.0
    return (lanes, f"{predicted.prefill_seconds:.1f}", f"{decode:.1f}", f"{predicted.seconds:.1f}")


def settings() -> Iterator[tuple[str, str, Tier]]:
    for name in MACHINES:
        for model in MODELS:
            yield from ((name, model, tier) for tier in (Tier.cpu, Tier.nvme))
    yield from ((name, model, Tier.none) for name, model in RESIDENT)


def line(name: str, model: str, tier: Tier) -> str:
    before, after = (planned(name, model, tier, policy) for policy in (BEFORE, PolicyConfig(kind=PolicyKind.fixed)))
    if before is None or after is None:
        return f"| {name}, {model}, {tier.value} | refused |" + " |" * 8
    gain = before.prediction.seconds / after.prediction.seconds
    row = [f"{name}, {model}, {tier.value}", *cells(before), *cells(after), f"{gain:.2f}"]
    return f"| {' | '.join(row)} |"


if __name__ == "__main__":
    print(HEADER)
    for setting in settings():
        print(line(*setting))
