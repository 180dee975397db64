"""The settings of `jobs.measure`, which mirror conf/measure.yaml. It stands alone so that they are checked before torch
is loaded.
"""

from dataclasses import dataclass, field

from runtime.config.profiles import MeasureConfig
from runtime.config.settings import MachineConfig, require

from ..config.settings import LogLevel


@dataclass(frozen=True, kw_only=True)
class MeasureJobConfig:
    """What is measured, and where: of `machine` the device and its threads count, as a profile of another machine
    cannot be measured here."""

    machine: MachineConfig = field(default_factory=MachineConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    log_level: LogLevel = LogLevel.warning

    def __post_init__(self) -> None:
        require(
            self.machine.sheet is None and self.machine.rates is None,
            f"machine={self.machine.name} is a profile: measure with machine=auto, cpu or cuda",
        )
