"""The Python library: the names of `runtime`, such as `weightstream.Runtime`. torch is imported on first use."""

from typing import TYPE_CHECKING

import runtime

if TYPE_CHECKING:
    from runtime import *  # noqa: F403

__all__ = runtime.__all__  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    return getattr(runtime, name)


def __dir__() -> list[str]:
    return dir(runtime)
