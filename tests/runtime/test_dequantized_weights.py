"""Stored weights in an accelerator's memory: dequantized once for all lanes, in few launches, to the numbers that
they stand for."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from jobs.packing.config import Format, PackConfig, SourceConfig
from jobs.packing.packing import pack
from runtime import Runtime
from runtime.config.settings import (
    Attention,
    Dequantize,
    DType,
    ExpertPaging,
    Order,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    Tier,
)
from runtime.engine import dequantized_weights
from runtime.formats.registry import pair_companions
from runtime.sequences.sequence import Request
from runtime.store.checkpoint import open_checkpoint
from runtime.synthesize.checkpoints import synthesize_checkpoint
from runtime.weights.stage_weights import load_tensor
from tests.dealt import with_slow_others
from tests.fake_device import FakeDevice
from tests.host_counts import HostCounts
from tests.published_formats import PUBLISHED, write_published
from tests.quantized import tensors_in, write_checkpoint, write_fp8, write_mxfp4
from tests.runtime.test_fidelity import config_for, tokens
from tests.runtime.test_host_time import decode
from tests.runtime.test_quantized_checkpoints import expected_tokens
from tests.support import Reference, synthesize

References = Callable[[str], Reference]
OWN = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128, "intermediate_size": 192}
CASES = [
    *((family, format.value) for format in Format for family in ("llama", "mixtral")),
    ("llama", "bfloat16"),
    ("mixtral", "bfloat16"),
    ("gpt-oss", "bfloat16"),
    ("qwen3-next", "bfloat16"),
    ("llama", "gptq"),
    ("llama", "fp8 blocks"),
    ("qwen2", "awq"),
    ("gpt2", "bitsandbytes int8"),
    ("phi-3", "pack-quantized, zero points"),
    ("mixtral", "awq"),
    ("mixtral", "gptq_v2, zero points"),
    ("mixtral", "gptq, desc_act, 8 bits"),
    ("mixtral", "pack-quantized"),
    ("mixtral", "bitsandbytes fp4"),
    ("mixtral", "bitsandbytes nf4"),
    ("mixtral", "float-quantized, rows"),
    ("mixtral", "modelopt nvfp4"),
    ("qwen3-moe", "fp8 blocks"),
    ("gpt-oss", "mxfp4"),
]


def written(ref: Reference, family: str, name: str, directory: Path) -> tuple[Path, Path]:
    """A checkpoint in that format, and one of the numbers that it stands for."""
    if name in Format.__members__:
        published = synthesize(family, directory / "published", **OWN)
        pack(
            PackConfig(model=SourceConfig(path=str(published)), out=str(directory / "stored"), format=Format[name]),
            lambda *_: None,
        )
        checkpoint = open_checkpoint(directory / "stored")
        found = pair_companions(checkpoint.tensors, {"quant_method": "weightstream"})
        numbers = {name: load_tensor(piece).float().contiguous() for name, piece in found.items()}
        return directory / "stored", write_checkpoint(published, directory / "plain", numbers)
    if name == "bfloat16":
        return ref.directory, ref.directory
    if name == "mxfp4":
        return write_mxfp4(ref.directory, directory)
    if name == "fp8 blocks":
        return write_fp8(ref.directory, directory, (24, 64))
    return write_published(ref.directory, directory, PUBLISHED[name], transposes=family == "gpt2")


def on_a_device(
    ref: Reference, directory: Path, where: Dequantize, lanes: int = 2, order: Order = Order.zigzag
) -> RuntimeConfig:
    attention = Attention.cpu if order.style.needs_cpu_attention else Attention.device
    policy = PolicyConfig(
        kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=lanes, schedule=order, attention=attention
    )
    config = config_for(replace(ref, directory=directory), tier=Tier.cpu, policy=policy)
    return replace(config, offload=replace(config.offload, dequantize=where, expert_paging=ExpertPaging.off))


QUICK = [
    *(("llama", name) for name in ("lossless", "gptq", "fp8 blocks")),
    *(("mixtral", name) for name in ("int4", "pack-quantized", "bitsandbytes nf4", "modelopt nvfp4")),
    ("gpt-oss", "mxfp4"),
]


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("where", [Dequantize.stage, pytest.param(Dequantize.product, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "name"), with_slow_others(CASES, QUICK))
def test_tokens_are_those_of_the_numbers(
    family: str, name: str, where: Dequantize, reference: References, tmp_path: Path
) -> None:
    ref = reference(family)
    stored, plain = written(ref, family, name, tmp_path)
    found = tokens(on_a_device(ref, stored, where), ref.prompts[:4], FakeDevice((False, True)))
    assert found == expected_tokens(plain, ref.prompts[:4])


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("order", Order)
def test_tokens_are_those_of_the_numbers_in_every_order(order: Order, reference: References, tmp_path: Path) -> None:
    """With areas for two stages where an order has two open at once, for which the CPU attends."""
    ref = reference("mixtral")
    stored, plain = written(ref, "mixtral", "awq", tmp_path)
    config = on_a_device(ref, stored, Dequantize.stage, order=order)
    found = tokens(config, ref.prompts[:4], FakeDevice((False, True)))
    assert found == expected_tokens(plain, ref.prompts[:4])


@pytest.fixture(scope="module")
def of_plain(reference: References, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HostCounts]:
    """A decode pass of one lane over weights that are stored as they are multiplied."""

    def counted(family: str) -> HostCounts:
        ref = reference(family)
        numbers = {name: tensor.float() for name, tensor in tensors_in(ref.directory).items()}
        plain = write_checkpoint(ref.directory, tmp_path_factory.mktemp("plain") / family, numbers)
        return decode_pass(ref, plain, num_lanes=1)

    return cache(counted)


def decode_pass(ref: Reference, directory: Path, num_lanes: int) -> HostCounts:
    few = replace(ref, prompts=ref.prompts[:2])
    return decode(on_a_device(few, directory, Dequantize.stage, lanes=num_lanes), few).passes[0]


@pytest.mark.slow("runtime/test_dequantized_weights.py::test_launches_do_not_grow_with_sizes")
@pytest.mark.dealt(most=1)
@pytest.mark.parametrize(("family", "name"), with_slow_others(CASES, QUICK[::2]))
def test_a_pass_takes_at_most_three_times_the_launches_of_plain_weights(
    family: str, name: str, reference: References, of_plain: Callable[[str], HostCounts], tmp_path: Path
) -> None:
    """Of one lane, which has all of the dequantizing to itself; escapes of packed bfloat16 take more. The host waits as
    often."""
    ref = reference(family)
    stored, _ = written(ref, family, name, tmp_path)
    found = decode_pass(ref, stored, num_lanes=1)
    assert found.num_launches <= (5 if name == "lossless" else 3) * of_plain(family).num_launches
    assert found.num_syncs == of_plain(family).num_syncs


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("name", with_slow_others(["int4", "lossless", "gptq", "awq"], ["lossless", "gptq"]))
def test_launches_do_not_grow_with_sizes(name: str, reference: References, tmp_path: Path) -> None:
    counts = list[int]()
    for turn, size in enumerate((192, 768)):
        source = synthesize("llama", tmp_path / f"source {turn}", **{**OWN, "intermediate_size": size})
        ref = replace(reference("llama"), directory=source)
        if name in Format.__members__:
            stored = tmp_path / f"stored {turn}"
            config = PackConfig(model=SourceConfig(path=str(source)), out=str(stored), format=Format[name])
            pack(config, lambda *_: None)
        else:
            stored, _ = write_published(source, tmp_path / f"published {turn}", PUBLISHED[name])
        counts.append(decode_pass(ref, stored, num_lanes=1).num_launches)
    assert counts[0] == counts[1]


def test_a_layer_needs_dequantizing_once_for_all_lanes_and_passes_of_it(
    reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, done = reference("llama"), list[int]()
    stored, _ = written(ref, "llama", "gptq", tmp_path)
    dequantized = dequantized_weights.dequantize_all

    def counted(*given: object) -> dict[str, torch.Tensor]:
        done.append(1)
        return dequantized(*given)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(dequantized_weights, "dequantize_all", counted)
    config = on_a_device(ref, stored, Dequantize.auto)
    runtime = Runtime(config, device=FakeDevice((False, True)))
    requests = [Request(id=str(i), prompt_ids=tuple(p), max_new_tokens=3) for i, p in enumerate(ref.prompts[:4])]
    with runtime.open_with_backoff(requests) as (plan, session):
        assert plan.placement.dequantized is not None
        session.run(plan.blocks[0], requests, lambda _: None)
    num_layers, num_passes = 4, 3
    assert len(done) == num_layers * num_passes


def test_a_matrix_that_a_class_keeps_in_float32_is_none_of_the_area_s(reference: References, tmp_path: Path) -> None:
    """Areas are sized for the model's dtype; routers of some classes compute in another."""
    overrides = {**OWN, "moe_intermediate_size": 64, "moe_num_experts": 8, "moe_k": 2, "num_hidden_layers": 3}
    overrides |= {"vocab_size": 640, "moe_layer_start_index": 0, "moe_num_shared_experts": 1}
    published = tmp_path / "published"
    synthesize_checkpoint(model="ernie4_5_moe", overrides=overrides, directory=published, seed=1)
    narrow = {name: tensor.bfloat16() for name, tensor in tensors_in(published).items()}
    in_16_bits = write_checkpoint(published, tmp_path / "in 16 bits", narrow)
    config = PackConfig(model=SourceConfig(path=str(in_16_bits)), out=str(tmp_path / "stored"), format=Format.int4)
    pack(config, lambda *_: None)
    asked = on_a_device(reference("mixtral"), tmp_path / "stored", Dequantize.stage)
    asked = replace(asked, model=replace(asked.model, dtype=DType.bfloat16))
    (found,) = tokens(asked, [[1, 5, 7, 9]], FakeDevice((False, True)))
    assert found
