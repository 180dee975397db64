"""The engine as a library under the project's name: `weightstream.Runtime` is `runtime.Runtime`.

torch is loaded when `Runtime` is first used.
"""

from typing import TYPE_CHECKING

import runtime

if TYPE_CHECKING:
    from runtime import *  # noqa: F403

__all__ = runtime.__all__  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    return getattr(runtime, name)


def __dir__() -> list[str]:
    return dir(runtime)
