"""What recordings of decode passes take of a device's memory, see engine/recorded.py."""

from collections.abc import Sequence

from ...units import MIB
from ..shape.model import ModelShape
from .ledger import Entry
from .memory import MicroBatch, lane_entries

NUM_RECORDINGS = 16  # that are kept: the latest
RECORDING_BYTES = 32 * MIB  # of the driver, for the launches of a pass: an estimate
ROOM = 1.5  # times the positions that a pass looks at, at most
OF_A_PASS = frozenset({"hidden states", "activations", "logits"})


def recordings_entry(shape: ModelShape, lanes: Sequence[MicroBatch]) -> Entry:
    """All compute in the same memory, which nothing else uses; what they start from and give lies beside it."""
    entries = lane_entries(shape, lanes, prefill_chunk_tokens=1, slack_bytes=0)
    of_a_pass = round(ROOM * sum(entry.num_bytes for entry in entries if entry.name in OF_A_PASS))
    return Entry(
        name="recordings",
        num_bytes=of_a_pass + NUM_RECORDINGS * RECORDING_BYTES,
        equation=f"a decode pass {of_a_pass:,} B + {NUM_RECORDINGS} x {RECORDING_BYTES // MIB} MiB",
    )
