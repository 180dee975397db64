"""The settings of `jobs.plan`."""

from dataclasses import dataclass, field
from enum import Enum

from runtime.config.settings import (
    DevicesConfig,
    KVConfig,
    Lanes,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    Parallelism,
    PolicyConfig,
    PrefetchConfig,
    RuntimeConfig,
    SamplingConfig,
)
from runtime.config.texts import did_you_mean
from runtime.errors import require

from .published import PLAIN, PUBLISHED


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """The number and lengths of prompts; None if unknown. conf/workload has the values for bundled data sets."""

    num_requests: int | None = None
    mean_prompt_tokens: float | None = None
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            require(value is None or value >= 1, f"workload.{key} must be 1 or more, got {value}")
        mean, longest = self.mean_prompt_tokens, self.max_prompt_tokens
        is_valid = mean is None or longest is None or mean <= longest
        require(is_valid, f"workload.mean_prompt_tokens={mean} is above workload.max_prompt_tokens={longest}")


class Sweep(Enum):
    """The quantity that a sweep varies."""

    memory = "memory"
    batch = "batch"
    prompt = "prompt"
    bandwidth = "bandwidth"
    format = "format"
    devices = "devices"


class PackedFormat(Enum):
    """The formats of `weightstream pack`."""

    lossless = "lossless"
    int8 = "int8"
    int4 = "int4"
    fp8 = "fp8"


FORMATS = (*PackedFormat.__members__, PLAIN, *PUBLISHED)


@dataclass(frozen=True, kw_only=True)
class PlanOutputConfig:
    """What `jobs.plan` plans and writes.

    - `num_actions`: number of lines of the schedule that are printed
    - `timeline`: writes the simulated passes as a trace and a picture
    - `format`: storage format of the weights, one of `FORMATS`; None: as the model is published
    - `num_ranks`: number of processes, for `devices` with several ranks; None: one for each device of the machine
    - `sweep_points`: values of the varied quantity, in GiB, sequences, tokens, GB/s or ranks; empty: a range around the
      value of the plan
    - `directory`: where files are written
    """

    num_actions: int = 40
    timeline: bool = False
    format: str | None = None
    num_ranks: int | None = None
    sweep: Sweep | None = None
    sweep_points: list[float] = field(default_factory=list)
    directory: str = "outputs/plan"

    @property
    def writes_files(self) -> bool:
        return self.timeline or self.sweep is not None

    def __post_init__(self) -> None:
        require(
            self.format is None or self.format in FORMATS,
            f"plan.format must be one of {', '.join(FORMATS)} or null, got {self.format!r}"
            f"{did_you_mean(self.format or '', FORMATS)}",
        )
        require(self.num_actions >= 0, f"plan.num_actions must be 0 or more, got {self.num_actions}")
        is_valid = self.num_ranks is None or self.num_ranks >= 1
        require(is_valid, f"plan.num_ranks must be 1 or more, got {self.num_ranks}")
        require(bool(self.directory.strip()), "plan.directory is empty: set one for tables and pictures")
        points = self.sweep_points
        require(
            not points or self.sweep is not None,
            "plan.sweep_points needs plan.sweep=memory, batch, prompt, bandwidth or devices",
        )
        require(
            all(point > 0 for point in points) and points == sorted(set(points)),
            f"plan.sweep_points must be above 0 and ascending, got {points}",
        )
        require(
            not points or self.sweep is not Sweep.format,
            "plan.sweep_points has no effect with plan.sweep=format: leave it out",
        )
        is_valid = self.sweep is not Sweep.batch or all(point >= 1 and point == int(point) for point in points)
        require(is_valid, f"plan.sweep_points must be 1 or more sequences with plan.sweep=batch, got {points}")
        is_valid = self.sweep is not Sweep.devices or all(point >= 2 and point == int(point) for point in points)
        require(is_valid, f"plan.sweep_points must be 2 or more ranks with plan.sweep=devices, got {points}")
        is_valid = self.sweep is not Sweep.prompt or all(point >= 1 for point in points)
        require(is_valid, f"plan.sweep_points must be 1 or more tokens with plan.sweep=prompt, got {points}")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """All settings of `jobs.plan`; mirrors conf/plan.yaml. `dataset`: if it has a path, prompts are counted."""

    model: ModelConfig = field(default_factory=ModelConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    dataset: dict[str, object] = field(default_factory=dict)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    plan: PlanOutputConfig = field(default_factory=PlanOutputConfig)

    def __post_init__(self) -> None:
        lanes = self.model.lanes
        require(lanes is Lanes.auto, f"model.lanes={lanes.value} is not supported by weightstream plan: set auto")
        require(self.sampling.max_new_tokens >= 1, "sampling.max_new_tokens must be 1 or more for a plan, got 0")
        parallelism, num_beams = self.devices.way, self.sampling.num_beams or 1
        require(
            parallelism is Parallelism.one or num_beams == 1,
            f"devices={parallelism.value} does not support sampling.num_beams={num_beams}: unset it or set devices=one",
        )
        quantize, packed = self.model.quantize, self.plan.format
        require(
            quantize is None or packed in (None, PLAIN),
            f"plan.format={packed} and model.quantize={quantize and quantize.value} exclude each other: leave one out",
        )
        if self.dataset.get("path") is not None:
            return  # prompts are counted later
        missing = [f"workload.{key}" for key, value in vars(self.workload).items() if value is None]
        require(
            not missing,
            f"unknown prompt lengths of dataset={self.dataset.get('kind')}: set dataset.path to count them, or "
            f"{', '.join(missing)}",
        )

    @property
    def runtime(self) -> RuntimeConfig:
        """The settings of the runtime. Raises ConfigError if groups contradict each other."""
        return RuntimeConfig(
            model=self.model,
            offload=self.offload,
            kv=self.kv,
            prefetch=self.prefetch,
            policy=self.policy,
            sampling=self.sampling,
            machine=self.machine,
        )
