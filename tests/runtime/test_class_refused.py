"""What a stranger's class raises leaves as one line that names it; our own errors and mistakes are not disguised."""

import json
from pathlib import Path

import pytest
import torch

from runtime.checkpoint_source.download import as_config_error
from runtime.config.settings import ModelConfig
from runtime.errors import BudgetError, ConfigError
from runtime.linear.blocks import dequantize_rows
from runtime.model import loading
from runtime.plan.placement.experts import expected_hits
from runtime.probing.layer_lists import layer_lists
from runtime.probing.meta import build_meta_model
from tests.support import synthesize
from tests.tiny_configs import tiny_config


@pytest.mark.parametrize(
    "error", [TypeError("no\nimage"), KeyError("x"), ZeroDivisionError("by"), RuntimeError("meta")]
)
def test_what_a_class_raises_is_a_refusal_that_names_it(error: Exception) -> None:
    with (
        pytest.raises(ConfigError, match=f"Strange is not supported: its code raised {type(error).__name__}") as found,
        as_config_error("Strange"),
    ):
        raise error
    assert "\n" not in str(found.value)
    assert found.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [BudgetError("too much"), AssertionError("ours"), MemoryError(), OSError("disk"), RuntimeError("out of memory")],
)
def test_our_own_errors_memory_and_disks_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as found, as_config_error("Strange"):
        raise error
    assert found.value is error


def test_what_our_own_code_raises_is_not_called_the_class_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = synthesize("llama", tmp_path / "model")
    monkeypatch.setattr(loading, "measure_cache", expected_hits)  # called with arguments that it does not take
    with pytest.raises(TypeError):
        loading.load_model(ModelConfig(name="llama", path=str(directory)), torch.device("cpu"), str(tmp_path))


def test_what_a_class_asks_of_our_stand_ins_in_vain_is_not_called_its_code() -> None:
    block = torch.zeros(2, 2)
    with (
        pytest.raises(ConfigError, match=r"replacement of a module \(blocks\.py\) raised IndexError"),
        as_config_error("Strange"),
    ):
        dequantize_rows(block, torch.float32, torch.tensor([5]))  # raised by torch, which ours called


def test_a_config_that_sends_a_token_to_more_experts_than_there_are_is_refused(tmp_path: Path) -> None:
    directory = synthesize("mixtral", tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 5}))
    with pytest.raises(ConfigError, match="num_experts_per_tok=5, but layers have 4 experts"):
        loading.load_model(ModelConfig(name="mixtral", path=str(directory)), torch.device("cpu"), str(tmp_path))


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("biogpt", ["biogpt.layers"]),
        ("openai-gpt", ["transformer.h"]),
        ("pegasus", ["model.encoder.layers", "model.decoder.layers"]),
        ("gemma3", ["model.language_model.layers"]),
        ("git", ["git.encoder.layer"]),
        ("modernbert-decoder", ["model.layers"]),
    ],
)
def test_layers_are_found_in_the_decoder_of_any_class(name: str, paths: list[str]) -> None:
    config = tiny_config(name)
    if name == "git":
        config.num_hidden_layers = 1  # fewer weights than its tower has
    assert [found.path for found in layer_lists(build_meta_model(config, torch.float32))] == paths


def test_layers_that_lie_in_several_lists_are_refused() -> None:
    model = build_meta_model(tiny_config("xlm"), torch.float32)
    with pytest.raises(ConfigError, match=r"spreads its layers over transformer\.attentions and transformer\.ffns"):
        layer_lists(model)
