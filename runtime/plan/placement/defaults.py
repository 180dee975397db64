"""Default micro-batch sizes, prefill chunks and compute orders, for settings left open.

On a CPU few large lanes are faster: transfers do not overlap another lane's compute, and products with more rows take
less time per row. One packed lane of 256 decoded 1.25 times the tokens of four of 64 (llama-3.2-1b's shape, two cores
with AVX-512); one of 128 gave 1.1 times those of two of 64. The same holds on an accelerator if everything is resident,
as each lane has its own launches. With CPU attention one lane attends while another is computed. Padded lanes stay
small, as every row is padded to the longest.
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
LARGE_MICRO_BATCHES = (256, 128)  # tried first, if the KV cache fits in compute memory


def block_size(policy: PolicyConfig) -> int:
    """Returns the maximum sequences of a block."""
    return (policy.micro_batch_size or MICRO_BATCH_SIZE) * (policy.num_micro_batches or NUM_MICRO_BATCHES)


def micro_batch_sizes(shape: ModelShape, config: RuntimeConfig, budgets: Budgets) -> tuple[int, ...]:
    """Returns candidate sizes, the best first; the last one is used even if it does not fit."""
    policy = config.policy
    if policy.micro_batch_size is not None:
        return (policy.micro_batch_size,)
    if not shape.is_packed or (cpu_attends(shape, config, has_device=budgets.has_device) and budgets.has_device):
        return (MICRO_BATCH_SIZE,)
    if budgets.has_device:
        return (LARGE_MICRO_BATCHES[0], MICRO_BATCH_SIZE)
    return (*(LARGE_MICRO_BATCHES[:1] if shape.has_experts else LARGE_MICRO_BATCHES), MICRO_BATCH_SIZE)


def chunk_sizes(shape: ModelShape, policy: PolicyConfig, blocks: Sequence[Block]) -> tuple[int, ...]:
    """Returns candidate prefill chunks in tokens of a micro-batch, the best first; a search may find a better one.

    One large micro-batch replaces four and gets four times the chunk, so that weights are read no more often; or twice
    the chunk if that does not fit. On a CPU the second read of a dense model hides behind its products; that of experts
    with few tokens may not.
    """
    if policy.prefill_chunk_tokens is not None:
        return (policy.prefill_chunk_tokens,)
    largest = max((len(group) for block in blocks for group in block.micro_batches), default=1)
    if policy.micro_batch_size is not None or largest <= LARGE_MICRO_BATCHES[-1]:
        return (CHUNK_TOKENS,)
    return (4 * CHUNK_TOKENS,) if shape.has_experts else (4 * CHUNK_TOKENS, 2 * CHUNK_TOKENS)


def chunk_tokens(policy: PolicyConfig) -> int:
    return policy.prefill_chunk_tokens or CHUNK_TOKENS


def with_chunk_tokens(config: RuntimeConfig, num_tokens: int) -> RuntimeConfig:
    return replace(config, policy=replace(config.policy, prefill_chunk_tokens=num_tokens))


def has_all_kv_in_compute(placement: Placement) -> bool:
    """True if the whole KV cache fits in compute memory.

    Experts may be paged: 256 sequences of mixtral-s with paged experts decoded 1.26 times as fast as 64 at a time with
    whole layers, in one run of each from disk (two cores with AVX-512).
    """
    return not placement.kv.page_bytes


MANY_EXPERTS = 32


def default_orders(shape: ModelShape, *, has_device: bool) -> tuple[Order, ...]:
    """Returns candidate compute orders, the default first; another is used if predicted faster, or without rates if it
    allows larger blocks.

    On an accelerator, many experts with few tokens each take one micro-batch as long as all together. By the simulator,
    batching four of 64 was never slower: 1.3 to 1.4 times as fast with olmoe's weights resident (`machine=rtx4090`,
    `a100-40`), 3.9 times with gpt-oss-120b's experts read one by one (`machine=rtx3060 offload=nvme`).
    """
    num_experts = max((stage.num_experts for stage in shape.layers), default=0)
    if has_device and shape.has_grouped_experts and num_experts >= MANY_EXPERTS:
        return (BATCHED, PLAIN)
    return (PLAIN,)
