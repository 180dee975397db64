"""Default micro-batch sizes, prefill chunks and compute orders, for settings that are not configured.

A **lane** is a micro-batch in execution; a **padded lane** has left-padded rows. On a CPU, few large lanes are faster
than many small ones: no transfer of one lane overlaps the compute of another, and products with more rows take less
time per row. One packed lane of 256 sequences decoded 1.25 times as many tokens per second as four lanes of 64, and a
lane of 128 decoded 1.1 times as many as two of 64 (llama-3.2-1b's shape, two cores with AVX-512).

Large lanes are also faster on an accelerator if everything is resident, as every lane launches all kernels. With CPU
attention, several lanes are needed: the CPU attends for one while the device computes another. Padded lanes stay small,
as every row is padded to the longest.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...batching.balance import Block
from ...config.orders import BATCHED, PLAIN, Order
from ...config.settings import OffloadConfig, PolicyConfig, RuntimeConfig, Tier
from ..shape.model import ModelShape
from .memory import GATHERED_BLOCK_BYTES
from .placement import Budgets, Placement
from .walks import cpu_attends

MICRO_BATCH_SIZE, NUM_MICRO_BATCHES, CHUNK_TOKENS = 64, 4, 512
LARGE_MICRO_BATCHES = (256, 128)  # tried first, if the KV cache fits in compute memory


def block_size(policy: PolicyConfig) -> int:
    """Returns the maximum number of sequences in a block, the micro-batches that decode together."""
    return (policy.micro_batch_size or MICRO_BATCH_SIZE) * (policy.num_micro_batches or NUM_MICRO_BATCHES)


def gather_tables(shape: ModelShape, offload: OffloadConfig, budgets: Budgets) -> ModelShape:
    """Returns the shape for a run that reads single rows of embedding tables: with `offload.gather_tables=true` of all
    tables, by default of large ones if weights come from disk and exceed the memory budget."""
    if offload.gather_tables is not None:
        return shape.gather_tables() if offload.gather_tables else shape
    memory_bytes = budgets.host_bytes + (budgets.device_bytes or 0)
    if offload.tier in (Tier.auto, Tier.nvme) and shape.weight_bytes > memory_bytes:
        return shape.gather_tables(min_bytes=GATHERED_BLOCK_BYTES)
    return shape


def micro_batch_sizes(shape: ModelShape, config: RuntimeConfig, budgets: Budgets) -> tuple[int, ...]:
    """Returns candidate sizes, the best first. A caller tries them in order, and must take the last in any case."""
    policy = config.policy
    if policy.micro_batch_size is not None:
        return (policy.micro_batch_size,)
    if not shape.is_packed or (cpu_attends(shape, config, has_device=budgets.has_device) and budgets.has_device):
        return (MICRO_BATCH_SIZE,)
    if budgets.has_device:
        return (LARGE_MICRO_BATCHES[0], MICRO_BATCH_SIZE)
    return (*(LARGE_MICRO_BATCHES[:1] if shape.has_experts else LARGE_MICRO_BATCHES), MICRO_BATCH_SIZE)


def chunk_sizes(shape: ModelShape, policy: PolicyConfig, blocks: Sequence[Block]) -> tuple[int, ...]:
    """Returns candidate prefill chunks, in tokens per micro-batch and pass, the best first.

    One large micro-batch replaces four, and gets four times their chunk, so that prefill reads weights equally often.
    If this does not fit, it gets twice the chunk, and prefill reads the weights twice as often. On a CPU, products of a
    dense model take longer than the second read, but products of experts with few tokens may not.
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
    """True if the whole KV cache fits in compute memory. Large lanes are used in this case.

    For weights no such condition is needed: 256 sequences of mixtral-s with experts read one by one decoded 1.26 times
    as fast as 64 at a time with whole layers (one run of each from disk, two cores with AVX-512).
    """
    return not placement.kv.page_bytes


MANY_EXPERTS = 32  # per layer, from which batching experts over all lanes is the default on an accelerator


def default_orders(shape: ModelShape, *, has_device: bool) -> tuple[Order, ...]:
    """Returns candidate compute orders, the default first.

    The second is used if it is predicted faster, or without rates if it allows larger blocks.

    On an accelerator, many experts with few tokens each take as long for one micro-batch as for all of a block. In the
    simulator, batching the experts of four micro-batches of 64 was never slower. It was 1.3 to 1.4 times as fast with
    olmoe's weights resident (`machine=rtx4090`, `a100-40`), and 3.9 times with gpt-oss-120b's experts read one by one
    (`machine=rtx3060 offload=nvme`).
    """
    num_experts = max((stage.num_experts for stage in shape.layers), default=0)
    if has_device and shape.has_grouped_experts and num_experts >= MANY_EXPERTS:
        return (BATCHED, PLAIN)
    return (PLAIN,)
