"""The ways in which a layer attends, or a gated delta net recurs, by what they take beside a lane's tokens and
its cache.

Letters as in cache/paged.py.
"""

from dataclasses import dataclass
from enum import Enum

from ...units import MIB, round_up

GATHERED_BYTES = 128 * MIB  # of keys and values that an accelerator gathers at a time; the longest row may take more
SCORED_BYTES = 16 * MIB  # of those whose scores no kernel makes
INDEX_BYTES = 64  # of a position: where it lies, for two kinds of reach, and what that is made of
NUM_WAVES_SPLIT = 800  # of a flash kernel's partial sums: three waves of blocks of a device with 132 processors


class AttentionMethod(Enum):
    """How a layer attends. On a `host` a kernel reads keys and values where they lie. On an accelerator they are
    gathered, for `flash` kernels of many sequences, for `fused` attention with masks, or for scores in float32 that
    operators make (`scored`) where no kernel knows what is asked."""

    host = "host"
    flash = "flash"
    fused = "fused"
    scored = "scored"


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """The sizes of a layer, and of a lane of `num_rows` with `num_positions` together, the longest of `longest`:
    `num_tokens` of its prompts are prefilled at a time."""

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
        """The bytes of a token's queries, or of what attention gives for them."""
        return self.num_heads * self.head_dim * self.item_bytes

    def gathered_positions(self, num_positions: int, max_bytes: int) -> int:
        """Positions of one group."""
        return min(num_positions, max(self.longest, max_bytes // self.position_bytes))


def device_attention_bytes(method: AttentionMethod, sizes: AttentionSizes) -> int:
    """The most that a pass takes, of tokens that decode or of prompts."""
    assert method is not AttentionMethod.host, "a host's attention is another"
    if method is not AttentionMethod.flash:
        return max(_padded_decode(method, sizes), _masked_prefill(method, sizes))
    gathered = sizes.gathered_positions(sizes.num_positions, GATHERED_BYTES) * sizes.position_bytes
    gathered += sizes.num_positions * INDEX_BYTES
    group = sizes.num_heads // sizes.num_kv_heads
    sums = min(NUM_WAVES_SPLIT * group, 128 * sizes.num_rows * sizes.num_heads) * (sizes.head_dim + 1) * 4
    decode = 4 * sizes.num_rows * sizes.token_bytes + sums
    # Queries once more beside rows that decode, what comes out twice, and sums of scores.
    prefill = sizes.num_tokens * (3 * sizes.token_bytes + 4 * 4 * sizes.num_heads)
    return gathered + max(decode, prefill)


def _padded_decode(method: AttentionMethod, sizes: AttentionSizes) -> int:
    """Masks as two of bits and two of numbers; out of the kernels, and what they add up in float32."""
    padded = sizes.num_rows * sizes.longest
    masks = padded * (INDEX_BYTES + 2 + 2 * sizes.item_bytes)
    out = sizes.num_rows * (3 * sizes.token_bytes + 4 * sizes.num_heads * sizes.head_dim)
    if method is AttentionMethod.fused:
        return sizes.gathered_positions(padded, GATHERED_BYTES) * sizes.position_bytes + masks + out
    position_bytes = sizes.position_bytes + 4 * (2 * sizes.num_kv_heads * sizes.head_dim + 3 * sizes.num_heads)
    return sizes.gathered_positions(padded, SCORED_BYTES) * position_bytes + masks + out


def _masked_prefill(method: AttentionMethod, sizes: AttentionSizes) -> int:
    """One segment after the other, but masks of all of them stay: two of bits, of two kinds of layers."""
    query_tokens = min(sizes.num_tokens, sizes.longest)
    masks = 4 * sizes.num_tokens * sizes.longest + query_tokens * sizes.longest * (2 + 2 * sizes.item_bytes)
    row = sizes.longest * sizes.position_bytes
    out = sizes.num_tokens * sizes.token_bytes + query_tokens * (
        sizes.token_bytes + 4 * sizes.num_heads * (sizes.head_dim + 1)
    )
    if method is AttentionMethod.fused:
        return row + masks + out
    group = sizes.num_heads // sizes.num_kv_heads  # the heads whose scores lie in memory at a time
    scores = query_tokens * sizes.longest * group * (4 + 2 * max(4, sizes.item_bytes))
    return row + masks + out + scores + (group * query_tokens + 2 * sizes.longest) * sizes.head_dim * sizes.item_bytes


CHUNK_COLUMNS = 64  # transformers' torch_chunk_gated_delta_rule pads each row to whole chunks
FLOAT_BYTES = 4  # it computes in float32, whatever the model computes in


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """`num_heads` have a state of `key_dim` x `value_dim` each; keys and queries of `num_key_heads` are repeated for
    them."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int

    def num_bytes(self, num_rows: int, num_columns: int, dtype_bytes: int) -> int:
        """The bytes at the peak, where the chunks' systems have been solved: queries, keys and values, scaled and
        decayed, each in a tensor of its own, and matrices of a chunk's pairs of positions; of the rows' states the
        cached one, those before and after a chunk and two products."""
        padded = num_rows * round_up(num_columns, CHUNK_COLUMNS) * self.num_heads
        per_position = 7 * self.key_dim + 4 * self.value_dim + 4 * CHUNK_COLUMNS + 8
        projected = 4 * self.num_key_heads * self.key_dim + 3 * self.num_heads * self.value_dim
        states = num_rows * self.num_heads * self.key_dim * self.value_dim
        return (padded * per_position + 5 * states) * FLOAT_BYTES + num_rows * num_columns * projected * dtype_bytes
