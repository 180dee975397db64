"""Gated delta nets (Yang et al. 2024): what their recurrence takes while a padded lane passes one layer."""

from dataclasses import dataclass

from ...units import round_up

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
