"""What the worker of `suite=gpu` is asked, and what it answers with: first a `Machine`, then measurements."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from runtime.engine.records import PassRecord

from ..task import Result
from .config import MODELS, GpuConfig


@dataclass(frozen=True, kw_only=True)
class GpuTask:
    """Rounds of all variants within so many seconds from `begun` on, in `time.monotonic`'s time, which processes of a
    machine share; None: from when the worker has it. `is_alone`: of the one that has a process of its own instead."""

    gpu: GpuConfig
    prompt_tokens: int
    rounds: int
    seconds: float
    start_time: float | None = None
    is_alone: bool = False


@dataclass(frozen=True, kw_only=True)
class GpuMachine:
    """The device by its name, its link in GB/s (see device.py), and the model: its name, layers and weights' bytes."""

    device: str
    link: dict[str, float]
    num_layers: int
    weight_bytes: int
    model: str = MODELS["mixtral"].title


@dataclass(frozen=True, kw_only=True)
class VariantPhaseTimes:
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


@dataclass(frozen=True, kw_only=True)
class VariantMeasurement:
    """One round of a variant. `refusal`: why there is no result; then layers and sequences are 0. `phases`: where it
    is Weightstream. `is_rounded`: its weights are other numbers than those of the others."""

    variant: str
    num_layers: int = 0
    num_sequences: int = 0
    is_rounded: bool = False
    result: Result | None = None
    refusal: str = ""
    phases: list[VariantPhaseTimes] = field(default_factory=list)


def phases_of(passes: Sequence[PassRecord]) -> list[VariantPhaseTimes]:
    """The times of each phase, in order of appearance."""
    kinds = dict.fromkeys(record.phase for record in passes)
    return [_times(kind.value, [record for record in passes if record.phase is kind]) for kind in kinds]


def _times(phase: str, passes: Sequence[PassRecord]) -> VariantPhaseTimes:
    return VariantPhaseTimes(
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
