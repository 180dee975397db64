"""The settings of `suite=gpu`; mirrors `gpu:` in conf/bench.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.config.settings import require


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """A published model. `shape`: keys of its config that differ from transformers' defaults for `model_type`."""

    title: str
    model_type: str
    num_layers: int
    shape: Mapping[str, int] = field(default_factory=dict)


MODELS: Mapping[str, GpuModel] = {
    "mixtral": GpuModel(title="Mixtral 8x7B", model_type="mixtral", num_layers=32),
    "llama": GpuModel(
        title="Llama 3.3 70B",
        model_type="llama",
        num_layers=80,
        shape={
            "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 128256,
        },
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """Settings of `suite=gpu`, explained in conf/bench.yaml."""

    device: str = "cuda"
    model: str = "mixtral"
    device_memory_gib: float = 16.0
    num_layers: int | None = None
    shape: dict[str, int] = field(default_factory=dict)
    num_prompts: int = 256
    num_new_tokens: int = 8
    minutes: float = 8.0

    def __post_init__(self) -> None:
        require(self.model in MODELS, f"gpu.model must be one of {', '.join(MODELS)}, got {self.model!r}")
        for key in ("num_layers", "num_prompts", "num_new_tokens"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"gpu.{key} must be 1 or more, got {value}")
        require(
            self.num_new_tokens >= 2,
            f"gpu.num_new_tokens must be 2 or more to time decoding, got {self.num_new_tokens}",
        )
        for key in ("device_memory_gib", "minutes"):
            require(getattr(self, key) > 0, f"gpu.{key} must be above 0, got {getattr(self, key)}")
        require("num_hidden_layers" not in self.shape, "gpu.shape.num_hidden_layers: set gpu.num_layers instead")
