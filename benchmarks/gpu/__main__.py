"""`python -m benchmarks.gpu`: runs `suite=gpu` without hydra, omegaconf, datasets and pyarrow.

Takes settings of `gpu:` in conf/bench.yaml, such as `gpu.minutes=4`. `toy` runs a small model with the same code in a
minute or two.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jobs.config.typed import build
from runtime.errors import ConfigError, WeightstreamError, require

from .config import GpuConfig
from .suite import run_gpu

FOLDER = Path("outputs/gpu")
TOY_SHAPE: Mapping[str, int] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 4096,
}  # fmt: skip
TOY: Mapping[str, object] = {
    "num_layers": 6,
    "num_prompts": 16,
    "num_new_tokens": 4,
    "device_memory_gib": 2.0,
    "minutes": 4.0,
}
INTERRUPTED = 75  # exit code of interrupted commands


@dataclass(frozen=True, kw_only=True)
class GpuSettings:
    """The settings of conf/bench.yaml that `suite=gpu` uses."""

    gpu: GpuConfig = field(default_factory=GpuConfig)
    prompt_tokens: int = 60
    rounds: int = 1

    def __post_init__(self) -> None:
        for key in ("prompt_tokens", "rounds"):
            require(getattr(self, key) >= 1, f"{key} must be 1 or more, got {getattr(self, key)}")


def parse_settings(arguments: Sequence[str]) -> GpuSettings:
    """Settings from the command line. Raises ConfigError."""
    gpu, top_level = dict(TOY) if "toy" in arguments else {}, dict[str, object]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals and key != "toy":
            raise ConfigError(f"{argument}: expected `toy` or KEY=VALUE, such as gpu.minutes=4")
        if equals and key.startswith("gpu."):
            gpu[key.removeprefix("gpu.")] = _value(value)
        elif equals:
            top_level[key] = _value(value)
    if "toy" in arguments:
        experts = {"num_local_experts": 4} if gpu.get("model", "mixtral") == "mixtral" else {}
        gpu.setdefault("shape", {**TOY_SHAPE, **experts})
    return build(GpuSettings, {**top_level, "gpu": gpu})


def _value(value: str) -> object:
    """The value as JSON, or the word itself, as in `gpu.device=cuda:1`."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def main() -> None:
    try:
        settings = parse_settings(sys.argv[1:])
        measured = run_gpu(settings.gpu, settings.prompt_tokens, settings.rounds, _say)
    except WeightstreamError as error:
        _say(f"error: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _say("error: interrupted before the worker started measuring")
        sys.exit(INTERRUPTED)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "table.md").write_text(measured.table + "\n", encoding="utf-8")
    rounds = {name: [asdict(result) for result in results] for name, results in measured.rounds.items()}
    (FOLDER / "rounds.json").write_text(json.dumps(rounds), encoding="utf-8")
    sys.stdout.write(f"{measured.table}\n\nWritten to {FOLDER}/table.md and rounds.json.\n")
    if measured.is_interrupted:
        sys.exit(INTERRUPTED)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
