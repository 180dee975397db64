"""Blocks that run to their end before the next begins: reproducible, whenever a run is stopped and resumed."""

from collections.abc import Iterator
from collections.abc import Sequence as Rows

from .engine import Engine
from .lane import Lane
from .records import PassRecord, Phase
from .sequence import Sequence


def still_open(lanes: Rows[Lane]) -> list[Lane]:
    """Closes lanes that have run to their end."""
    for lane in lanes:
        if lane.is_done:
            lane.close()
    return [lane for lane in lanes if not lane.is_done]


def run_block(engine: Engine, block: int, micro_batches: Rows[Rows[Sequence]]) -> Iterator[PassRecord]:
    """Generates until every sequence is finished, yielding after each pass. Mutates the sequences."""
    lanes = [engine.lane(micro_batch) for micro_batch in micro_batches if micro_batch]
    index = 0
    try:
        while lanes:
            unfilled = [lane for lane in lanes if not lane.is_prefilled]
            phase = Phase.prefill if unfilled else Phase.decode
            yield engine.run_pass(block, index, phase, unfilled or lanes)
            lanes = still_open(lanes)
            index += 1
    finally:
        for lane in lanes:
            lane.close()
