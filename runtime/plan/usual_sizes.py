"""How requests are grouped where the config leaves it open.

Where the CPU computes, nothing travels that one lane could wait for while another is computed, and products with more
rows are faster: in decode, one packed lane of 256 gave 1.25 times the tokens of four of 64 (llama-3.2-1b's shape, two
cores with AVX-512). Padded lanes stay small, as all of a lane are as wide as its longest.
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
    return (*LARGE, MICRO_BATCH_SIZE) if shape.is_packed and not budgets.has_device else (MICRO_BATCH_SIZE,)


def chunk_tokens(policy: PolicyConfig, blocks: Sequence[Block] = ()) -> int:
    """Of a micro-batch in one prefill pass. In all of a pass it comes to as many whether they are few or many."""
    if policy.prefill_chunk_tokens is not None:
        return policy.prefill_chunk_tokens
    largest = max((len(group) for block in blocks for group in block.micro_batches), default=1)
    times = -(-largest // MICRO_BATCH_SIZE) if policy.micro_batch_size is None else 1
    return CHUNK_TOKENS * times


def is_whole(placement: Placement) -> bool:
    """Whether there is room in memory for all keys and values, and for each layer with its experts."""
    return not placement.paged and not placement.kv.page_bytes
