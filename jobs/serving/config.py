"""Settings of the batch server and its jobs; conf/serve.yaml mirrors them. Separate from slow imports."""

import ipaddress
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from runtime.config.texts import is_url
from runtime.errors import require
from runtime.units import GIB, MIB

from ..config.settings import LogLevel
from ..config.words import quote

MAX_PORT, MAX_FILE_MIB, MAX_GIB, MAX_COUNT = 65_535, 100_000, 1_000_000, 1_000_000
MAX_TOKENS, MAX_SECONDS = 100_000_000, 86_400
SERVER_KEYS = ("run", "output", "output_root", "shard", "dataset", "prompt", "trace")
ALLOWED_KEYS = ("dataset.limit", "dataset.max_row_bytes")
PATHS = ("model.path", "model.tokenizer", "sampling.json_schema")  # a Hub id or JSON if no such path exists


def job_settings(job: str, settings: Sequence[str]) -> list[str]:
    """Filters `settings` to those that the job accepts."""
    is_encode = job == "encode"
    return [setting for setting in settings if is_encode or not setting.lstrip("+~").startswith("encode.")]


def absolute_path_settings(values: Mapping[str, object]) -> list[str]:
    """Overrides that make the paths in `values` absolute, since jobs run in another directory."""
    overrides = []
    for key in (*PATHS, "offload.cache_dir"):
        value = values.get(key)
        if not isinstance(value, str) or is_url(value):
            continue
        path = Path(value).expanduser()
        with suppress(OSError, ValueError):  # a JSON schema given as text is not a valid path
            if not path.is_absolute() and (key not in PATHS or path.exists()):
                overrides.append(f"{key}={quote(str(path.absolute()))}")
    return overrides


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """All settings of `jobs.serve`; mirrors conf/serve.yaml."""

    settings: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 8000
    require_api_key: bool = True
    api_key_file: str | None = None
    max_file_mib: int = 512
    max_files: int = 10_000
    max_uploads_gib: int = 100
    max_batches: int = 1_000
    max_requests: int = 1_000
    max_rows: int = 64
    max_request_tokens: int = 4_096
    max_wait_seconds: float = 0.1
    idle_seconds: float = 30.0
    output_root: str = "outputs"
    log_level: LogLevel = LogLevel.info

    def __post_init__(self) -> None:
        require(bool(self.host), "host is empty: set host=127.0.0.1 for this machine only")
        limits = {
            "port": (MAX_PORT, ""),
            "max_file_mib": (MAX_FILE_MIB, " MiB"),
            "max_files": (MAX_COUNT, ""),
            "max_uploads_gib": (MAX_GIB, " GiB"),
            "max_batches": (MAX_COUNT, ""),
            "max_requests": (MAX_COUNT, ""),
            "max_rows": (MAX_COUNT, ""),
            "max_request_tokens": (MAX_TOKENS, ""),
        }
        for key, (limit, unit) in limits.items():
            value = getattr(self, key)
            require(1 <= value <= limit, f"{key} must be 1 to {limit:,}{unit}, got {value}")
        for key in ("max_wait_seconds", "idle_seconds"):
            require(
                0 <= getattr(self, key) <= MAX_SECONDS, f"{key} must be 0 to {MAX_SECONDS} s, got {getattr(self, key)}"
            )
        require(bool(self.output_root.strip()), "output_root is empty: name a directory, e.g. output_root=outputs")
        require(
            self.require_api_key or self.is_loopback,
            f"require_api_key=false needs host=127.0.0.1: anyone who reaches host={self.host} could use it",
        )
        for setting in self.settings:
            key, sign, value = setting.lstrip("+~").partition("=")
            is_reserved = key.partition(".")[0] in SERVER_KEYS and key not in ALLOWED_KEYS
            require(bool(sign), f"settings: {setting!r} is not key=value, as for weightstream generate")
            require(not is_reserved, f"settings: {setting!r} is not allowed: the server sets it for each batch")
            require(
                key != "output_private" or value.lower() == "true",
                f"settings: {setting!r} is not allowed: batches are readable only by the server's user; "
                "copy or export a run for others",
            )

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the host."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def max_file_bytes(self) -> int:
        return self.max_file_mib * MIB

    @property
    def max_uploads_bytes(self) -> int:
        return self.max_uploads_gib * GIB
