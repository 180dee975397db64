"""Temporary memory of attention kernels and of the gated delta rule, without a lane's hidden states and KV cache.

A **lane** is a micro-batch; a row is one of its sequences, a position is a token in the KV cache.
"""

from dataclasses import dataclass
from enum import Enum

from ...units import MIB, round_up

GATHERED_BYTES = 128 * MIB  # keys and values that an accelerator gathers at once; a single long row may exceed it
SCORED_BYTES = 16 * MIB  # the same limit if plain operators compute the scores
INDEX_BYTES = 64  # per position: page indices for full and windowed layers, and temporaries to compute them
# A split-KV flash kernel divides the positions of a row among thread blocks, each with its own partial sums.
MAX_SPLIT_BLOCKS = 800  # thread blocks: about six on each of 132 multiprocessors
MAX_ROW_SPLITS = 128  # per row and head


class AttentionMethod(Enum):
    """Attention implementation of a layer.

    All methods except `host` run on an accelerator, and first gather keys and values from the cache.
    """

    host = "host"  # a CPU kernel reads keys and values in place
    flash = "flash"  # kernels for sequences of different lengths
    fused = "fused"  # one kernel with a mask, over padded rows
    scored = "scored"  # plain operators with float32 scores, if no kernel supports the layer


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of the attention of one lane in one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    item_bytes: int  # per element
    num_rows: int
    num_tokens: int  # prompt tokens per prefill pass
    num_positions: int  # cached positions of all rows
    longest: int  # cached positions of the longest row

    @property
    def position_bytes(self) -> int:
        """The bytes of the key and the value of one position."""
        return 2 * self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's queries, or of its attention output."""
        return self.num_heads * self.head_dim * self.item_bytes

    def gathered_positions(self, num_positions: int, max_bytes: int) -> int:
        """Returns how many of `num_positions` are gathered at once: at most `max_bytes`, but at least one row."""
        return min(num_positions, max(self.longest, max_bytes // self.position_bytes))


def device_attention_bytes(method: AttentionMethod, sizes: AttentionSizes) -> int:
    """Returns the peak temporary bytes of attention in one pass: the maximum for decode or prefill."""
    assert method is not AttentionMethod.host, "attention on the host takes no device memory"
    if method is not AttentionMethod.flash:
        return max(_padded_decode(method, sizes), _masked_prefill(method, sizes))
    gathered = sizes.gathered_positions(sizes.num_positions, GATHERED_BYTES) * sizes.position_bytes
    gathered += sizes.num_positions * INDEX_BYTES
    group = sizes.num_heads // sizes.num_kv_heads  # query heads per KV head
    num_splits = min(MAX_SPLIT_BLOCKS * group, MAX_ROW_SPLITS * sizes.num_rows * sizes.num_heads)
    partial_sums = num_splits * (sizes.head_dim + 1) * 4  # float32 outputs, each with its softmax sum
    decode = 4 * sizes.num_rows * sizes.token_bytes + partial_sums
    # A copy of the queries, two copies of the output, and the softmax sums.
    prefill = sizes.num_tokens * (3 * sizes.token_bytes + 4 * 4 * sizes.num_heads)
    return gathered + max(decode, prefill)


def _padded_decode(method: AttentionMethod, sizes: AttentionSizes) -> int:
    """Returns the bytes of decode over padded rows: indices, two boolean and two numeric masks, outputs and sums."""
    num_positions = sizes.num_rows * sizes.longest
    masks = num_positions * (INDEX_BYTES + 2 + 2 * sizes.item_bytes)
    outputs = sizes.num_rows * (3 * sizes.token_bytes + 4 * sizes.num_heads * sizes.head_dim)
    if method is AttentionMethod.fused:
        return sizes.gathered_positions(num_positions, GATHERED_BYTES) * sizes.position_bytes + masks + outputs
    # In addition: keys and values in float32, and three float32 scores per head.
    position_bytes = sizes.position_bytes + 4 * (2 * sizes.num_kv_heads * sizes.head_dim + 3 * sizes.num_heads)
    return sizes.gathered_positions(num_positions, SCORED_BYTES) * position_bytes + masks + outputs


def _masked_prefill(method: AttentionMethod, sizes: AttentionSizes) -> int:
    """Returns the bytes of prefill with masks.

    Prompts run one by one, but each keeps two boolean masks during the pass: one for full layers, one for windowed.
    """
    query_tokens = min(sizes.num_tokens, sizes.longest)
    masks = 4 * sizes.num_tokens * sizes.longest + query_tokens * sizes.longest * (2 + 2 * sizes.item_bytes)
    gathered = sizes.longest * sizes.position_bytes
    outputs = sizes.num_tokens * sizes.token_bytes + query_tokens * (
        sizes.token_bytes + 4 * sizes.num_heads * (sizes.head_dim + 1)
    )
    if method is AttentionMethod.fused:
        return gathered + masks + outputs
    group = sizes.num_heads // sizes.num_kv_heads  # query heads of one KV head: their scores are in memory at once
    scores = query_tokens * sizes.longest * group * (4 + 2 * max(4, sizes.item_bytes))
    # Contiguous copies of the group's queries, and of the keys and values of its KV head.
    copies = (group * query_tokens + 2 * sizes.longest) * sizes.head_dim * sizes.item_bytes
    return gathered + masks + outputs + scores + copies


CHUNK_COLUMNS = 64  # transformers' torch_chunk_gated_delta_rule pads each row to whole chunks
FLOAT_BYTES = 4  # that function computes in float32, independent of the model's compute dtype


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """Sizes of a gated delta net layer, which has `num_heads` states of `key_dim` x `value_dim` per sequence.

    Keys and queries have `num_key_heads` and are repeated for the other heads.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int

    def num_bytes(self, num_rows: int, num_columns: int, dtype_bytes: int) -> int:
        """Returns the peak temporary bytes for a rectangle of `num_rows` x `num_columns` tokens.

        At the peak, the triangular systems of all chunks are solved. The factors count the tensors alive then: scaled
        and decayed queries, keys and values, and matrices over pairs of positions of a chunk. States exist five times:
        cached, before and after a chunk, and in two products. `dtype_bytes`: element size of the compute dtype.
        """
        head_positions = num_rows * round_up(num_columns, CHUNK_COLUMNS) * self.num_heads
        per_position = 7 * self.key_dim + 4 * self.value_dim + 4 * CHUNK_COLUMNS + 8
        projected = 4 * self.num_key_heads * self.key_dim + 3 * self.num_heads * self.value_dim
        states = num_rows * self.num_heads * self.key_dim * self.value_dim
        inputs = num_rows * num_columns * projected
        return (head_positions * per_position + 5 * states) * FLOAT_BYTES + inputs * dtype_bytes
