"""Lanes that nobody joins: each runs to its end. Where more micro-batches wait than there may be lanes, the next one
enters as a lane ends; a wave is a line of which nobody waits, reproducible whenever a run is stopped and resumed.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from itertools import count, islice

from .engine import Engine
from .lanes.lane import Lane
from .records import PassRecord, Phase
from .sequence import Sequence


def run_block(
    engine: Engine, block: int, micro_batches: Rows[Rows[Sequence]], chunks: Rows[int | None] | None = None
) -> Iterator[PassRecord]:
    """Generates until every sequence is finished, yielding after each pass. Mutates the sequences.

    `chunks`: of each micro-batch, how many tokens it prefills in a pass; None: as many as the policy says.
    """
    entering = zip(micro_batches, chunks or [None] * len(micro_batches), strict=True)
    line = (engine.lane(micro_batch, chunk) for micro_batch, chunk in entering if micro_batch)
    return run_line(engine, block, line, num_lanes=len(micro_batches))


def run_line(engine: Engine, block: int, line: Iterator[Lane], *, num_lanes: int) -> Iterator[PassRecord]:
    """As `run_block`; at most `num_lanes` lanes of the line, none of them empty, at a time."""
    lanes: list[Lane] = []
    try:
        for index in count():
            lanes.extend(islice(line, num_lanes - len(lanes)))
            if not lanes:
                return
            unfilled = [lane for lane in lanes if lane.is_filling]  # by themselves: an encoder is theirs alone
            phase = Phase.prefill if unfilled else _phase(lanes)
            yield engine.run_pass(block, index, phase, unfilled or lanes)
            lanes = _still_open(lanes)
    finally:
        for lane in lanes:
            lane.close()


def _phase(lanes: Rows[Lane]) -> Phase:
    """Where none is filled: a sequence that begins again does so beside those that decode, and a decoder whose encoder
    has run may be behind what it had generated before."""
    return Phase.decode if all(lane.is_prefilled for lane in lanes) else Phase.mixed


def _still_open(lanes: Rows[Lane]) -> list[Lane]:
    """Closes lanes that have run to their end."""
    for lane in lanes:
        if lane.is_done:
            lane.close()
    return [lane for lane in lanes if not lane.is_done]
