"""The settings of `jobs.bench`; mirrors conf/bench.yaml."""

from dataclasses import dataclass, field
from enum import Enum

from runtime.config import ModelConfig, require

from ..config import LogLevel


class Contender(Enum):
    """`nvme`, `cpu`, `none` are Millrace with that tier; `read` and `plain_read` read without computing. `memory_read`
    reads memory, and `attention_...` is decode attention over KV of that type in it, without a model."""

    nvme = "nvme"
    cpu = "cpu"
    none = "none"
    transformers = "transformers"
    accelerate = "accelerate"
    read = "read"
    plain_read = "plain_read"
    memory_read = "memory_read"
    attention_float32 = "attention_float32"
    attention_bfloat16 = "attention_bfloat16"
    attention_float16 = "attention_float16"
    attention_torch = "attention_torch"  # float32, in torch operators


PEERS = (Contender.transformers, Contender.accelerate)


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Prompts are random ids, their lengths log-normal (median 60) within 16..256. All contenders get the same."""

    model: ModelConfig = field(default_factory=ModelConfig)
    contenders: list[Contender] = field(default_factory=lambda: [Contender.nvme, Contender.none])
    num_prompts: int = 64
    num_new_tokens: int = 32
    rounds: int = 3
    batch_size: int = 16
    micro_batch_size: int = 64
    weight_share: float = 0.25
    num_threads: int = 2
    name: str = "bench"
    output_root: str = "outputs"
    log_level: LogLevel = LogLevel.warning

    def __post_init__(self) -> None:
        for key in ("num_prompts", "num_new_tokens", "rounds", "batch_size", "micro_batch_size", "num_threads"):
            require(getattr(self, key) >= 1, f"{key} must be 1 or more, got {getattr(self, key)}")
        require(bool(self.contenders), "contenders is empty: name at least one")
        require(self.weight_share > 0, f"weight_share must be above 0, got {self.weight_share}")
