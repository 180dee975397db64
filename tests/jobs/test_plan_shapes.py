"""Sizes of named models that are read from a file are those that transformers gives."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

from jobs.planning.named import architecture_digest, architectures, make_row
from jobs.planning.shapes import HOST_FIELDS, RUN_FIELDS, from_row, read_rows, read_shape
from runtime.config.settings import DType, KVDType, ModelConfig, OffloadConfig, RuntimeConfig, Tier
from runtime.errors import ConfigError
from runtime.model.families import FAMILIES
from runtime.model.loading import load_model
from runtime.plan.placement.placement import Budgets
from runtime.plan.planner import plan_run
from runtime.plan.shape.dtypes import with_kv_dtype
from runtime.plan.shape.extents import ALIGNMENT_BYTES
from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.shapes import StageKind
from runtime.units import GIB
from tests.dealt import with_slow_others
from tests.support import synthesize
from tests.toy import sizes_of

MODELS = sorted((Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))
NAMED = [path.stem for path in MODELS if path.stem != "hf"]
REMADE = ["gpt2", "llama-3.2-1b"]  # the quick ones; every other line is held by the digest of its architecture
TINY = ["llama, tied", "mixtral", "gpt2", "deepseek-v2", "flan-t5", "qwen3-next", "dbrx", "bloom"]


@dataclass(frozen=True, kw_only=True)
class Both:
    loaded: ModelShape
    read: ModelShape


@pytest.fixture(scope="module", params=with_slow_others(TINY, TINY[::2]))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """A family's shape as transformers gives it for a checkpoint, and as it is read back from a line."""
    directory = synthesize(request.param, tmp_path_factory.mktemp("checkpoint"))
    config = ModelConfig(name="tiny", path=str(directory), dtype=DType.float32)
    loaded = load_model(config, torch.device("cpu"), str(directory)).shape
    family = FAMILIES[request.param]
    row = make_row("tiny", {"model_type": family.model_type, **family.overrides})
    return Both(loaded=loaded, read=from_row(json.loads(json.dumps(row)), DType.float32))


def test_weights_have_the_same_bytes_stage_by_stage(both: Both) -> None:
    assert both.read.weight_bytes == both.loaded.weight_bytes
    assert [stage.num_bytes for stage in both.read.stages] == [stage.num_bytes for stage in both.loaded.stages]
    assert [stage.dense.num_bytes for stage in both.read.stages] == [s.dense.num_bytes for s in both.loaded.stages]


def test_stages_are_the_same(both: Both) -> None:
    def facts(shape: ModelShape) -> list[tuple[str, StageKind, int, int]]:
        return [(s.name, s.kind, s.num_experts, s.num_experts_per_token) for s in shape.stages]

    assert facts(both.read) == facts(both.loaded)


def test_tokens_take_the_same_flops_in_each_stage(both: Both) -> None:
    assert [s.flops_per_token for s in both.read.stages] == [s.flops_per_token for s in both.loaded.stages]


def test_all_other_sizes_are_the_same(both: Both) -> None:
    def sizes(shape: ModelShape) -> dict[str, object]:
        return {
            f.name: getattr(shape, f.name) for f in fields(shape) if f.name not in ("stages", *RUN_FIELDS, *HOST_FIELDS)
        }

    assert sizes(both.read) == sizes(both.loaded)


@pytest.mark.parametrize("dtype", [KVDType.float8, KVDType.int8, KVDType.int4])
def test_kept_in_fewer_bytes_keys_and_values_take_as_many(both: Both, dtype: KVDType) -> None:
    """Of a loaded model the heads were looked at, of a line they follow from its bytes; what the one refuses the other
    refuses."""

    def kept(shape: ModelShape) -> tuple[tuple[int, ...], int] | str:
        try:
            found = with_kv_dtype(shape, dtype)
        except ConfigError as error:
            return str(error)
        return found.kv_layer_bytes, found.kv_tail_bytes_per_sequence

    assert kept(both.read) == kept(both.loaded)


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("budgets", [Budgets(host_bytes=GIB), Budgets(host_bytes=GIB, device_bytes=GIB)])
def test_ledgers_are_the_same_but_for_the_edges_of_tensors(both: Both, tier: Tier, budgets: Budgets) -> None:
    """Where a tensor lies in its file moves the aligned extent around it by a block at each end."""
    config = RuntimeConfig(offload=OffloadConfig(tier=tier, resident_layers=None if tier is Tier.none else 1))
    sizes = sizes_of([9, 40, 7, 22])
    read, loaded = (plan_run(shape, config, budgets, sizes).placement for shape in (both.read, both.loaded))
    assert read.resident == loaded.resident
    edges = 2 * ALIGNMENT_BYTES * sum(len(p.slices) for stage in both.loaded.stages for p in stage.parameters)
    for mine, theirs in zip(read.ledgers, loaded.ledgers, strict=True):
        assert [entry.name for entry in mine.entries] == [entry.name for entry in theirs.entries]
        for entry, other in zip(mine.entries, theirs.entries, strict=True):
            assert entry.num_bytes == pytest.approx(other.num_bytes, abs=edges)


def test_narrow_dtypes_cache_half_the_bytes() -> None:
    narrow, wide = read_shape("mixtral", DType.float16), read_shape("mixtral", DType.float32)
    assert (narrow.compute_dtype_bytes, wide.compute_dtype_bytes) == (2, 4)
    assert 2 * narrow.kv_bytes_per_token == wide.kv_bytes_per_token
    assert narrow.weight_bytes == wide.weight_bytes


@pytest.mark.dealt(most=6)
@pytest.mark.parametrize("name", NAMED)
def test_every_architecture_has_a_line_made_from_it(name: str) -> None:
    assert read_rows()[name]["architecture"] == architecture_digest(architectures()[name])


def test_no_line_is_of_a_model_that_is_gone() -> None:
    assert list(read_rows()) == NAMED


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("name", REMADE)
def test_lines_are_what_transformers_makes_today(name: str) -> None:
    assert make_row(name, architectures()[name]) == read_rows()[name]


def test_a_model_without_a_line_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model=hf has no stored sizes to plan with; models with sizes: .*mixtral"):
        read_shape("hf", DType.bfloat16)
