"""Settings of `jobs.evaluate`; conf/evaluate.yaml mirrors them."""

from dataclasses import dataclass, field, fields
from pathlib import Path

from runtime.config.settings import Parallelism
from runtime.errors import require

from ..config.settings import GenerateConfig, semantic
from ..datasets.config import DatasetConfig
from ..files.publishing import json_digest

UNNAMED_KEYS = frozenset({"bootstrap_iters", "confirm_run_unsafe_code", "include_path"})  # do not change requests


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
        why = "harness.fewshot_as_multiturn needs harness.apply_chat_template=true"
        require(is_chat or not self.fewshot_as_multiturn, why)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(GenerateConfig):
    """All settings of `jobs.evaluate`; mirrors conf/evaluate.yaml. Tasks override what `sampling` sets."""

    tasks: list[str] = field(default_factory=list)
    harness: HarnessConfig = field(default_factory=HarnessConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        way, unsupported = self.devices.way, "is not supported by weightstream evaluate"
        require(way is Parallelism.one, f"devices={way.value} {unsupported}: set devices=one")
        require(bool(self.tasks), "tasks is not set: names of harness tasks, e.g. tasks=[gsm8k,hellaswag]")
        require(self.dataset == DatasetConfig(), f"dataset {unsupported}: leave it out, tasks have their own data")
        require(self.shard.count == 1, f"shard {unsupported}: start a job for each subset of tasks")
        require(self.out is None, f"out {unsupported}: leave it out, results.json is in the evaluation's directory")
        require(self.output_url is None, f"output_url {unsupported}: leave it out, results are in output_root")
        require(self.sampling.n == 1, f"sampling.n={self.sampling.n} {unsupported}: tasks set the number of samples")


def to_generate_config(config: GenerateConfig) -> GenerateConfig:
    """The settings of `config` without those of the evaluation itself."""
    return GenerateConfig(**{field.name: getattr(config, field.name) for field in fields(GenerateConfig)})


def evaluation_directory(config: EvaluateConfig) -> Path:
    """The output directory: named `run`, or after model, tasks and all settings that can change requests or answers."""
    harness = {f"harness.{key}": value for key, value in vars(config.harness).items() if key not in UNNAMED_KEYS}
    model = Path(config.model.path or "hf").name if config.model.name == "hf" else config.model.name
    digest = json_digest({**semantic(to_generate_config(config)), **harness, "tasks": list(config.tasks)})
    name = config.run or f"{model}-{'-'.join(config.tasks)[:80]}-{digest[:10]}"
    return Path(config.output_root) / "evaluate" / name
