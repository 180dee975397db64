"""What a run's passes spent their time on, prefill and decode apart: did copies and reads hide behind compute?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from runtime.engine.records import PassRecord
from runtime.units import format_bytes

HEAD = "| way | passes | seconds | tokens/s | link busy | to the device | disk busy | read | compute waits for bytes |"


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """All passes of one kind. Seconds of `copy` and `read`: link and disk were busy; of `stall`: compute waited for
    bytes, at most. Tokens are those computed: of prompts, or new ones."""

    phase: str
    num_passes: int
    num_tokens: int
    seconds: float
    copy_seconds: float
    read_seconds: float
    stall_seconds: float
    bytes_copied: int
    bytes_read: int


def phases_of(passes: Sequence[PassRecord]) -> list[PhaseTimes]:
    """In order of appearance."""
    kinds = dict.fromkeys(record.phase for record in passes)
    return [_times(kind.value, [record for record in passes if record.phase is kind]) for kind in kinds]


def _times(phase: str, passes: Sequence[PassRecord]) -> PhaseTimes:
    return PhaseTimes(
        phase=phase,
        num_passes=len(passes),
        num_tokens=sum(record.counts.real_tokens for record in passes),
        seconds=sum(record.seconds for record in passes),
        copy_seconds=_sum(record.times.copy_seconds for record in passes),
        read_seconds=_sum(record.times.read_seconds for record in passes),
        stall_seconds=_sum(record.times.stall_seconds for record in passes),
        bytes_copied=sum(record.times.bytes_copied_device for record in passes),
        bytes_read=sum(record.times.bytes_read_disk for record in passes),
    )


def _sum(by_stage: Iterable[Iterable[float]]) -> float:
    return sum(map(sum, by_stage))


def phase_rows(way: str, rounds: Sequence[Sequence[PhaseTimes]]) -> list[str]:
    """A row for each phase: that of the round whose seconds are the median, so that its parts fit each other."""
    kinds = dict.fromkeys(each.phase for times in rounds for each in times)
    return [_row(way, _median([each for times in rounds for each in times if each.phase == kind])) for kind in kinds]


def _median(times: Sequence[PhaseTimes]) -> PhaseTimes:
    middle = median(each.seconds for each in times)
    return min(times, key=lambda each: abs(each.seconds - middle))


def _row(way: str, times: PhaseTimes) -> str:
    busy = [f"{seconds / times.seconds:.0%}" for seconds in (times.copy_seconds, times.read_seconds)]
    copied, read = (format_bytes(num) if num else "-" for num in (times.bytes_copied, times.bytes_read))
    return (
        f"| {way} | {times.num_passes} {times.phase} | {times.seconds:.2f} | {times.num_tokens / times.seconds:.1f} "
        f"| {busy[0]} | {copied} | {busy[1]} | {read} | {times.stall_seconds / times.seconds:.0%} |"
    )
