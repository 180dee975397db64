"""Which model is packed, into what, and what becomes of its files; conf/pack.yaml mirrors it."""

from dataclasses import dataclass, field

from runtime.errors import require


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """All settings of `jobs.pack`; mirrors conf/pack.yaml."""

    model: SourceConfig = field(default_factory=SourceConfig)
    out: str | None = None
    verify: bool = True
    replace: bool = False

    def __post_init__(self) -> None:
        require(bool(self.model.path), "model.path is not set: a directory, e.g. model.path=/data/mixtral")
        require(bool(self.out), "out is not set: the directory to write, e.g. out=/data/mixtral-packed")
        require(
            self.verify or not self.replace,
            "replace=true with verify=false would delete weights whose packed form was never compared: verify=true",
        )
