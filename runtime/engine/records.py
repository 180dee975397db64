"""What a pass came to, in numbers."""

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """`mixed`: prompts and tokens that are decoded in one pass."""

    prefill = "prefill"
    decode = "decode"
    mixed = "mixed"


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """One pass of one block. Seconds are monotonic; `compute` and `stall` are the engine's, `load` the disk's own."""

    block: int
    index: int
    phase: Phase
    num_sequences: int
    real_tokens: int
    padded_tokens: int
    prompt_tokens: int
    issued_tokens: int
    useful_tokens: int
    seconds: float
    compute_seconds: float
    load_seconds: float
    stall_seconds: float
    bytes_read_disk: int
    bytes_copied_device: int
    peak_host_bytes: int
    peak_device_bytes: int
