"""How much of what is known already one pass may carry, when a block goes on inside: prompts and the tokens behind them
are prefilled in the memory that was planned for prompts alone, and in what the plan has left over.
"""

from collections.abc import Sequence

from ..shape.model import ModelShape
from .ledger import Entry
from .memory import MicroBatch, lane_entries, pass_tokens


def resumed_chunks(
    shape: ModelShape, planned: Sequence[MicroBatch], resumed: Sequence[MicroBatch], chunk_tokens: int, spare_bytes: int
) -> tuple[int, ...]:
    """Tokens that each lane may carry in a prefill pass. `planned`: the lanes as they were before anything was
    generated; `resumed`: what is left of them, with all that is known as prompts; `spare_bytes`: what the compute
    device's ledger leaves over."""
    if shape.has_encoder:
        return tuple(_decoded_chunk(shape, lane, spare_bytes) for lane in planned)
    as_planned = [pass_tokens(shape, lane, chunk_tokens) for lane in planned]
    room, tokens = _num_bytes(lane_entries(shape, planned, chunk_tokens)) + spare_bytes, chunk_tokens
    while tokens > max(as_planned, default=0):
        if _num_bytes(lane_entries(shape, resumed, tokens)) <= room:
            return (tokens,) * len(planned)
        tokens //= 2
    return tuple(as_planned)


def _decoded_chunk(shape: ModelShape, lane: MicroBatch, spare_bytes: int) -> int:
    """Of a decoder behind an encoder, whose head makes logits of every token that it is given: as many as find room
    where the encoder's activations were, and no more than those had tokens."""
    room = room_of_encoder(shape, lane) + spare_bytes
    return max(len(lane), min(pass_tokens(shape, lane, 0), len(lane) + room // (4 * shape.vocab_size)))


def room_of_encoder(shape: ModelShape, lane: MicroBatch) -> int:
    """Bytes of its activations, at least, which are gone when the decoder's head runs."""
    numbers = (4 * shape.hidden_size + 3 * shape.intermediate_size) * pass_tokens(shape, lane, 0)
    return numbers * shape.compute_dtype_bytes


def _num_bytes(entries: Sequence[Entry]) -> int:
    return sum(entry.num_bytes for entry in entries)
