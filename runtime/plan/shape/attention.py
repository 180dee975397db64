"""Temporary memory of attention kernels and of the gated delta rule, beyond a lane's tokens and its KV cache.

Tensor dimensions use the letters of cache/paged.py.
"""

from dataclasses import dataclass
from enum import Enum

from ...units import MIB, round_up

GATHERED_BYTES = 128 * MIB  # keys and values that an accelerator gathers at once; one row may exceed it
SCORED_BYTES = 16 * MIB  # the same where scores are computed by plain operators
INDEX_BYTES = 64  # per position: page indices for full and windowed layers, and temporaries to compute them
NUM_WAVES_SPLIT = 800  # partial sums of a split-KV flash kernel: about six blocks on each of 132 processors


class AttentionMethod(Enum):
    """Attention implementation of a layer.

    All except `host` run on an accelerator and gather keys and values first.
    """

    host = "host"  # a CPU kernel reads keys and values in place
    flash = "flash"  # kernels for many sequences of different lengths
    fused = "fused"  # one kernel with a mask, over padded rows
    scored = "scored"  # float32 scores from plain operators, if no kernel supports the layer


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of one layer and one lane of `num_rows` sequences, with `num_positions` cached positions in total and
    `longest` in the longest. `num_tokens`: prompt tokens per prefill pass."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    item_bytes: int
    num_rows: int
    num_tokens: int
    num_positions: int
    longest: int

    @property
    def position_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's queries, or of its attention output."""
        return self.num_heads * self.head_dim * self.item_bytes

    def gathered_positions(self, num_positions: int, max_bytes: int) -> int:
        """Returns the positions gathered at once, limited to `max_bytes` but at least the longest row."""
        return min(num_positions, max(self.longest, max_bytes // self.position_bytes))


def device_attention_bytes(method: AttentionMethod, sizes: AttentionSizes) -> int:
    """Returns the peak temporary bytes of attention in one pass, the larger of decode and prefill."""
    assert method is not AttentionMethod.host, "attention on the host takes no device memory"
    if method is not AttentionMethod.flash:
        return max(_padded_decode(method, sizes), _masked_prefill(method, sizes))
    gathered = sizes.gathered_positions(sizes.num_positions, GATHERED_BYTES) * sizes.position_bytes
    gathered += sizes.num_positions * INDEX_BYTES
    group = sizes.num_heads // sizes.num_kv_heads
    sums = min(NUM_WAVES_SPLIT * group, 128 * sizes.num_rows * sizes.num_heads) * (sizes.head_dim + 1) * 4
    decode = 4 * sizes.num_rows * sizes.token_bytes + sums
    # A copy of the queries, the output twice, and the softmax sums.
    prefill = sizes.num_tokens * (3 * sizes.token_bytes + 4 * 4 * sizes.num_heads)
    return gathered + max(decode, prefill)


def _padded_decode(method: AttentionMethod, sizes: AttentionSizes) -> int:
    """Returns the bytes of decode over padded rows: two boolean and two numeric masks, outputs and float32 sums."""
    padded = sizes.num_rows * sizes.longest
    masks = padded * (INDEX_BYTES + 2 + 2 * sizes.item_bytes)
    out = sizes.num_rows * (3 * sizes.token_bytes + 4 * sizes.num_heads * sizes.head_dim)
    if method is AttentionMethod.fused:
        return sizes.gathered_positions(padded, GATHERED_BYTES) * sizes.position_bytes + masks + out
    position_bytes = sizes.position_bytes + 4 * (2 * sizes.num_kv_heads * sizes.head_dim + 3 * sizes.num_heads)
    return sizes.gathered_positions(padded, SCORED_BYTES) * position_bytes + masks + out


def _masked_prefill(method: AttentionMethod, sizes: AttentionSizes) -> int:
    """Returns the bytes of masked prefill. Prompts run one by one, but all keep two boolean masks (full and windowed
    layers)."""
    query_tokens = min(sizes.num_tokens, sizes.longest)
    masks = 4 * sizes.num_tokens * sizes.longest + query_tokens * sizes.longest * (2 + 2 * sizes.item_bytes)
    row = sizes.longest * sizes.position_bytes
    out = sizes.num_tokens * sizes.token_bytes + query_tokens * (
        sizes.token_bytes + 4 * sizes.num_heads * (sizes.head_dim + 1)
    )
    if method is AttentionMethod.fused:
        return row + masks + out
    group = sizes.num_heads // sizes.num_kv_heads  # heads with scores in memory at once
    scores = query_tokens * sizes.longest * group * (4 + 2 * max(4, sizes.item_bytes))
    return row + masks + out + scores + (group * query_tokens + 2 * sizes.longest) * sizes.head_dim * sizes.item_bytes


CHUNK_COLUMNS = 64  # transformers' torch_chunk_gated_delta_rule pads each row to whole chunks
FLOAT_BYTES = 4  # it computes in float32, independent of the model's compute dtype


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """A gated delta net layer: `num_heads` states of `key_dim` x `value_dim`. Keys and queries of `num_key_heads` are
    repeated to `num_heads`."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int

    def num_bytes(self, num_rows: int, num_columns: int, dtype_bytes: int) -> int:
        """Returns the peak temporary bytes, reached after the triangular systems of all chunks are solved.

        Counts separate tensors of scaled and decayed queries, keys and values, and matrices over pairs of positions in
        a chunk. States count five times: cached, before and after a chunk, and two products.
        """
        padded = num_rows * round_up(num_columns, CHUNK_COLUMNS) * self.num_heads
        per_position = 7 * self.key_dim + 4 * self.value_dim + 4 * CHUNK_COLUMNS + 8
        projected = 4 * self.num_key_heads * self.key_dim + 3 * self.num_heads * self.value_dim
        states = num_rows * self.num_heads * self.key_dim * self.value_dim
        return (padded * per_position + 5 * states) * FLOAT_BYTES + num_rows * num_columns * projected * dtype_bytes
