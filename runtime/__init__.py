"""Millrace's engine as a library: `from runtime import Runtime, RuntimeConfig`. Importing it loads torch only on
first use."""

from typing import TYPE_CHECKING

from .config import (
    Admission,
    Attention,
    Dequantize,
    DType,
    ExpertPaging,
    FeedForward,
    KVConfig,
    KVDType,
    KVTier,
    Lanes,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    Order,
    PolicyConfig,
    PolicyKind,
    Pooling,
    Prefetch,
    PrefetchConfig,
    Quantize,
    RuntimeConfig,
    SamplingConfig,
    SamplingOverrides,
    SelfCheck,
    SharePrefixes,
    Tier,
    Verify,
)

if TYPE_CHECKING:
    from .api import Runtime
    from .completions import CompletionStream, Result
    from .encoding import Classified, Embedded, Filled
    from .engine.requests import Rejected
    from .engine.sequence import Completion, FinishReason, Request
    from .prompt import Prompt, PromptLike
    from .scoring import Scored, ScoredDocument, Targets
    from .settings import Settings

    __version__: str

__all__ = [
    "Admission", "Attention", "Classified", "Completion", "CompletionStream", "DType", "Dequantize", "Embedded",
    "ExpertPaging", "FeedForward", "Filled", "FinishReason", "KVConfig", "KVDType", "KVTier", "Lanes",
    "MachineConfig", "ModelConfig", "OffloadConfig", "Order", "PolicyConfig", "PolicyKind", "Pooling", "Prefetch",
    "PrefetchConfig", "Prompt", "PromptLike", "Quantize", "Rejected", "Request", "Result", "Runtime",
    "RuntimeConfig", "SamplingConfig", "SamplingOverrides", "Scored", "ScoredDocument", "SelfCheck", "Settings",
    "SharePrefixes", "Targets", "Tier", "Verify",
]  # fmt: skip

LATER = {
    "Classified": "encoding",
    "Completion": "engine.sequence",
    "CompletionStream": "completions",
    "Embedded": "encoding",
    "Filled": "encoding",
    "FinishReason": "engine.sequence",
    "Prompt": "prompt",
    "PromptLike": "prompt",
    "Rejected": "engine.requests",
    "Request": "engine.sequence",
    "Result": "completions",
    "Runtime": "api",
    "Scored": "scoring",
    "ScoredDocument": "scoring",
    "Settings": "settings",
    "Targets": "scoring",
}  # by the module that is imported when the name is first used


def __getattr__(name: str) -> object:
    if name in LATER:
        from importlib import import_module

        return getattr(import_module(f".{LATER[name]}", __name__), name)
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
