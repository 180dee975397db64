"""Experts computed by the CPU next to their weights in host memory, while others are copied over the link: which ones,
and the memory they take.

MoE-Lightning's policy places a layer's feed-forward as a whole (Cao et al. 2025). Fiddler decides per expert, by the
time to copy and to multiply it (Kamahori et al. 2024). Link and CPU work in parallel, so here the CPU gets experts as
long as it finishes before the link.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from ...config.settings import ExpertPaging, FeedForward, RuntimeConfig, Tier, require
from ..shape.extents import pinned_bytes
from ..shape.model import ModelShape
from ..shape.numbers import Numbers, larger
from .kv import PART_ALIGNMENT_BYTES, ExchangeSize
from .ledger import Entry
from .memory import KERNEL_SCRATCH_BYTES, PACKED_INPUT_BYTES

FLOAT32_BYTES = 4
DEFAULT_READING, DEFAULT_MULTIPLYING = 1.0, 0.125  # without rates: as if the link were as fast as host memory


@dataclass(frozen=True, kw_only=True)
class CpuShare:
    """Splits a layer's experts between CPU and link, in passes of at most `max_tokens`. Unit of time: one expert's copy
    over the link. The CPU takes the longer of `reading` (per expert) and `multiplying` (per token)."""

    max_tokens: int
    reading: float = DEFAULT_READING
    multiplying: float = DEFAULT_MULTIPLYING

    def choose_experts(self, num_visits: Mapping[int, int], num_tokens: int) -> frozenset[int]:
        """Returns the experts that the CPU computes, of those hit (`num_visits` by expert). It takes those with the
        fewest visits, while it finishes before the link has copied all others."""
        if num_tokens > self.max_tokens:
            return frozenset()
        chosen, busy = list[int](), 0.0
        for expert in sorted(num_visits, key=lambda expert: (num_visits[expert], expert)):
            busy += self.cost(num_visits[expert])
            if busy >= len(num_visits) - len(chosen):
                break
            chosen.append(expert)
        return frozenset(chosen)

    def num_experts(self, num_hit: int, num_visits: float) -> int:
        """Returns the size of `choose_experts` if all `num_hit` experts have `num_visits` each."""
        cost = self.cost(num_visits)
        return min(num_hit, max(0, ceil((num_hit + 1) / (1 + cost)) - 1))

    def cost(self, num_visits: Numbers) -> Numbers:
        """Returns the CPU's time for an expert of `num_visits`."""
        return larger(self.reading, num_visits * self.multiplying)


def cpu_multiplies(config: RuntimeConfig) -> bool:
    return config.policy.feedforward is FeedForward.cpu


def cpu_experts_obstacle(shape: ModelShape, config: RuntimeConfig, *, has_device: bool) -> str | None:
    """Returns why experts cannot run on the CPU, with the key to change; None if they can."""
    tier, paging = config.tier, config.offload.expert_paging
    if not has_device:
        return "this model computes on the CPU already: leave policy.feedforward null"
    if shape.has_encoder:
        return "models with an encoder do not support it: policy.feedforward=device"
    if not shape.has_bare_experts:
        why = (
            "experts of this model have more than matrices" if shape.has_grouped_experts else "no experts of this model"
        )
        why += "" if shape.has_grouped_experts else " run through our function"
        return f"{why}: policy.feedforward=device"
    if not any(stage.experts for stage in shape.stages) or any(len(s.experts) < len(s.stacks) for s in shape.stages):
        return "this checkpoint's experts share bytes or scales, so none lies by itself: policy.feedforward=device"
    if tier in (Tier.nvme, Tier.none):
        return f"offload={tier.value} keeps no experts in host memory, where it multiplies them: offload=auto or cpu"
    if paging in (ExpertPaging.off, ExpertPaging.all):
        return f"offload.expert_paging={paging.value} brings all experts of a layer: offload.expert_paging=auto or hit"
    return None


def require_cpu_experts(shape: ModelShape, config: RuntimeConfig, *, has_device: bool) -> None:
    """Raises ConfigError if the config wants experts on the CPU and they cannot run there."""
    if cpu_multiplies(config):
        reason = cpu_experts_obstacle(shape, config, has_device=has_device)
        require(reason is None, f"policy.feedforward=cpu has the CPU multiply experts beside an accelerator: {reason}")


def max_visits(shape: ModelShape, share: CpuShare) -> int:
    return share.max_tokens * max((stage.num_experts_per_token for stage in shape.stages), default=0)


def round_trip_size(shape: ModelShape, share: CpuShare) -> ExchangeSize:
    """Returns the buffer of one round trip: the visits' tokens to the CPU, their outputs back."""
    each = shape.hidden_size * shape.compute_dtype_bytes
    return ExchangeSize(
        num_round_trips=1, round_trip_bytes=2 * (max_visits(shape, share) * each + PART_ALIGNMENT_BYTES)
    )


def host_entries(shape: ModelShape, share: CpuShare | None) -> tuple[Entry, ...]:
    """Returns the host memory of the CPU's share, beside the weights.

    Counted are the round trip buffers, and in float32 for one expert visited by all tokens: input and output, gate and
    up, their product twice, packed inputs and scratch memory of kernels.
    """
    if share is None:
        return ()
    round_trip = pinned_bytes(round_trip_size(shape, share).round_trip_bytes, is_aligned=False)
    numbers = 2 * shape.hidden_size + 4 * shape.intermediate_size
    products = FLOAT32_BYTES * share.max_tokens * numbers + PACKED_INPUT_BYTES + KERNEL_SCRATCH_BYTES
    equation = f"{share.max_tokens:,} tokens x {numbers:,} numbers in float32, and what kernels need"
    return (
        Entry(name="experts on the CPU", num_bytes=round_trip, equation=f"a trip of {round_trip:,} B, pinned"),
        Entry(name="products on the CPU", num_bytes=products, equation=equation),
    )


def device_entries(shape: ModelShape, share: CpuShare | None) -> tuple[Entry, ...]:
    """Returns the device memory for the outputs of all visits until they are summed, and the CPU's outputs beside their
    inputs."""
    if share is None:
        return ()
    visits, each = max_visits(shape, share), shape.hidden_size * shape.compute_dtype_bytes
    equation = f"2 x {visits:,} visits x {each:,} B"
    return (Entry(name="experts on the CPU", num_bytes=2 * visits * each, equation=equation),)
