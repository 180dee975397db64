"""Millrace's engine as a library: `from runtime import Runtime, RuntimeConfig`. Importing it loads torch only on
first use."""

from typing import TYPE_CHECKING

from .config import (
    Admission,
    Attention,
    DType,
    ExpertPaging,
    KVConfig,
    KVTier,
    Lanes,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    Order,
    PolicyConfig,
    PolicyKind,
    Prefetch,
    PrefetchConfig,
    RuntimeConfig,
    SamplingConfig,
    SamplingOverrides,
    SelfCheck,
    Tier,
    Verify,
)

if TYPE_CHECKING:
    from .api import Runtime
    from .engine.requests import Rejected
    from .engine.sequence import Completion, FinishReason, Request

    __version__: str

__all__ = [
    "Admission", "Attention", "Completion", "DType", "ExpertPaging", "FinishReason", "KVConfig", "KVTier", "Lanes",
    "MachineConfig", "ModelConfig", "OffloadConfig", "Order", "PolicyConfig", "PolicyKind", "Prefetch",
    "PrefetchConfig", "Rejected", "Request", "Runtime", "RuntimeConfig", "SamplingConfig", "SamplingOverrides",
    "SelfCheck", "Tier", "Verify",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "Runtime":
        from .api import Runtime

        return Runtime
    if name == "Rejected":
        from .engine.requests import Rejected

        return Rejected
    if name in ("Completion", "FinishReason", "Request"):
        from .engine import sequence

        return getattr(sequence, name)
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")


def _version() -> str:
    """That of pyproject.toml, as it was installed; `unknown` where these files are run without being installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("millrace")
    except PackageNotFoundError:
        return "unknown"
