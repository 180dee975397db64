"""The terms of the ledger: how many bytes a placement and a block of sequences take in each memory.

Every term is an upper bound from shapes alone. Activations are those of one lane passing one stage; between stages a
lane keeps only its hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..units import MIB, round_up
from .ledger import Entry
from .shapes import ModelShape

KV_GRANULE_TOKENS = 16  # sequences of a lane with the same rounded capacity share one KV tensor
PRODUCT_WORKSPACE_BYTES = 16 * MIB  # upcast panels, one per product in flight
ALLOCATOR_SLACK_BYTES = 48 * MIB  # fragmentation of the heap and libraries' own buffers; measured, see ARCHITECTURE.md


@dataclass(frozen=True, kw_only=True)
class SequenceSize:
    """Of one request: `num_prompt_tokens` to prefill and at most `max_new_tokens` to generate."""

    num_prompt_tokens: int
    max_new_tokens: int

    @property
    def capacity_tokens(self) -> int:
        """KV positions reserved for the sequence."""
        return round_up(self.num_prompt_tokens + self.max_new_tokens, KV_GRANULE_TOKENS)


MicroBatch = Sequence[SequenceSize]


def kv_tokens(shape: ModelShape, micro_batches: Sequence[MicroBatch]) -> int:
    """KV positions of a block. A padded lane holds a rectangle as long as its longest sequence."""
    if shape.is_packed:
        return sum(size.capacity_tokens for lane in micro_batches for size in lane)
    return sum(len(lane) * max(size.capacity_tokens for size in lane) for lane in micro_batches if lane)


def pass_tokens(shape: ModelShape, lane: MicroBatch, prefill_chunk_tokens: int) -> int:
    """Most tokens that a lane carries in one pass. Padded lanes are prefilled whole."""
    if not lane:
        return 0
    if shape.is_packed:
        return max(len(lane), min(prefill_chunk_tokens, sum(size.num_prompt_tokens for size in lane)))
    return len(lane) * max(size.num_prompt_tokens for size in lane)


def block_entries(
    shape: ModelShape, micro_batches: Sequence[MicroBatch], prefill_chunk_tokens: int
) -> tuple[Entry, ...]:
    """KV, hidden states, activations and logits of a block, in the compute device's memory."""
    size = shape.compute_dtype_bytes
    positions = kv_tokens(shape, micro_batches)
    tokens = [pass_tokens(shape, lane, prefill_chunk_tokens) for lane in micro_batches]
    largest = max(tokens, default=0)
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    per_token = 4 * shape.hidden_size + 3 * max(
        heads, shape.intermediate_size
    )  # gate, up and their product; q, k, v twice
    lane_rows = max((len(lane) for lane in micro_batches), default=0)
    between = shape.hidden_size + 2 * shape.head_dim
    attention = _attention_bytes(shape, micro_batches, prefill_chunk_tokens)
    return (
        Entry(
            name="KV cache",
            num_bytes=positions * shape.kv_bytes_per_token,
            equation=f"{positions:,} positions x {shape.kv_bytes_per_token:,} B",
        ),
        Entry(
            name="hidden states",
            num_bytes=sum(tokens) * between * size,
            equation=f"{sum(tokens):,} tokens in flight x {between:,} x {size} B",
        ),
        Entry(
            name="activations",
            num_bytes=largest * per_token * size + attention,
            equation=f"{largest:,} tokens of the largest lane x {per_token:,} x {size} B + attention {attention:,} B",
        ),
        Entry(
            name="logits",
            num_bytes=3 * lane_rows * shape.vocab_size * 4,
            equation=f"3 x {lane_rows:,} rows x {shape.vocab_size:,} x 4 B",
        ),
        Entry(
            name="workspace",
            num_bytes=PRODUCT_WORKSPACE_BYTES + ALLOCATOR_SLACK_BYTES,
            equation=f"panels {PRODUCT_WORKSPACE_BYTES // MIB} MiB + slack {ALLOCATOR_SLACK_BYTES // MIB} MiB",
        ),
    )


def _attention_bytes(shape: ModelShape, micro_batches: Sequence[MicroBatch], chunk_tokens: int) -> int:
    """Scores of a decode step over a lane; for padded lanes the mask and scores of a prefill as well."""
    size = shape.compute_dtype_bytes
    worst = 0
    for lane in filter(None, micro_batches):
        longest = max(s.capacity_tokens for s in lane)
        rows = len(lane) if shape.is_packed else len(lane) * max(s.num_prompt_tokens for s in lane)
        worst = max(worst, 2 * rows * shape.num_heads * longest * size)
        if shape.is_packed:
            worst = max(worst, min(chunk_tokens, longest) * longest * (1 + size))
    return worst
