"""Measurements of a pass: token counts, times and bytes."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum


class Phase(Enum):
    """Phase of a pass. `mixed`: prefill and decode tokens in one pass."""

    prefill = "prefill"
    decode = "decode"
    mixed = "mixed"


@dataclass(frozen=True, kw_only=True)
class PassCounts:
    """Token counts of one pass, of one lane or all. `real_tokens` exclude padding, `padded_tokens` include it."""

    num_sequences: int
    real_tokens: int
    padded_tokens: int
    prompt_tokens: int  # real tokens that are prefilled: prompts, or known tokens of resumed sequences
    issued_tokens: int  # new tokens computed, finished rows included
    useful_tokens: int  # new tokens that are part of a returned completion
    spared_tokens: int = 0  # prompt tokens reused from a shared prefix, minus those computed for it
    drafted_tokens: int = 0  # guesses that were computed; wrong ones count as padding
    accepted_tokens: int = 0  # guesses that were right

    @staticmethod
    def total(lanes: Iterable["PassCounts"]) -> "PassCounts":
        counts = list(lanes)
        return PassCounts(**{f.name: sum(getattr(each, f.name) for each in counts) for f in fields(PassCounts)})


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Times and traffic of one pass. Seconds are per stage, summed over lanes. Bytes are of weights, experts and KV
    together. Experts are those of paged stages."""

    read_seconds: tuple[float, ...]  # the disk is busy
    copy_seconds: tuple[float, ...]  # the link to the device is busy
    compute_seconds: tuple[float, ...]  # lanes and experts; includes inline attention and waits for paged experts
    attention_seconds: tuple[float, ...]  # on any thread
    stall_seconds: tuple[float, ...]  # compute waits for bytes; an upper bound on an accelerator
    prefetch_hits: int  # streamed stages that were in compute memory when a lane first needed them
    prefetch_misses: int
    experts_total: int
    experts_hit: int  # visited by a token; each counts once per pass
    experts_read: int  # reads, repeated ones included
    bytes_read_disk: int
    bytes_copied_device: int
    bytes_copied_host: int
    bytes_written_disk: int


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """One pass of one block. `seconds`: wall time by a monotonic clock. Memory bytes: in use at the end of the pass,
    and the peak so far."""

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
