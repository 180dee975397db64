"""Where batches are served, and how their jobs are started; conf/serve.yaml mirrors it. It stands alone because a door
reads it before it loads what takes long."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.errors import require

from ..config.settings import LogLevel

MAX_PORT, MAX_FILE_MIB = 65_535, 100_000
OF_THE_SERVER = ("run", "output", "output_root", "shard", "dataset", "prompt", "trace")


def settings_of(job: str, settings: Sequence[str]) -> list[str]:
    """Those of `settings` that a job of this name has."""
    is_own = job == "encode"
    return [each for each in settings if is_own or not each.lstrip("+~").startswith("encode.")]


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """All settings of `jobs.serve`; mirrors conf/serve.yaml."""

    settings: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 8000
    max_file_mib: int = 512
    output_root: str = "outputs"
    log_level: LogLevel = LogLevel.info

    def __post_init__(self) -> None:
        require(bool(self.host), "host is empty: 127.0.0.1 is this machine alone")
        require(1 <= self.port <= MAX_PORT, f"port must be 1 to {MAX_PORT:,}, got {self.port}")
        require(
            1 <= self.max_file_mib <= MAX_FILE_MIB,
            f"max_file_mib must be 1 to {MAX_FILE_MIB:,} MiB, got {self.max_file_mib}",
        )
        require(bool(self.output_root.strip()), "output_root is empty: name a directory, e.g. output_root=outputs")
        for setting in self.settings:
            key = setting.lstrip("+~").partition("=")[0]
            is_own = key.partition(".")[0] in OF_THE_SERVER and key not in ("dataset.limit", "dataset.max_row_bytes")
            require("=" in setting, f"settings holds {setting!r}: each is key=value of millrace generate")
            require(not is_own, f"settings holds {setting!r}, which the server sets for each batch")

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this machine reaches it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
