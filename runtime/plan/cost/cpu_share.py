"""How fast a CPU multiplies experts beside an accelerator, and what share of a layer's experts that makes its own."""

from dataclasses import replace

from ..placement.feedforward import CpuShare
from ..placement.placement import Placement
from ..shape.model import ModelShape
from .rates import MachineRates
from .work import StageWork, stage_works

LEAST_SHARE = 0.5  # of the rate at which the CPU reads host memory, while the link reads there too


def with_share(shape: ModelShape, placement: Placement, rates: MachineRates | None) -> Placement:
    """`placement` with a share of the CPU that follows from the rates, as far as these are known."""
    share = placement.cpu_share
    if share is None or rates is None:
        return placement
    first = stage_works(shape, placement.paged)[min(placement.shared)]
    return replace(placement, cpu_share=share_of(first.expert_bytes, first.expert_weights, rates, share.most_tokens))


def share_of(expert_bytes: float, expert_weights: float, rates: MachineRates, most_tokens: int) -> CpuShare:
    """The CPU reads an expert, and launches what it takes, or multiplies it: whichever takes longer. What the link
    reads from host memory meanwhile is missing to the CPU."""
    link, memory = rates.link_in_bytes_per_second, rates.cpu_attention_bytes_per_second
    left = max(memory - link, LEAST_SHARE * memory)
    share = CpuShare(most_tokens=most_tokens, reading=link / left + rates.hit_seconds * link / expert_bytes)
    if rates.cpu_flops_per_second is None:
        return share
    return replace(share, multiplying=2 * expert_weights / rates.cpu_flops_per_second * link / expert_bytes)


def num_of_cpu(share: CpuShare | None, work: StageWork, num_tokens: float) -> int:
    """How many of a stage's experts the CPU multiplies for so many tokens, which visit them evenly."""
    if share is None or not work.is_shared or not 0 < num_tokens <= share.most_tokens:
        return 0
    num_hit = max(1, round(work.hits(num_tokens)))
    return share.num_even(num_hit, num_tokens * work.num_experts_per_token / num_hit)
