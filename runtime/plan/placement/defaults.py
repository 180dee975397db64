"""How requests are grouped, and in which order micro-batches pass the layers, where the config leaves it open.

Where the CPU computes, nothing travels that one lane could wait for while another is computed, and products with more
rows are faster: in decode, one packed lane of 256 gave 1.25 times the tokens of four of 64 (llama-3.2-1b's shape, two
cores with AVX-512), one of 128 1.1 times those of two of 64. In front of an accelerator each lane is launched by
itself, so the same goes for what does not travel, and while the CPU attends for one lane another is computed. Padded
lanes stay small, as all of a lane are as wide as its longest.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...batching.balance import Block
from ...config.orders import BATCHED, PLAIN, Order
from ...config.settings import PolicyConfig, RuntimeConfig
from ..shape.model import ModelShape
from .placement import Budgets, Placement
from .walks import cpu_attends

MICRO_BATCH_SIZE, NUM_MICRO_BATCHES, CHUNK_TOKENS = 64, 4, 512
LARGE_MICRO_BATCHES = (256, 128)  # micro-batches of a CPU, where they cost no room that something else needs


def block_size(policy: PolicyConfig) -> int:
    """Sequences, at most."""
    return (policy.micro_batch_size or MICRO_BATCH_SIZE) * (policy.num_micro_batches or NUM_MICRO_BATCHES)


def micro_batch_sizes(shape: ModelShape, config: RuntimeConfig, budgets: Budgets) -> tuple[int, ...]:
    """The best first; the last one is taken whatever it costs."""
    policy = config.policy
    if policy.micro_batch_size is not None:
        return (policy.micro_batch_size,)
    if not shape.is_packed or (cpu_attends(shape, config, has_device=budgets.has_device) and budgets.has_device):
        return (MICRO_BATCH_SIZE,)
    if budgets.has_device:
        return (LARGE_MICRO_BATCHES[0], MICRO_BATCH_SIZE)
    return (*(LARGE_MICRO_BATCHES[:1] if shape.has_experts else LARGE_MICRO_BATCHES), MICRO_BATCH_SIZE)


def chunk_sizes(shape: ModelShape, policy: PolicyConfig, blocks: Sequence[Block]) -> tuple[int, ...]:
    """Tokens of a micro-batch in one prefill pass, the best first; a search may find more to be better. One that
    takes the place of four has as many as they; where that finds no room, as many as the two that would else, so that
    weights are read no more often. Those two have no more than each of the four, and a block of them reads the weights
    twice as often: of a dense model that takes less time than its products on a CPU, of experts that few tokens visit
    it may not."""
    if policy.prefill_chunk_tokens is not None:
        return (policy.prefill_chunk_tokens,)
    largest = max((len(group) for block in blocks for group in block.micro_batches), default=1)
    if policy.micro_batch_size is not None or largest <= LARGE_MICRO_BATCHES[-1]:
        return (CHUNK_TOKENS,)
    return (4 * CHUNK_TOKENS,) if shape.has_experts else (4 * CHUNK_TOKENS, 2 * CHUNK_TOKENS)


def chunk_tokens(policy: PolicyConfig) -> int:
    """The tokens of a prefill chunk: those that the policy says, or the default."""
    return policy.prefill_chunk_tokens or CHUNK_TOKENS


def with_chunk_tokens(config: RuntimeConfig, num_tokens: int) -> RuntimeConfig:
    return replace(config, policy=replace(config.policy, prefill_chunk_tokens=num_tokens))


def keeps_kv_in_compute(placement: Placement) -> bool:
    """Whether there is room in memory for all keys and values. Experts may be paged: of mixtral-s 256 sequences that
    visit paged experts together decoded 1.26 times as fast as 64 at a time that visit them in a slot of their layer,
    in one run of each from disk (two cores with AVX-512)."""
    return not placement.kv.page_bytes


MANY_EXPERTS = 32


def default_orders(shape: ModelShape, *, has_device: bool) -> tuple[Order, ...]:
    """The best by rule first; another is taken where it is predicted to be faster or lets more sequences in.

    In front of an accelerator many experts wait for few tokens each, so that every micro-batch by itself takes as long
    at them as all together. By the simulator, four of 64 together were never slower, and 1.3 to 1.4 times as fast where
    olmoe's weights stay (`machine=rtx4090`, `a100-40`); 3.9 times as fast where gpt-oss-120b's experts are read one by
    one (`machine=rtx3060 offload=nvme`).
    """
    num_experts = max((stage.num_experts for stage in shape.layers), default=0)
    if has_device and shape.has_grouped_experts and num_experts >= MANY_EXPERTS:
        return (BATCHED, PLAIN)
    return (PLAIN,)
