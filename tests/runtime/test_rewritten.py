"""Loaded weights that a class's own initialisation overwrites are found, and set as transformers sets them."""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from runtime.errors import ConfigError
from runtime.probing.meta import build_meta_model, zeroed_rows
from tests.tiny_configs import tiny_config


@pytest.mark.parametrize(("name", "rows"), [("youtu", {"model.embed_tokens.weight": (3,)}), ("llama", {}), ("t5", {})])
def test_rows_that_are_zero_whatever_the_checkpoint_holds(name: str, rows: dict[str, tuple[int, ...]]) -> None:
    config = tiny_config(name)
    config.pad_token_id = 3
    model = build_meta_model(config, torch.float32)
    assert zeroed_rows(model) == rows
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("spoils", [lambda w: w[0].fill_(1), lambda w: w[:2].zero_(), lambda w: w.mul_(2)])
def test_any_other_way_is_refused(spoils: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def initialise(self: LlamaForCausalLM, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            assert callable(spoils)
            spoils(module.weight)

    model = build_meta_model(tiny_config("llama"), torch.float32)
    monkeypatch.setattr(LlamaForCausalLM.__mro__[1], "_init_weights", initialise, raising=False)
    with pytest.raises(ConfigError, match=r"overwrites loaded weights .*embed_tokens"):
        zeroed_rows(model)
