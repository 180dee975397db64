"""Chooses experts that the CPU computes in host memory while the link copies all others to the device.

MoE-Lightning computes the whole feed-forward of a layer on one processor (Cao et al. 2025). Fiddler decides for each
expert, by the time to copy it and to compute it on the CPU (Kamahori et al. 2024). Here link and CPU work in parallel:
the CPU gets more experts as long as it finishes before the link. A **visit** is one expert computed for one token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from ...config.settings import ExpertPaging, FeedForward, RuntimeConfig, Tier, require
from ...units import MIB
from ..shape.extents import pinned_bytes
from ..shape.model import ModelShape
from ..shape.numbers import Numbers, larger
from .kv import PART_ALIGNMENT_BYTES, ExchangeSize
from .ledger import Entry
from .memory import KERNEL_SCRATCH_BYTES, PACKED_INPUT_BYTES

FLOAT32_BYTES = 4
DEFAULT_READING, DEFAULT_MULTIPLYING = 1.0, 0.125  # if no rates are measured: the link is as fast as host memory


@dataclass(frozen=True, kw_only=True)
class CpuShare:
    """Splits a layer's experts between CPU and link. Times are relative to copying one expert over the link."""

    max_tokens: int  # passes with more tokens do not use the CPU
    reading: float = DEFAULT_READING  # CPU time to read an expert's weights, for few visits
    multiplying: float = DEFAULT_MULTIPLYING  # CPU time per visit, for many visits

    def choose_experts(self, num_visits: Mapping[int, int], num_tokens: int) -> frozenset[int]:
        """Returns the experts for the CPU: those with the fewest visits, until it would finish later than the link.

        `num_visits`: visits by expert, of all experts that the pass needs in this layer. `num_tokens`: of the pass.
        """
        if num_tokens > self.max_tokens:
            return frozenset()
        chosen, busy = list[int](), 0.0
        for expert in sorted(num_visits, key=lambda expert: (num_visits[expert], expert)):
            busy += self.cost(num_visits[expert])  # the link takes 1 per remaining expert
            if busy >= len(num_visits) - len(chosen):
                break
            chosen.append(expert)
        return frozenset(chosen)

    def num_experts(self, num_hit: int, num_visits: float) -> int:
        """Returns how many experts `choose_experts` returns if there are `num_hit`, with `num_visits` each."""
        # The largest k with k * cost < num_hit - k + 1, as in `choose_experts`.
        return min(num_hit, max(0, ceil((num_hit + 1) / (1 + self.cost(num_visits))) - 1))

    def cost(self, num_visits: Numbers) -> Numbers:
        """Returns the CPU time of an expert."""
        return larger(self.reading, num_visits * self.multiplying)


def cpu_multiplies(config: RuntimeConfig) -> bool:
    return config.policy.feedforward is FeedForward.cpu


def cpu_experts_obstacle(shape: ModelShape, config: RuntimeConfig, *, has_device: bool) -> str | None:
    """Returns why experts cannot run on the CPU, with the key to set; None if they can."""
    tier, paging = config.tier, config.offload.expert_paging
    if not has_device:
        return "there is no accelerator: set policy.feedforward=null"
    if shape.has_encoder:
        return "encoder-decoder models do not support it: set policy.feedforward=device"
    if not shape.has_bare_experts:
        why = "has experts with biases" if shape.has_grouped_experts else "has no experts, or runs them in its own code"
        return f"this model {why}: set policy.feedforward=device"
    if not any(stage.experts for stage in shape.stages) or any(len(s.experts) < len(s.stacks) for s in shape.stages):
        return "this checkpoint's experts share bytes or scales: set policy.feedforward=device"
    if tier in (Tier.nvme, Tier.none):
        return f"offload={tier.value} keeps no experts in host memory: set offload=auto or cpu"
    if paging in (ExpertPaging.off, ExpertPaging.all):
        return f"offload.expert_paging={paging.value} copies all experts of a layer: set it to auto or hit"
    return None


def require_cpu_experts(shape: ModelShape, config: RuntimeConfig, *, has_device: bool) -> None:
    """Raises ConfigError for `policy.feedforward=cpu` if experts cannot run on the CPU."""
    if cpu_multiplies(config):
        reason = cpu_experts_obstacle(shape, config, has_device=has_device)
        require(reason is None, f"policy.feedforward=cpu: {reason}")


def max_visits(shape: ModelShape, share: CpuShare) -> int:
    """Returns the maximum visits of all experts of a layer in a pass."""
    return share.max_tokens * max((stage.num_experts_per_token for stage in shape.stages), default=0)


def round_trip_size(shape: ModelShape, share: CpuShare) -> ExchangeSize:
    """Returns the size of the buffer between device and CPU: inputs of all visits to the CPU, and outputs back."""
    num_bytes = max_visits(shape, share) * shape.hidden_size * shape.compute_dtype_bytes + PART_ALIGNMENT_BYTES
    return ExchangeSize(num_round_trips=1, round_trip_bytes=2 * num_bytes)


def host_entries(shape: ModelShape, share: CpuShare | None) -> tuple[Entry, ...]:
    """Returns the host memory for the CPU's computation: the buffer shared with the device, and float32 vectors.

    The vectors are those of one expert with visits by all tokens. Weights are not included.
    """
    if share is None:
        return ()
    round_trip = pinned_bytes(round_trip_size(shape, share).round_trip_bytes, is_aligned=False)
    numbers = 2 * shape.hidden_size + 4 * shape.intermediate_size  # input, output; gate, up and twice their product
    products = FLOAT32_BYTES * share.max_tokens * numbers + PACKED_INPUT_BYTES + KERNEL_SCRATCH_BYTES
    scratch = (PACKED_INPUT_BYTES + KERNEL_SCRATCH_BYTES) // MIB
    equation = f"{share.max_tokens:,} tokens x {numbers:,} x {FLOAT32_BYTES} B + {scratch} MiB of scratch"
    return (
        Entry(name="experts on the CPU", num_bytes=round_trip, equation="tokens and outputs, pinned"),
        Entry(name="CPU products", num_bytes=products, equation=equation),
    )


def device_entries(shape: ModelShape, share: CpuShare | None) -> tuple[Entry, ...]:
    """Returns the device memory for inputs and outputs of all visits on the CPU, until the outputs are summed."""
    if share is None:
        return ()
    visits, vector_bytes = max_visits(shape, share), shape.hidden_size * shape.compute_dtype_bytes
    equation = f"2 x {visits:,} visits x {vector_bytes:,} B"
    return (Entry(name="experts on the CPU", num_bytes=2 * visits * vector_bytes, equation=equation),)
