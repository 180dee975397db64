"""The settings of `suite=gpu`; mirrors `gpu:` in conf/bench.yaml."""

from dataclasses import dataclass, field

from runtime.config import require

MODEL_TYPE = "mixtral"


@dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """Mixtral with random bf16 weights in host memory, and a device of which little may be used.

    `device` is torch's name of it, `cpu` for trying out. `num_layers`: null takes as many as fit beside the copy that
    accelerate gets, up to the published 32. `shape` changes other keys of transformers' MixtralConfig. No measurement
    begins that took longer than there is left of `minutes`."""

    device: str = "cuda"
    device_memory_gib: float = 16.0
    num_layers: int | None = None
    shape: dict[str, int] = field(default_factory=dict)
    num_prompts: int = 256
    num_new_tokens: int = 8
    minutes: float = 8.0

    def __post_init__(self) -> None:
        for key in ("num_layers", "num_prompts", "num_new_tokens"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"gpu.{key} must be 1 or more, got {value}")
        require(
            self.num_new_tokens >= 2,
            f"gpu.num_new_tokens must be 2 or more to time decoding, got {self.num_new_tokens}",
        )
        for key in ("device_memory_gib", "minutes"):
            require(getattr(self, key) > 0, f"gpu.{key} must be above 0, got {getattr(self, key)}")
        require("num_hidden_layers" not in self.shape, "gpu.shape.num_hidden_layers: set gpu.num_layers")
