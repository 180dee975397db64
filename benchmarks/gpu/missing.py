"""What an environment lacks, and what `suite=gpu` then cannot measure: said before anything is measured."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

from ..contenders import is_installed

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
WHEELS = "docs/how-to/gpu-first-run.md says how to bring wheels along"


@dataclass(frozen=True, kw_only=True)
class PackageNeed:
    """A package that is imported as `module`. `cost`: what is not measured without it; None: nothing is."""

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
    """Names of the packages without which nothing runs and that are not there."""
    return [need.name for need in NEEDS if need.consequence is None and not is_installed(need.module)]


def missing_messages() -> Iterator[str]:
    """One line for each package that is missing, or of a version that pyproject.toml does not name."""
    requirements = _requirements()
    for need in NEEDS:
        if not is_installed(need.module):
            yield f"{need.name} is not installed: {need.consequence or 'nothing of Weightstream runs'}. {WHEELS}"
        elif (required := requirements.get(need.name)) and (installed := _version(need.name)) not in required.specifier:
            yield f"{need.name} {installed} is installed, pyproject.toml requires {required}: not a tested version"


def _requirements() -> Mapping[str, Requirement]:
    """What the checkout's pyproject.toml requires, by name; nothing where the package was installed without it."""
    if not PYPROJECT.exists():
        return {}
    lines = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def _version(name: str) -> str:
    """The version without a build's own mark, such as +cpu."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "of an unknown version"
