"""Sizes of a store that nobody has written are those of the store."""

from pathlib import Path

import pytest
import torch

from jobs.packing.config import Format, PackConfig, SourceConfig
from jobs.packing.packing import pack
from jobs.planning.config import Packed
from jobs.planning.packed_shapes import as_packed
from runtime.config import ModelConfig, Quantize
from runtime.model.loading import load_model
from runtime.plan.shape.model import ModelShape
from tests.support import synthesize

SIZES = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_attention_heads": 4, "vocab_size": 640}


@pytest.fixture(scope="module", params=["llama, tied", "mixtral"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(request.param, tmp_path_factory.mktemp("published") / "model", **SIZES)


def shape_of(directory: Path, cache: Path) -> ModelShape:
    return load_model(ModelConfig(name="test", path=str(directory)), torch.device("cpu"), str(cache)).shape


@pytest.mark.parametrize("packed", Packed)
def test_a_packed_store_has_the_bytes_that_a_plan_counts(packed: Packed, published: Path, tmp_path: Path) -> None:
    source, store = SourceConfig(path=str(published)), tmp_path / "store"
    pack(PackConfig(model=source, out=str(store), format=Format[packed.value]), lambda *_: None)
    planned, stored = as_packed(shape_of(published, tmp_path), packed), shape_of(store, tmp_path)
    assert planned.weight_bytes == pytest.approx(stored.weight_bytes, rel=0.01)
    assert planned.weight_bytes < 0.8 * shape_of(published, tmp_path).weight_bytes
    for mine, theirs in zip(planned.stages, stored.stages, strict=True):
        assert mine.num_bytes == pytest.approx(theirs.num_bytes, rel=0.01)
        assert mine.flops_per_token == theirs.flops_per_token


@pytest.mark.parametrize("quantize", Quantize)
def test_weights_that_are_rounded_while_they_are_read_have_the_bytes_that_a_plan_counts(
    quantize: Quantize, published: Path, tmp_path: Path
) -> None:
    planned = as_packed(shape_of(published, tmp_path), quantize)
    config = ModelConfig(name="test", path=str(published), quantize=quantize)
    assert planned.weight_bytes == load_model(config, torch.device("cpu"), str(tmp_path)).shape.weight_bytes
