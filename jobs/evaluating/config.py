"""Settings of `jobs.evaluate`; conf/evaluate.yaml mirrors them."""

from dataclasses import dataclass, field

from runtime.config.settings import Parallelism
from runtime.errors import require

from ..config.settings import GenerateConfig
from ..datasets.config import DatasetConfig


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """Arguments of lm-evaluation-harness. `include_path`: directories with your own tasks. `limit`: documents per task,
    or a fraction if below 1; null: all."""

    include_path: list[str] = field(default_factory=list)
    num_fewshot: int | None = None
    limit: float | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = False
    system_instruction: str | None = None
    gen_kwargs: dict[str, object] | None = None
    bootstrap_iters: int = 100_000
    seed: int = 0
    fewshot_seed: int = 1234
    confirm_run_unsafe_code: bool = False

    def __post_init__(self) -> None:
        for key in ("num_fewshot", "bootstrap_iters"):
            value = getattr(self, key)
            require(value is None or value >= 0, f"harness.{key} must be 0 or more, got {value}")
        require(self.limit is None or self.limit > 0, f"harness.limit must be above 0, got {self.limit}")
        is_chat = self.apply_chat_template
        require(is_chat or not self.fewshot_as_multiturn, "harness.fewshot_as_multiturn needs apply_chat_template")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(GenerateConfig):
    """All settings of `jobs.evaluate`; mirrors conf/evaluate.yaml. Tasks override what `sampling` sets."""

    tasks: list[str] = field(default_factory=list)
    harness: HarnessConfig = field(default_factory=HarnessConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        way = self.devices.way
        require(way is Parallelism.one, f"devices={way.value} is not of jobs.evaluate as yet: take devices=one")
        require(bool(self.tasks), "tasks is not set: names of the harness's tasks, e.g. tasks=[gsm8k,hellaswag]")
        require(self.dataset == DatasetConfig(), "dataset has no meaning for an evaluation: tasks bring their own data")
        require(self.shard.count == 1, "shard has no meaning for an evaluation: give each job tasks of its own")
        require(self.output_url is None, "output_url has no meaning for an evaluation: its results lie in output_root")
        require(self.sampling.n == 1, f"sampling.n={self.sampling.n}: a task says by its repeats how often it asks")
