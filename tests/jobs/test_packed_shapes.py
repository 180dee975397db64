"""Sizes of a store that nobody has written are those of the store, and those of a checkpoint that others publish."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from jobs.packing.config import Format, PackConfig, SourceConfig
from jobs.packing.packing import pack
from jobs.planning.config import FORMATS, PackedFormat
from jobs.planning.packed_shapes import Publication, packed_shape, published_shape, shape_in_format
from jobs.planning.published import GGUF, PUBLISHED
from jobs.planning.shapes import read_shape
from runtime.config.settings import DType, ModelConfig, Quantize
from runtime.errors import ConfigError
from runtime.formats import registry
from runtime.linear.packed_rows import FORMAT_NAMES
from runtime.linear.window4_rows import WINDOW4
from runtime.model.loading import load_model
from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.rank_shares import tensor_parallel_shape
from runtime.store.gguf import BLOCKS
from tests import published_formats
from tests.dealt import with_slow_others
from tests.published_formats import write_published
from tests.quantized import write_fp8, write_mxfp4
from tests.support import synthesize

SIZES = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_attention_heads": 4, "vocab_size": 640}


@pytest.fixture(scope="module", params=["llama, tied", "mixtral"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(request.param, tmp_path_factory.mktemp("published") / "model", **SIZES)


def shape_of(directory: Path, cache: Path) -> ModelShape:
    return load_model(ModelConfig(name="test", path=str(directory)), torch.device("cpu"), str(cache)).shape


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("packed", PackedFormat)
def test_a_packed_store_has_the_bytes_that_a_plan_counts(packed: PackedFormat, published: Path, tmp_path: Path) -> None:
    source, store = SourceConfig(path=str(published)), tmp_path / "store"
    pack(PackConfig(model=source, out=str(store), format=Format[packed.value]), lambda *_: None)
    planned, stored = packed_shape(shape_of(published, tmp_path), packed), shape_of(store, tmp_path)
    assert planned.weight_bytes == pytest.approx(stored.weight_bytes, rel=0.01)
    assert planned.weight_bytes < 0.8 * shape_of(published, tmp_path).weight_bytes
    for mine, theirs in zip(planned.stages, stored.stages, strict=True):
        assert mine.num_bytes == pytest.approx(theirs.num_bytes, rel=0.01)
        assert mine.flops_per_token == theirs.flops_per_token


@pytest.mark.parametrize("quantize", Quantize)
def test_weights_that_are_rounded_while_they_are_read_have_the_bytes_that_a_plan_counts(
    quantize: Quantize, published: Path, tmp_path: Path
) -> None:
    planned = packed_shape(shape_of(published, tmp_path), quantize)
    config = ModelConfig(name="test", path=str(published), quantize=quantize)
    assert planned.weight_bytes == load_model(config, torch.device("cpu"), str(tmp_path)).shape.weight_bytes


GROUP = 128  # columns, of GPTQ, AWQ and compressed-tensors as they are published
WRITTEN = {
    "gptq": "gptq",
    "gptq-int8": "gptq, desc_act, 8 bits",
    "awq": "awq",
    "nf4": "bitsandbytes nf4",
    "llm-int8": "bitsandbytes int8",
    "pack-quantized": "pack-quantized",
    "packed-int8": "pack-quantized, 8 bits of rows",
    "int-quantized": "int-quantized",
    "float-quantized": "float-quantized, rows",
    "mxfp4-pack-quantized": "mxfp4-pack-quantized",
    "nvfp4-pack-quantized": "nvfp4-pack-quantized",
    "nvfp4-modelopt": "modelopt nvfp4",
}


def formats_of(shape: ModelShape) -> dict[str, str]:
    """The format of each parameter by its name and stage."""
    parameters = [(f"{stage.name} {p.name}", p) for stage in shape.stages for p in stage.parameters]
    return {name: p.pieces[0][0].format for name, p in parameters}


def require_alike(planned: ModelShape, stored: ModelShape, tolerance: float) -> None:
    assert formats_of(planned) == formats_of(stored)
    assert planned.weight_bytes == pytest.approx(stored.weight_bytes, rel=tolerance)
    for mine, theirs in zip(planned.stages, stored.stages, strict=True):
        assert mine.num_bytes == pytest.approx(theirs.num_bytes, rel=tolerance)
        assert mine.flops_per_token == theirs.flops_per_token


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("name", with_slow_others(WRITTEN, [*WRITTEN][::3]))
def test_a_published_checkpoint_has_the_formats_and_bytes_that_a_plan_counts(
    name: str, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of nf4's codes, and each column's group where GPTQ has an order of its own, are much of so small ones."""
    monkeypatch.setattr(published_formats, "WIDTH", GROUP)
    quantised, _ = write_published(published, tmp_path, published_formats.PUBLISHED[WRITTEN[name]])
    tolerance = 0.025 if name in ("nf4", "gptq-int8") else 0.01
    require_alike(shape_in_format(shape_of(published, tmp_path), name), shape_of(quantised, tmp_path), tolerance)


OWN: dict[str, tuple[str, Callable[[Path, Path], tuple[Path, Path]]]] = {
    "gpt-oss": ("mxfp4", write_mxfp4),
    "deepseek-v3": ("fp8-blocks", partial(write_fp8, block=(128, 128))),
}


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", OWN)
def test_a_family_that_is_published_in_fewer_bytes_has_those_that_a_plan_counts(family: str, tmp_path: Path) -> None:
    name, write = OWN[family]
    sizes = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 640}
    source = synthesize(family, tmp_path / "model", **sizes)
    quantised, _ = write(source, tmp_path)
    require_alike(shape_in_format(shape_of(source, tmp_path), name), shape_of(quantised, tmp_path), 0.01)


def test_gpt_oss_120b_is_planned_in_the_bytes_that_it_is_published_in() -> None:
    layers, experts, hidden = 36, 128, 2880
    in_mxfp4 = layers * experts * 3 * hidden * hidden
    attention = 2 * 64 * 64 * hidden + 2 * 8 * 64 * hidden + (64 * 64 + 2 * 8 * 64 + hidden + 64)
    router, biases, norms = experts * hidden + experts, experts * 3 * hidden, 2 * hidden
    in_16_bits = layers * (attention + router + biases + norms) + hidden + 2 * 201088 * hidden
    shape = read_shape("gpt-oss-120b", DType.bfloat16)
    assert shape.weight_bytes == in_mxfp4 // 2 + in_mxfp4 // 32 + 2 * in_16_bits
    assert round(shape.weight_bytes / 1e9, 1) == 65.2
    assert read_shape("gpt-oss-120b", DType.bfloat16, is_plain=True).weight_bytes == 2 * (in_mxfp4 + in_16_bits)


def test_deepseek_v3_is_planned_in_the_bytes_that_it_is_published_in() -> None:
    hidden, heads, latent, query = 7168, 128, 512, 1536
    attention = (
        hidden * query + query * heads * 192 + hidden * (latent + 64) + latent * heads * 256 + heads * 128 * hidden
    )
    in_fp8 = 61 * attention + 3 * 3 * hidden * 18432 + 58 * 257 * 3 * hidden * 2048
    in_16_bits = 2 * 129280 * hidden + 58 * 256 * hidden + 61 * (2 * hidden + query + latent) + hidden
    shape = read_shape("deepseek-v3", DType.bfloat16)
    by_hand = in_fp8 + 4 * in_fp8 / 128**2 + 2 * in_16_bits + 4 * 58 * 256
    assert shape.weight_bytes == pytest.approx(by_hand, rel=1e-5)


def test_a_70b_is_planned_in_the_bytes_of_its_gptq_checkpoint() -> None:
    layers, hidden, inner, keys = 80, 8192, 28672, 1024
    rows_columns = [*2 * [(hidden, hidden)], *2 * [(keys, hidden)], *2 * [(inner, hidden)], (hidden, inner)]
    words = sum(rows * columns // 2 for rows, columns in rows_columns)
    scales = sum(2 * rows * columns // 128 for rows, columns in rows_columns)
    zeros = sum(rows * columns // 128 // 2 for rows, columns in rows_columns)
    groups = sum(4 * columns for _, columns in rows_columns)
    in_16_bits = 2 * 128256 * hidden + (2 * layers + 1) * hidden
    by_hand = layers * (words + scales + zeros + groups) + 2 * in_16_bits
    plain = read_shape("llama-3.3-70b", DType.bfloat16)
    assert shape_in_format(plain, "gptq").weight_bytes == pytest.approx(by_hand, rel=0.01)
    assert formats_of(shape_in_format(plain, "gptq")) == formats_of(shape_in_format(plain, "gptq-int4"))


def test_gguf_stores_embeddings_and_head_too_and_takes_smaller_blocks_where_a_row_has_no_whole_ones() -> None:
    plain = read_shape("llama-3.3-70b", DType.bfloat16)
    vectors = sum(p.num_bytes for stage in plain.stages for p in stage.parameters if len(p.shape) == 1)
    expected = (plain.weight_bytes - vectors) / 2 * 144 / 256 + vectors
    assert shape_in_format(plain, "Q4_K").weight_bytes == pytest.approx(expected, rel=1e-6)
    in_blocks = formats_of(shape_in_format(read_shape("gpt-oss-20b", DType.bfloat16, is_plain=True), "Q4_K"))
    assert in_blocks["embedding model.embed_tokens.weight"] == "Q5_0"  # of 2,880 numbers
    assert in_blocks["layer 0 model.layers.*.self_attn.o_proj.weight"] == "Q4_K"  # of 4,096
    assert in_blocks["layer 0 model.layers.*.mlp.router.weight"] == ""


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in GGUF])
def test_embeddings_head_routers_and_vectors_stay_as_they_are(name: str) -> None:
    plain = read_shape("qwen3-30b-a3b", DType.bfloat16)
    found = formats_of(shape_in_format(plain, name))
    kept = {key.split("layer 0 ")[-1] for key, storage in found.items() if not storage and "layer 1" not in key}
    kept = {key for key in kept if not key.startswith("layer ")}
    attention = {f"model.layers.*.self_attn.{each}_proj.weight" for each in "qkvo"} if name == "mxfp4" else set[str]()
    of_layers = {"mlp.gate", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"}
    ends = {"embedding model.embed_tokens.weight", "head model.norm.weight", "head lm_head.weight"}
    assert kept == {f"model.layers.*.{each}.weight" for each in of_layers} | attention | ends


def test_ranks_read_all_words_of_a_matrix_whose_rows_do_not_lie_apart_and_so_take_experts_whole() -> None:
    llama = shape_in_format(read_shape("llama-3.3-70b", DType.bfloat16), "gptq")
    own = tensor_parallel_shape(llama, 2)
    assert own.stages[1].num_bytes == pytest.approx(llama.stages[1].num_bytes, rel=1e-3)
    assert own.stages[1].flops_per_token == llama.stages[1].flops_per_token / 2
    mixture = shape_in_format(read_shape("qwen3-30b-a3b", DType.bfloat16), "awq")
    experts, own_experts = (
        sum(p.num_bytes for p in shape.stages[1].parameters if p.is_experts)
        for shape in (mixture, tensor_parallel_shape(mixture, 2))
    )
    assert own_experts == experts / 2


def test_a_dense_model_has_no_experts_to_store() -> None:
    with pytest.raises(
        ConfigError, match=r"plan\.format=mxfp4 fits no tensor of model=llama-3\.1-8b.*mxfp4-pack-quantized"
    ):
        shape_in_format(read_shape("llama-3.1-8b", DType.bfloat16), "mxfp4")


def test_modules_that_a_config_leaves_out_stay_as_they_are() -> None:
    shape = read_shape("llama-3.2-1b", DType.bfloat16)
    said = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.*.self_attn", "down_proj"]}
    found = formats_of(published_shape(shape, Publication.from_config(said)))
    stored = {name.split(".*.")[-1] for name, storage in found.items() if storage}
    assert stored == {"mlp.gate_proj.weight", "mlp.up_proj.weight"}
    with pytest.raises(ConfigError, match="unknown quant_method 'quip' with 4 bits; known: mxfp4, fp8, gptq, awq"):
        Publication.from_config({"quant_method": "quip"})


def test_experts_may_be_published_in_another_format_than_the_rest() -> None:
    """As DeepSeek-V4: FP8, and experts in MXFP4."""
    shape = read_shape("qwen3-30b-a3b", DType.bfloat16)
    said = {"quant_method": "fp8", "expert_dtype": "fp4"}
    found = formats_of(published_shape(shape, Publication.from_config(said)))
    assert {found[name] for name in found if ".experts." in name} == {"mxfp4"}
    assert found["layer 0 model.layers.*.self_attn.q_proj.weight"] == "fp8"
    assert not any(found[name] for name in found if "embed_tokens" in name)


def test_groups_take_the_scales_that_a_config_says() -> None:
    """As Kimi-K2.6: compressed-tensors, experts only, a scale of 16 bits for 32 columns."""
    shape = read_shape("qwen3-30b-a3b", DType.bfloat16)
    weights = {"num_bits": 4, "group_size": 32}
    said = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*self_attn.*", "lm_head"],
        "config_groups": {"group_0": {"weights": weights}},
    }  # fmt: skip
    published = published_shape(shape, Publication.from_config(said))
    found = formats_of(published)
    assert {found[name] for name in found if ".experts." in name} == {"packed-int4"}
    assert not found["layer 0 model.layers.*.self_attn.q_proj.weight"]
    experts = [p for stage in published.stages for p in stage.parameters if p.is_experts]
    assert all(p.num_bytes == p.num_elements * (4 + 16 / 32) / 8 for p in experts)


def test_every_storage_format_that_can_be_read_can_be_planned() -> None:
    plain = {name for name, block in BLOCKS.items() if block.num_numbers == 1}
    assert {*PUBLISHED.values(), *FORMAT_NAMES.values(), WINDOW4} == set(registry.FORMATS) - plain
    assert len(set(FORMATS)) == len(FORMATS)
