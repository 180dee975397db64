"""The settings of `jobs.plan`."""

from dataclasses import dataclass, field

from runtime.config import (
    KVConfig,
    Lanes,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PrefetchConfig,
    RuntimeConfig,
    SamplingConfig,
)
from runtime.errors import require


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """How many prompts there are and how long. What a data set's are is in conf/workload; None: not known."""

    num_requests: int | None = None
    mean_prompt_tokens: float | None = None
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            require(value is None or value >= 1, f"workload.{key} must be 1 or more, got {value}")
        mean, most = self.mean_prompt_tokens, self.max_prompt_tokens
        require(
            mean is None or most is None or mean <= most,
            f"workload.mean_prompt_tokens={mean} is above workload.max_prompt_tokens={most}",
        )


@dataclass(frozen=True, kw_only=True)
class ShownConfig:
    """`num_actions`: of the schedule, from its beginning."""

    num_actions: int = 40

    def __post_init__(self) -> None:
        require(self.num_actions >= 0, f"plan.num_actions must be 0 or more, got {self.num_actions}")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """All settings of `jobs.plan`; mirrors conf/plan.yaml. Of `dataset` the kind alone is used: no prompt is
    read."""

    model: ModelConfig = field(default_factory=ModelConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    dataset: dict[str, object] = field(default_factory=dict)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    plan: ShownConfig = field(default_factory=ShownConfig)

    def __post_init__(self) -> None:
        lanes = self.model.lanes
        require(lanes is Lanes.auto, f"model.lanes={lanes.value}: jobs.plan knows the named models with lanes=auto")
        missing = [f"workload.{key}" for key, value in vars(self.workload).items() if value is None]
        require(
            not missing,
            f"nothing is known of the prompts of dataset={self.dataset.get('kind')}: set {', '.join(missing)}",
        )

    @property
    def runtime(self) -> RuntimeConfig:
        """Raises ConfigError where the groups contradict each other."""
        return RuntimeConfig(
            model=self.model,
            offload=self.offload,
            kv=self.kv,
            prefetch=self.prefetch,
            policy=self.policy,
            sampling=self.sampling,
            machine=self.machine,
        )
