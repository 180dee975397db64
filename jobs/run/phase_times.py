"""A phase's seconds, what each resource worked in them, and how long compute waited: as measured, or as predicted."""

from dataclasses import dataclass

from runtime.plan.cost.predict import PhaseTime, Prediction
from runtime.plan.cost.simulator import Resource


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """`attention_seconds`: predicted are those of the CPU's workers alone, measured also those within compute."""

    seconds: float
    compute_seconds: float
    load_seconds: float
    copy_seconds: float
    attention_seconds: float
    stall_seconds: float

    @staticmethod
    def of(phase: PhaseTime) -> "PhaseTimes":
        busy = phase.busy_seconds
        return PhaseTimes(
            seconds=phase.seconds,
            compute_seconds=busy[Resource.compute],
            load_seconds=busy[Resource.disk],
            copy_seconds=busy[Resource.link_in] + busy[Resource.link_out],
            attention_seconds=busy[Resource.cpu],
            stall_seconds=phase.stall_seconds,
        )

    def times(self, factor: float) -> "PhaseTimes":
        return PhaseTimes(**{name: factor * value for name, value in vars(self).items()})

    def plus(self, other: "PhaseTimes") -> "PhaseTimes":
        return PhaseTimes(**{name: value + vars(other)[name] for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """The times of all passes of a run, by phase."""

    prefill: PhaseTimes
    decode: PhaseTimes


def mean_pass(prediction: Prediction, prefill_share: float) -> PhaseTimes:
    """The times of one pass that carries this share of prompts, where all passes of a phase are taken to be alike."""

    def mean(phase: PhaseTime) -> PhaseTimes:
        return PhaseTimes.of(phase).times(1 / phase.num_passes if phase.num_passes else 0.0)

    prefill, decode = mean(prediction.prefill), mean(prediction.decode)
    return prefill.times(prefill_share).plus(decode.times(1 - prefill_share))
