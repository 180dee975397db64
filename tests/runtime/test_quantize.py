"""Weights that are rounded while they are read are those of a packed store: their tokens, their bytes, their error."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import pytest
import torch

from jobs.packing.config import Format, PackConfig, SourceConfig
from jobs.packing.packing import pack
from runtime import ModelConfig, OffloadConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import DType, ExpertPaging, PolicyConfig, PolicyKind, Quantize, SelfCheck, Tier
from runtime.engine import self_check as check
from runtime.errors import BudgetError, CheckpointError, ConfigError
from runtime.formats.kinds.rounded import Rounding
from runtime.plan.shape.dtypes import Loss
from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.shapes import TensorSlice
from runtime.stream.device import ComputeDevice
from tests.fake_device import FakeDevice
from tests.quantized import tensors_in, write_checkpoint
from tests.runtime.test_fidelity import tokens_of
from tests.support import synthesize

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SIZES = {**HEADS, "hidden_size": 128, "intermediate_size": 192}
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16, 17]]
POLICY = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=2)
LATE_COPIES = (False, True)


@dataclass(frozen=True, kw_only=True)
class Models:
    """A published checkpoint, and its packed stores."""

    published: Path
    stores: Path

    def packed(self, quantize: Quantize) -> Path:
        store = self.stores / quantize.value
        if not store.exists():
            source = SourceConfig(path=str(self.published))
            pack(PackConfig(model=source, out=str(store), format=Format[quantize.value]), lambda *_: None)
        return store

    def runtime(
        self, path: Path, quantize: Quantize | None, tier: Tier = Tier.none, device: ComputeDevice | None = None
    ) -> Runtime:
        config = RuntimeConfig(
            model=ModelConfig(name="test", path=str(path), dtype=DType.float32, quantize=quantize),
            offload=OffloadConfig(tier=tier, read_chunk_mib=1),
            policy=POLICY,
            sampling=SamplingConfig(max_new_tokens=6, ignore_eos=True),
        )
        return Runtime(config, device=device)


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    directory = tmp_path_factory.mktemp("models")
    return Models(published=synthesize(request.param, directory / "published", **SIZES), stores=directory)


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("quantize", Quantize)
def test_tokens_and_error_are_those_of_the_packed_store(quantize: Quantize, models: Models) -> None:
    store = models.runtime(models.packed(quantize), None)
    runtime = models.runtime(models.published, quantize)
    expected = tokens_of(store, PROMPTS)
    assert runtime.model.weight_storage.relative_error is None, "nothing was read"
    assert tokens_of(runtime, PROMPTS) == expected
    found, packed = runtime.model.weight_storage, store.model.weight_storage
    assert found.loss is packed.loss is Loss.lossy
    assert Rounding(quantize.value).format in {*found.formats} & {*packed.formats}
    assert packed.relative_error is not None
    assert found.relative_error == pytest.approx(packed.relative_error, rel=1e-6)
    assert 0 < packed.relative_error < 0.2


@pytest.mark.dealt
@pytest.mark.parametrize("tier", [Tier.none, Tier.cpu])
def test_tokens_are_the_same_in_front_of_an_accelerator(tier: Tier, models: Models) -> None:
    expected = tokens_of(models.runtime(models.packed(Quantize.int4), None), PROMPTS)
    runtime = models.runtime(models.published, Quantize.int4, tier, FakeDevice(LATE_COPIES))
    runtime.config = replace(
        runtime.config, offload=replace(runtime.config.offload, resident_layers=1 if tier is Tier.cpu else None)
    )
    assert tokens_of(runtime, PROMPTS) == expected


@pytest.mark.dealt(most=1)
def test_experts_are_rounded_one_by_one_too(models: Models) -> None:
    expected = tokens_of(models.runtime(models.packed(Quantize.int8), None), PROMPTS)
    runtime = models.runtime(models.published, Quantize.int8, Tier.cpu, FakeDevice(LATE_COPIES))
    paged = replace(runtime.config.offload, resident_layers=0, expert_paging=ExpertPaging.all)
    runtime.config = replace(runtime.config, offload=paged)
    assert tokens_of(runtime, PROMPTS) == expected


@pytest.mark.dealt
@pytest.mark.parametrize("quantize", Quantize)
def test_the_plan_counts_the_bytes_of_codes_and_scales(quantize: Quantize, models: Models) -> None:
    """And a block at each end of a tensor, as each has a file of its own."""
    format = Rounding(quantize.value).format
    published = models.runtime(models.published, None).model.shape
    found, stored = (
        models.runtime(models.published, quantize).model.shape,
        models.runtime(models.packed(quantize), None),
    )
    rounded = {name: num_bytes for name, num_bytes in bytes_by_name(found, format).items() if num_bytes}
    assert rounded == bytes_by_name(stored.model.shape, format)
    spared = sum(2 * numbers - rounded[name] for name, numbers in numbers_by_name(found, format).items())
    every = range(len(published.stages))
    difference = published.sizes.resident_bytes(every) - found.sizes.resident_bytes(every)
    assert difference == pytest.approx(spared, abs=4096 * (2 * len(rounded) + len(every)))
    assert spared > 0.45 * published.sizes.resident_bytes(every) / 2


def pieces_of(shape: ModelShape, format: str) -> dict[str, TensorSlice]:
    parameters = [parameter for stage in shape.stages for parameter in stage.parameters]
    pieces = [piece for parameter in parameters for entry in parameter.pieces for piece in entry]
    return {piece.name: piece for piece in pieces if piece.format == format}


def bytes_by_name(shape: ModelShape, format: str) -> dict[str, int]:
    pieces = pieces_of(shape, format)
    return {name: sum(each.num_bytes for each in piece.with_companions()) for name, piece in pieces.items()}


def numbers_by_name(shape: ModelShape, format: str) -> dict[str, int]:
    return {name: prod(piece.shape) for name, piece in pieces_of(shape, format).items()}


def test_nothing_rounded_is_kept_beside_the_weights(models: Models) -> None:
    runtime = models.runtime(models.published, Quantize.int4)
    tokens_of(runtime, PROMPTS)
    assert runtime.model.rounded is not None
    assert not any(each._rounded for each in runtime.model.rounded.rounded)


def test_the_log_says_how_far_weights_are_off(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    tokens_of(models.runtime(models.published, Quantize.int8), PROMPTS)  # measures this machine, with some of them
    caplog.set_level(logging.DEBUG)
    tokens_of(models.runtime(models.published, Quantize.int8), PROMPTS)
    planned, read = caplog.text.split("weights were rounded while they were read: ")
    assert "lossy, relative RMS error not measured" in planned
    assert re.match(r"[^\n]*int8-rows[^\n]*: lossy, relative RMS error [0-9.]+%\n", read)


@pytest.mark.dealt(most=1)
def test_the_class_itself_is_given_the_rounded_weights_by_the_self_check(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger=check.__name__)
    runtime = models.runtime(models.published, Quantize.int4)
    runtime.config = replace(runtime.config, model=replace(runtime.config.model, self_check=SelfCheck.full))
    tokens_of(runtime, PROMPTS)
    (said,) = [record.getMessage() for record in caplog.records if record.name == check.__name__]
    assert "standard deviations" in said


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("device", [None, FakeDevice], ids=["host", "accelerator"])
@pytest.mark.parametrize("tier", [Tier.auto, Tier.nvme])
def test_where_all_of_it_stays_any_tier_rounds_once(
    tier: Tier, device: type[FakeDevice] | None, models: Models
) -> None:
    expected = tokens_of(models.runtime(models.packed(Quantize.int4), None), PROMPTS)
    made = device(LATE_COPIES) if device is not None else None
    runtime = models.runtime(models.published, Quantize.int4, tier, made)
    assert tokens_of(runtime, PROMPTS) == expected
    plan = runtime.plan([runtime.request(str(i), prompt) for i, prompt in enumerate(PROMPTS)])  # pyright: ignore
    assert plan.placement.walk.streamed == ()


@pytest.mark.dealt(most=1)
def test_what_an_accelerator_has_no_room_for_stays_in_host_memory(models: Models) -> None:
    expected = tokens_of(models.runtime(models.packed(Quantize.int4), None), PROMPTS)
    runtime = models.runtime(models.published, Quantize.int4, Tier.auto, FakeDevice(LATE_COPIES))
    runtime.config = replace(runtime.config, offload=replace(runtime.config.offload, resident_layers=1))
    assert tokens_of(runtime, PROMPTS) == expected
    plan = runtime.plan([runtime.request(str(i), prompt) for i, prompt in enumerate(PROMPTS)])  # pyright: ignore
    assert set(plan.placement.walk.streamed) == set(plan.placement.walk.in_host) != set()


def test_weights_that_would_be_read_in_every_pass_are_packed_instead(models: Models) -> None:
    runtime = models.runtime(models.published, Quantize.int4, Tier.nvme)
    runtime.config = replace(runtime.config, offload=replace(runtime.config.offload, resident_layers=1))
    match = r"would quantize \d+ stages again in every pass.*weightstream pack model\.path=/.* out=OUT format=int4"
    with pytest.raises(ConfigError, match=match):
        tokens_of(runtime, PROMPTS)


def test_where_there_is_no_room_to_keep_them_the_plan_says_how_to_pack_them(models: Models) -> None:
    runtime = models.runtime(models.published, Quantize.int4, Tier.auto)
    runtime.config = replace(runtime.config, offload=replace(runtime.config.offload, host_memory_gib=0.0001))
    with pytest.raises(BudgetError, match=r"use offload=nvme with packed weights .*out=OUT format=int4"):
        tokens_of(runtime, PROMPTS)


def test_what_cannot_be_rounded_is_refused_by_name(models: Models, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"quantize=int8: .*int4 is quantized already \(weightstream\)"):
        models.runtime(models.packed(Quantize.int4), Quantize.int8)
    tensors = tensors_in(models.published)
    name = next(name for name in tensors if name.endswith("self_attn.k_proj.weight"))
    tensors[name][3, 5] = torch.inf
    broken = write_checkpoint(models.published, tmp_path / "broken", tensors)
    with pytest.raises(CheckpointError, match=rf"'{name}' holds infinities or NaN, .*quantize=int8"):
        tokens_of(models.runtime(broken, Quantize.int8), PROMPTS)


def test_models_without_a_matrix_that_can_be_rounded_are_refused(
    tmp_path: Path, tiny_columns: Callable[[Path], Path]
) -> None:
    with pytest.raises(CheckpointError, match=r"no matrix of the model can be rounded: .*not a multiple of 64"):
        Models(published=tmp_path, stores=tmp_path).runtime(tiny_columns(tmp_path / "model"), Quantize.int8)


@pytest.fixture
def tiny_columns() -> Callable[[Path], Path]:
    return lambda directory: synthesize(
        "llama", directory, hidden_size=48, intermediate_size=80, head_dim=12, num_attention_heads=4
    )
