"""The Weightstream engine as a library: `from runtime import Runtime, RuntimeConfig`. The import does not load torch;
the first use of `Runtime` does. Modules directly in this folder are used by several packages below it."""

from typing import TYPE_CHECKING

from .config.settings import (
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
    from .library.api import Runtime
    from .library.encoding import Classified, Embedded, Filled
    from .library.generation import CompletionStream, Result
    from .library.keywords import Settings
    from .library.prompt import Prompt, PromptLike
    from .library.scoring import Scored, ScoredDocument, Targets
    from .requests.prompts import Rejected
    from .sequences.sequence import Completion, FinishReason, Request

    __version__: str

__all__ = [
    "Admission", "Attention", "Classified", "Completion", "CompletionStream", "DType", "Dequantize", "Embedded",
    "ExpertPaging", "FeedForward", "Filled", "FinishReason", "KVConfig", "KVDType", "KVTier", "Lanes",
    "MachineConfig", "ModelConfig", "OffloadConfig", "Order", "PolicyConfig", "PolicyKind", "Pooling", "Prefetch",
    "PrefetchConfig", "Prompt", "PromptLike", "Quantize", "Rejected", "Request", "Result", "Runtime",
    "RuntimeConfig", "SamplingConfig", "SamplingOverrides", "Scored", "ScoredDocument", "SelfCheck", "Settings",
    "SharePrefixes", "Targets", "Tier", "Verify",
]  # fmt: skip

LAZY_IMPORTS = {
    "Classified": "library.encoding",
    "Completion": "sequences.sequence",
    "CompletionStream": "library.generation",
    "Embedded": "library.encoding",
    "Filled": "library.encoding",
    "FinishReason": "sequences.sequence",
    "Prompt": "library.prompt",
    "PromptLike": "library.prompt",
    "Rejected": "requests.prompts",
    "Request": "sequences.sequence",
    "Result": "library.generation",
    "Runtime": "library.api",
    "Scored": "library.scoring",
    "ScoredDocument": "library.scoring",
    "Settings": "library.keywords",
    "Targets": "library.scoring",
}  # name -> module that is imported on first use


def __getattr__(name: str) -> object:
    if name in LAZY_IMPORTS:
        from importlib import import_module

        return getattr(import_module(f".{LAZY_IMPORTS[name]}", __name__), name)
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")


def _version() -> str:
    """The installed version from pyproject.toml; "unknown" if the package is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("weightstream")
    except PackageNotFoundError:
        return "unknown"
