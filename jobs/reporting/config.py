"""The settings of `jobs.report` and `jobs.status`; mirrors conf/report.yaml and conf/status.yaml.

Imports little, so that settings are checked before slow imports.
"""

from dataclasses import dataclass, field
from enum import Enum

from runtime.config.texts import require_plain_url
from runtime.errors import require

from ..config.settings import Tracker

MAX_SAMPLES = 1000  # on one page


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """All settings of `jobs.report`; mirrors conf/report.yaml."""

    run: str | list[str] | None = None
    directory: str | None = None
    samples: int = 12
    track: list[Tracker] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(
            bool(self.names) and all(self.names),
            "run is not set: directories of runs, or a glob, e.g. run='outputs/generate/*'",
        )
        for name in self.names:
            require_plain_url(name, "run")
        require(self.directory != "", "directory is empty: set one, or null")
        require(0 <= self.samples <= MAX_SAMPLES, f"samples must be 0 to {MAX_SAMPLES:,} rows, got {self.samples}")

    @property
    def names(self) -> list[str]:
        return [self.run] if isinstance(self.run, str) else self.run or []


class StatusFormat(Enum):
    """The output of `jobs.status`."""

    text = "text"
    json = "json"


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """All settings of `jobs.status`; mirrors conf/status.yaml."""

    run: str | list[str] | None = None
    format: StatusFormat = StatusFormat.text

    def __post_init__(self) -> None:
        require(
            bool(self.names) and all(self.names),
            "run is not set: a run's directory or a glob, e.g. run=outputs/generate/mine",
        )
        for name in self.names:
            require_plain_url(name, "run")

    @property
    def names(self) -> list[str]:
        return [self.run] if isinstance(self.run, str) else self.run or []
