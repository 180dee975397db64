"""What a pass came to, in numbers."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum


class Phase(Enum):
    """`mixed`: prompts and tokens that are decoded in one pass."""

    prefill = "prefill"
    decode = "decode"
    mixed = "mixed"


@dataclass(frozen=True, kw_only=True)
class PassCounts:
    """Token counts of a lane, or of all lanes together, in one pass: `real` were computed for a reason, `padded`
    includes the padding beside them."""

    num_sequences: int
    real_tokens: int
    padded_tokens: int
    prompt_tokens: int  # of the real ones, those of prompts (or of what a sequence that was stopped knows already)
    issued_tokens: int  # new tokens computed, those of rows that had finished before included
    useful_tokens: int  # new tokens that are part of a completion; in a beam search of as many beams as come back
    spared_tokens: int = 0  # of prompts, that another row computed; less those that rows computed for others

    @staticmethod
    def total(lanes: Iterable["PassCounts"]) -> "PassCounts":
        counts = list(lanes)
        return PassCounts(**{f.name: sum(getattr(each, f.name) for each in counts) for f in fields(PassCounts)})


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """One pass. Seconds are by stage, the sum over its lanes.

    read, copy: disk and link were busy. compute: inside lanes and experts, with attention that the engine answered at
    once, and with the waiting for experts that are paged.
    attention: wherever it ran, added up over workers. stall: compute waited for bytes, on an accelerator at most.
    Bytes are those of weights, experts and KV together. Experts are those of layers that are read expert by expert: a
    pass counts each of them, and those that a token visits, once, and reads as often as lanes ask.
    """

    read_seconds: tuple[float, ...]
    copy_seconds: tuple[float, ...]
    compute_seconds: tuple[float, ...]
    attention_seconds: tuple[float, ...]
    stall_seconds: tuple[float, ...]
    prefetch_hits: int  # streamed stages whose bytes were there when a lane first asked
    prefetch_misses: int
    experts_total: int
    experts_hit: int
    experts_read: int
    bytes_read_disk: int
    bytes_copied_device: int
    bytes_copied_host: int
    bytes_written_disk: int


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """One pass of one block. `seconds` are monotonic; what they were spent on is in `times`. Bytes of memory: in use at
    its end, and the most so far."""

    block: int
    index: int
    phase: Phase
    counts: PassCounts
    seconds: float
    times: StageTimes
    host_bytes: int
    device_bytes: int
    peak_host_bytes: int
    peak_device_bytes: int
