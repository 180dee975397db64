"""Millrace's engine as a library: `from runtime import Runtime, RuntimeConfig`. Importing it loads torch only on
first use."""

from typing import TYPE_CHECKING

from .config import (
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PrefetchConfig,
    RuntimeConfig,
    SamplingConfig,
)

if TYPE_CHECKING:
    from .api import Rejected, Runtime
    from .engine.sequence import Completion, Request

__all__ = [
    "Completion", "MachineConfig", "ModelConfig", "OffloadConfig", "PolicyConfig", "PrefetchConfig", "Rejected",
    "Request", "Runtime", "RuntimeConfig", "SamplingConfig",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in ("Runtime", "Rejected"):
        from . import api

        return getattr(api, name)
    if name in ("Completion", "Request"):
        from .engine import sequence

        return getattr(sequence, name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
