"""Experts that the CPU multiplies beside their weights, while the others come over the link: which of a layer's, and
what it takes in memory.

MoE-Lightning's policy has one place for a layer's feed-forward (Cao et al. 2025), Fiddler chooses it expert by expert
by what bringing and multiplying take (Kamahori et al. 2024). Link and CPU work side by side, so here the CPU is given
experts as long as it is done before the link is.
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
from .memory import KERNEL_SCRATCH_BYTES, LAID_OUT_BYTES

FLOAT32_BYTES = 4
DEFAULT_READING, DEFAULT_MULTIPLYING = 1.0, 0.125  # where no rates are known: the link is as fast as host memory


@dataclass(frozen=True, kw_only=True)
class CpuShare:
    """Numbers by which a pass of at most `most_tokens` shares out a layer's experts. Where to bring an expert over the
    link takes 1, the CPU takes `reading` to read it, or `multiplying` for each of its tokens if that is more."""

    max_tokens: int
    reading: float = DEFAULT_READING
    multiplying: float = DEFAULT_MULTIPLYING

    def choose_experts(self, num_visits: Mapping[int, int], num_tokens: int) -> frozenset[int]:
        """The experts that the CPU takes, of those that are hit, by their visits: those of fewest visits, as long as it
        is done with one more before the link has brought all others."""
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
        """How many `of_cpu` takes of so many experts, each of so many visits."""
        cost = self.cost(num_visits)
        return min(num_hit, max(0, ceil((num_hit + 1) / (1 + cost)) - 1))

    def cost(self, num_visits: Numbers) -> Numbers:
        """How long the CPU takes at an expert of so many visits."""
        return larger(self.reading, num_visits * self.multiplying)


def cpu_multiplies(config: RuntimeConfig) -> bool:
    return config.policy.feedforward is FeedForward.cpu


def cpu_experts_obstacle(shape: ModelShape, config: RuntimeConfig, *, has_device: bool) -> str | None:
    """What stands in the way of experts on the CPU, with the key that is to be changed; None where nothing does."""
    tier, paging = config.tier, config.offload.expert_paging
    if not has_device:
        return "the CPU is where this model computes anyway: leave policy.feedforward null"
    if shape.has_encoder:
        return "models with an encoder cannot do that: policy.feedforward=device"
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
    """Raises ConfigError where the CPU is to multiply experts and cannot."""
    if cpu_multiplies(config):
        reason = cpu_experts_obstacle(shape, config, has_device=has_device)
        require(reason is None, f"policy.feedforward=cpu has the CPU multiply experts beside an accelerator: {reason}")


def max_visits(shape: ModelShape, share: CpuShare) -> int:
    return share.max_tokens * max((stage.num_experts_per_token for stage in shape.stages), default=0)


def round_trip_size(shape: ModelShape, share: CpuShare) -> ExchangeSize:
    """One trip: the tokens of the visits down, what became of them up."""
    each = shape.hidden_size * shape.compute_dtype_bytes
    return ExchangeSize(
        num_round_trips=1, round_trip_bytes=2 * (max_visits(shape, share) * each + PART_ALIGNMENT_BYTES)
    )


def host_entries(shape: ModelShape, share: CpuShare | None) -> tuple[Entry, ...]:
    """What the CPU's share takes of host memory beside the weights: what goes down and comes back; and in float32, of
    one expert that all tokens visit, input and output, gate and up and their product twice, inputs as kernels have
    them, and what their threads need."""
    if share is None:
        return ()
    round_trip = pinned_bytes(round_trip_size(shape, share).round_trip_bytes, is_aligned=False)
    numbers = 2 * shape.hidden_size + 4 * shape.intermediate_size
    products = FLOAT32_BYTES * share.max_tokens * numbers + LAID_OUT_BYTES + KERNEL_SCRATCH_BYTES
    equation = f"{share.max_tokens:,} tokens x {numbers:,} numbers in float32, and what kernels need"
    return (
        Entry(name="experts on the CPU", num_bytes=round_trip, equation=f"a trip of {round_trip:,} B, pinned"),
        Entry(name="products on the CPU", num_bytes=products, equation=equation),
    )


def device_entries(shape: ModelShape, share: CpuShare | None) -> tuple[Entry, ...]:
    """The outputs of all visits lie side by side until they are added, and those of the CPU's beside their inputs."""
    if share is None:
        return ()
    visits, each = max_visits(shape, share), shape.hidden_size * shape.compute_dtype_bytes
    equation = f"2 x {visits:,} visits x {each:,} B"
    return (Entry(name="experts on the CPU", num_bytes=2 * visits * each, equation=equation),)
