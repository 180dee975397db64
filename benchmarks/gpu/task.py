"""The arguments of `suite=gpu`'s worker, and its answers: first a `GpuMachine`, then measurements."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from runtime.engine.records import PassRecord

from ..task import Result
from .config import MODELS, GpuConfig


@dataclass(frozen=True, kw_only=True)
class GpuTask:
    """The arguments of a worker, which measures up to `rounds` rounds of all variants and stops `seconds` after
    `start_time`. `start_time`: time.monotonic() in the parent process; None: the worker's start. `is_alone`: measures
    only `DEEPSPEED_VARIANT`, which needs a worker of its own."""

    gpu: GpuConfig
    prompt_tokens: int
    rounds: int
    seconds: float
    start_time: float | None = None
    is_alone: bool = False


@dataclass(frozen=True, kw_only=True)
class GpuMachine:
    """The device, its link, and the layers and bytes of the whole model."""

    device: str
    link: dict[str, float]  # kind of copy (pinned memory in each direction, pageable memory ...) -> GB/s
    num_layers: int
    weight_bytes: int
    model: str = MODELS["mixtral"].title


@dataclass(frozen=True, kw_only=True)
class VariantPhaseTimes:
    """Sums over all passes (forwards) of one phase, such as prefill. `copy_seconds` and `read_seconds`: the link or the
    disk was busy. `stall_seconds`: an upper bound of the time in which compute waited for bytes. `num_tokens`: computed
    tokens, of prompts and new ones."""

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
    """One round of a variant. `refusal`: the reason if there is no result. `phases`: empty for peers. `is_rounded`: its
    weights are rounded, so its tokens differ from those of other variants."""

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
    """The sum over passes of the sums over stages."""
    return sum(map(sum, by_stage))
