"""The settings of `jobs.pack`; mirrors conf/pack.yaml."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from runtime.errors import require

GROUP_SIZES = (32, 64, 128)  # columns with a common scale


class Format(Enum):
    """The format of a packed store. `lossless`: bfloat16 in 12 bits. `int8` and `fp8` (E4M3): rounded, with a scale for
    each row. `int4`: rounded, with a scale for each group of columns in a row. Tensors that are not rounded are packed
    losslessly."""

    lossless = "lossless"
    int8 = "int8"
    int4 = "int4"
    fp8 = "fp8"


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """The model to pack: a directory."""

    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """All settings of `jobs.pack`; mirrors conf/pack.yaml."""

    model: SourceConfig = field(default_factory=SourceConfig)
    out: str | tuple[str, ...] | None = None
    format: Format = Format.lossless
    group_size: int = 64
    verify: bool = True
    replace: bool = False

    @property
    def directories(self) -> list[Path]:
        """The directories to write; if there are several, each shard is divided among them."""
        names = [self.out] if isinstance(self.out, str) else self.out or ()
        return [Path(name).expanduser() for name in names]

    def __post_init__(self) -> None:
        require(bool(self.model.path), "model.path is not set: a directory, e.g. model.path=/data/mixtral")
        require(bool(self.out), "out is not set: the directory to write, e.g. out=/data/mixtral-packed")
        paths = [path.resolve() for path in self.directories]
        twice = next((path for path in paths if paths.count(path) > 1), None)
        require(twice is None, f"out names {twice} twice: name each directory once")
        require(
            self.group_size in GROUP_SIZES,
            f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}, got {self.group_size}",
        )
        require(
            self.verify or not self.replace,
            "replace=true deletes the original weights, which needs verify=true",
        )
