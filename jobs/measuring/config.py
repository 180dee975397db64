"""The settings of `jobs.measure`; mirrors conf/measure.yaml. Separate so that they are checked before torch is
loaded."""

from dataclasses import dataclass, field

from runtime.config.profiles import MeasureConfig
from runtime.config.settings import MachineConfig, require

from ..config.settings import LogLevel


@dataclass(frozen=True, kw_only=True)
class MeasureJobConfig:
    """What to measure. Only device and threads of `machine` are used: another machine's profile cannot be measured
    here."""

    machine: MachineConfig = field(default_factory=MachineConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    log_level: LogLevel = LogLevel.warning

    def __post_init__(self) -> None:
        require(
            self.machine.sheet is None and self.machine.rates is None,
            f"machine={self.machine.name} is a profile: measure with machine=auto, cpu or cuda",
        )
