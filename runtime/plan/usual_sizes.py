"""How requests are grouped where the config leaves it open.

Where the CPU computes, nothing travels that one lane could wait for while another is computed, and products with more
rows are faster: in decode, one packed lane of 256 gave 1.25 times the tokens of four of 64 (llama-3.2-1b's shape, two
cores with AVX-512), one of 128 1.1 times those of two of 64. Padded lanes stay small, as all of a lane are as wide as
its longest.
"""

from collections.abc import Sequence

from ..batching.balance import Block
from ..config import PolicyConfig
from .model_shape import ModelShape
from .placement import Budgets, Placement

MICRO_BATCH_SIZE, NUM_MICRO_BATCHES, CHUNK_TOKENS = 64, 4, 512
LARGE = (256, 128)  # micro-batches of a CPU, where they cost no room that something else needs


def block_size(policy: PolicyConfig) -> int:
    """Sequences, at most."""
    return (policy.micro_batch_size or MICRO_BATCH_SIZE) * (policy.num_micro_batches or NUM_MICRO_BATCHES)


def micro_batch_sizes(shape: ModelShape, policy: PolicyConfig, budgets: Budgets) -> tuple[int, ...]:
    """The best first; the last one is taken whatever it costs."""
    if policy.micro_batch_size is not None:
        return (policy.micro_batch_size,)
    if not shape.is_packed or budgets.has_device:
        return (MICRO_BATCH_SIZE,)
    return (*(LARGE[:1] if shape.has_experts else LARGE), MICRO_BATCH_SIZE)


def chunk_tokens(policy: PolicyConfig, blocks: Sequence[Block] = ()) -> int:
    """Of a micro-batch in one prefill pass. One that takes the place of four has as many as they; those that take the
    place of two each have no more, so that they find room, and a block of them reads the weights twice as often: of a
    dense model that takes less time than its products on a CPU, of experts that few tokens visit it may not."""
    if policy.prefill_chunk_tokens is not None:
        return policy.prefill_chunk_tokens
    largest = max((len(group) for block in blocks for group in block.micro_batches), default=1)
    return CHUNK_TOKENS * (4 if policy.micro_batch_size is None and largest > LARGE[-1] else 1)


def is_whole(placement: Placement) -> bool:
    """Whether there is room in memory for all keys and values, and for each layer with its experts."""
    return not placement.paged and not placement.kv.page_bytes
