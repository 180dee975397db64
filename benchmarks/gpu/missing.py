"""Reports missing packages before measuring, and the variants of `suite=gpu` that are left out without them."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

from ..contenders import is_installed

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
WHEELS = "To bring wheels along, see docs/how-to/gpu-first-run.md"


@dataclass(frozen=True, kw_only=True)
class PackageNeed:
    """A package that is imported as `module`. `consequence`: what is left out without it; None: the package is
    required."""

    name: str
    module: str
    consequence: str | None = None


NEEDS = (
    PackageNeed(name="torch", module="torch"),
    PackageNeed(name="transformers", module="transformers"),
    PackageNeed(name="safetensors", module="safetensors"),
    PackageNeed(name="greenlet", module="greenlet"),
    PackageNeed(
        name="numba",
        module="numba",
        consequence="'weightstream, attention=cpu' is left out, as torch operators would run",
    ),
    PackageNeed(name="accelerate", module="accelerate", consequence="'accelerate cpu_offload' is left out"),
    PackageNeed(name="deepspeed", module="deepspeed", consequence="'deepspeed ZeRO-Inference' is left out"),
)


def missing_required() -> list[str]:
    """The names of required packages that are missing."""
    return [need.name for need in NEEDS if need.consequence is None and not is_installed(need.module)]


def missing_messages() -> Iterator[str]:
    """Yields a line for each package that is missing, or has a version outside of pyproject.toml's range."""
    requirements = _requirements()
    for need in NEEDS:
        if not is_installed(need.module):
            yield f"{need.name} is not installed: {need.consequence or 'Weightstream cannot run'}. {WHEELS}"
        elif (required := requirements.get(need.name)) and (installed := _version(need.name)) not in required.specifier:
            yield f"{need.name} {installed} is installed, pyproject.toml requires {required}: not a tested version"


def _requirements() -> Mapping[str, Requirement]:
    """The requirements in pyproject.toml by package name. Empty if Weightstream is installed without pyproject.toml."""
    if not PYPROJECT.exists():
        return {}
    lines = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def _version(name: str) -> str:
    """The version without a local label such as +cpu."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "of an unknown version"
