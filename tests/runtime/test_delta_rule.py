"""A gated delta net takes no more than its ledger says, and not much less."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from runtime.config.settings import ModelConfig
from runtime.model.loading import load_model
from runtime.plan.placement.memory import lane_entries
from runtime.plan.shape.attention import DeltaRule
from tests.live_bytes import LiveBytes
from tests.support import synthesize
from tests.toy import sizes_of, toy_shape

RULE = DeltaRule(num_key_heads=2, num_heads=4, key_dim=16, value_dim=8)
SHAPES = [(2, 4, 16, 16), (2, 4, 128, 128), (4, 4, 64, 128)]


def test_rows_are_padded_to_whole_chunks() -> None:
    """By hand: 2 rows of 70 columns are 2 x 128; q, k and v of 4 heads; 5 states of 4 x 16 x 8 numbers a row."""
    padded = 2 * 128 * 4 * (7 * 16 + 4 * 8 + 4 * 64 + 8) * 4
    states = 5 * 2 * 4 * 16 * 8 * 4
    projected = 2 * 70 * (4 * 2 * 16 + 3 * 4 * 8) * 2
    assert RULE.num_bytes(2, 70, 2) == padded + states + projected
    assert RULE.num_bytes(64, 8, 4) > 7 * RULE.num_bytes(8, 64, 4)


@pytest.mark.dealt(most=10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(8, 64), (64, 8), (1, 512), (3, 70), (8, 1)])
@pytest.mark.parametrize(("key_heads", "heads", "key_dim", "value_dim"), SHAPES)
def test_a_layer_takes_no_more_than_is_counted(
    key_heads: int, heads: int, key_dim: int, value_dim: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    config = Qwen3NextConfig(
        hidden_size=64,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=key_heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
    )
    layer, cache, live = Qwen3NextGatedDeltaNet(config, 0).to(dtype), DynamicCache(config=config), LiveBytes()
    with torch.inference_mode():
        if columns == 1:  # a decode step
            layer(torch.randn(rows, 5, 64, dtype=dtype), cache_params=cache)
        x = torch.randn(rows, columns, 64, dtype=dtype)
        with live:
            layer(x, cache_params=cache)
    rule = DeltaRule(num_key_heads=key_heads, num_heads=heads, key_dim=key_dim, value_dim=value_dim)
    counted = rule.num_bytes(rows, columns, dtype.itemsize)
    assert live.peak <= counted
    assert columns == 1 or live.peak >= 0.75 * counted


def test_the_lane_with_most_padded_positions_is_counted() -> None:
    """Of 512 tokens in a pass, 64 rows have 8 columns each and are padded to 64."""
    shape = replace(toy_shape(is_packed=False), delta_rule=RULE)
    lanes = [sizes_of([300] * 2), sizes_of([300] * 64)]
    entries = {entry.name: entry.num_bytes for entry in lane_entries(shape, lanes, 512)}
    assert entries["delta rule"] == RULE.num_bytes(64, 8, 4)
    assert "delta rule" not in {entry.name for entry in lane_entries(toy_shape(), lanes, 512)}


def test_a_loaded_model_says_what_its_delta_nets_look_like(tmp_path: Path) -> None:
    config = ModelConfig(name="qwen3-next", path=str(synthesize("qwen3-next", tmp_path / "model")))
    shape = load_model(config, torch.device("cpu"), None).shape
    assert shape.delta_rule == DeltaRule(num_key_heads=2, num_heads=4, key_dim=16, value_dim=16)
