"""Sizes of a store that nobody has written are those of the store."""

from pathlib import Path

import pytest
import torch

from jobs.packing.config import PackConfig, SourceConfig
from jobs.packing.packing import pack
from jobs.planning.config import Packed
from jobs.planning.packed_shapes import as_packed
from runtime.config import ModelConfig
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
    pack(PackConfig(model=SourceConfig(path=str(published)), out=str(tmp_path / "store")), lambda *_: None)
    planned, stored = as_packed(shape_of(published, tmp_path), packed), shape_of(tmp_path / "store", tmp_path)
    assert planned.weight_bytes == pytest.approx(stored.weight_bytes, rel=0.01)
    assert planned.weight_bytes < 0.8 * shape_of(published, tmp_path).weight_bytes
    for mine, theirs in zip(planned.stages, stored.stages, strict=True):
        assert mine.num_bytes == pytest.approx(theirs.num_bytes, rel=0.01)
        assert mine.flops_per_token == theirs.flops_per_token
