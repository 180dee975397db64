"""The settings of `jobs.measure`; mirrors conf/measure.yaml. Imports no torch, so that they are checked quickly."""

from dataclasses import dataclass, field

from runtime.config.profiles import MeasureConfig
from runtime.config.settings import MachineConfig, require

from ..config.settings import LogLevel


@dataclass(frozen=True, kw_only=True)
class MeasureJobConfig:
    """All settings of `jobs.measure`. Of `machine`, only device and threads are used; a profile of a machine is
    rejected."""

    machine: MachineConfig = field(default_factory=MachineConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    log_level: LogLevel = LogLevel.warning

    def __post_init__(self) -> None:
        require(
            self.machine.sheet is None and self.machine.rates is None,
            f"machine={self.machine.name} is a profile of another machine: set machine=auto, cpu or cuda",
        )
