"""Products in int8 err by about 1 % of their result, evenly spread; routers, the head and runs that ask for none stay
exact."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from runtime.config import DType, ModelConfig, Products, Tier
from runtime.errors import ConfigError
from runtime.linear import pieces, stored
from runtime.linear.stored import StoredWeight
from runtime.model import int8_weights
from runtime.model.families import FAMILIES
from runtime.model.int8_products import MOST_INPUTS, fit_int8, has_int8_unit, multiply_in_int8
from runtime.model.loading import LoadedModel, load_model
from tests.runtime.test_families import References, Runtimes, config_for, tokens
from tests.support import synthesize

CPU = torch.device("cpu")
needs_unit = pytest.mark.skipif(
    not has_int8_unit(), reason="this processor has no matrix unit for int8 that we may use"
)
pytestmark = pytest.mark.usefixtures("two_threads")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(x_MK: torch.Tensor, factor: float) -> torch.Tensor:
    """Four inputs in a thousand are larger in every row, as in the residual streams of large models."""
    x_MK = x_MK.clone()
    x_MK[:, ::256] *= factor
    return x_MK


def error(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Of the whole result, as a share of it; the right one is of float64."""
    right = x.double() @ weight.double().t()
    return float((multiply_in_int8(x, [weight]) - right).norm() / right.norm())


@needs_unit
@pytest.mark.parametrize("num_rows", [1, 16, 17, 129])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (65, 192), (320, 2048), (96, 8192)])
def test_products_of_normal_numbers_err_by_one_and_a_half_percent_at_most(
    num_rows: int, outputs: int, inputs: int
) -> None:
    assert error(random(num_rows, inputs), random(outputs, inputs, seed=1).bfloat16()) < 0.015


@needs_unit
@pytest.mark.parametrize(("factor", "most"), [(10, 0.05), (100, 0.08)])
def test_inputs_far_above_the_others_cost_them_their_bits(factor: float, most: float) -> None:
    x, weight = random(64, 2048), random(320, 2048, seed=1).bfloat16()
    assert error(x, weight) < error(with_outliers(x, factor), weight) < most


@needs_unit
def test_what_outliers_leave_of_the_others_is_little() -> None:
    """Where their own share of the result is taken away: half of a step of 1/127 of the largest is no small noise."""
    x, weight = random(64, 2048), random(320, 2048, seed=1).bfloat16()
    wide = with_outliers(x, 100)
    weight[:, ::256] = 0
    assert error(wide, weight) > 0.3


@needs_unit
@pytest.mark.parametrize("num_rows", [1, 15, 33, 200])
def test_products_are_those_of_rounded_rows(num_rows: int) -> None:
    """To the last bits, but where a number lies so near the middle of two steps that its own rounding decides."""
    x, weight = random(num_rows, 2048), random(320, 2048, seed=1).bfloat16()
    (x_q, x_scales), (w_q, w_scales) = rounded(x), rounded(weight.float())
    right = (x_q.double() @ w_q.double().t()) * x_scales * w_scales.t()
    found = multiply_in_int8(x, [weight])
    assert float((found - right).norm() / right.norm()) < 2e-3


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = x.abs().amax(1, keepdim=True) / 127
    return (x / scales).round(), scales


@needs_unit
def test_numbers_that_are_steps_come_out_exactly() -> None:
    x, weight = (torch.randint(-126, 127, shape).float() for shape in ((40, 256), (96, 256)))
    x[:, 7] = weight[:, 9] = 127
    assert torch.equal(multiply_in_int8(x, [weight.bfloat16()]), x @ weight.t())


@needs_unit
@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_precision_does_not_depend_on_the_scale(scale: float) -> None:
    assert error(random(20, 256) * scale, random(64, 256, seed=1).bfloat16()) < 0.015


@needs_unit
def test_a_row_comes_to_the_same_in_any_company() -> None:
    x, weight = random(200, 512), random(320, 512, seed=1).bfloat16()
    alone = torch.cat([multiply_in_int8(row[None], [weight]) for row in x])
    assert torch.equal(multiply_in_int8(x, [weight]), alone)


@needs_unit
def test_neither_threads_nor_passes_over_the_weights_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(200, 512), random(320, 512, seed=1).bfloat16()
    usual = multiply_in_int8(x, [weight])
    monkeypatch.setattr(pieces, "INPUT_BYTES", 32 * 512)
    assert torch.equal(multiply_in_int8(x, [weight]), usual)
    torch.set_num_threads(1)
    assert torch.equal(multiply_in_int8(x, [weight]), usual)


@needs_unit
def test_blocks_lie_below_each_other() -> None:
    x, blocks = random(7, 64), [random(rows, 64, seed=rows).bfloat16() for rows in (32, 96)]
    assert torch.equal(multiply_in_int8(x, blocks), multiply_in_int8(x, [torch.cat(blocks)]))


@needs_unit
def test_a_row_of_zeros_is_zero_and_what_is_no_number_stays_none() -> None:
    x, weight = random(4, 64), random(32, 64, seed=1).bfloat16()
    x[1], x[2, 3], x[3, 4], weight[5], weight[6, 2] = 0, torch.nan, torch.inf, 0, torch.nan
    found = multiply_in_int8(x, [weight])
    assert not found[1, :6].any()
    assert found[2:].isnan().all()
    assert found[:, 6].isnan().all()
    assert found[0, :6].isfinite().all()
    assert not found[:2, 5].any()


@needs_unit
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("num_dims", [2, 3])
def test_only_a_weight_that_says_so_is_rounded(is_int8: bool, num_dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(stored, "multiply_in_int8", lambda x, w: calls.append(len(x)) or multiply_in_int8(x, w))
    matrix, x, bias = random(512, 128, seed=1).bfloat16(), random(2, 5, 128), random(512, seed=2)
    weight = StoredWeight(
        [[matrix]], (1, 512, 128)[-num_dims:], torch.float32, is_stacked=num_dims == 3, is_int8=is_int8
    )
    found = F.linear(x, weight[0] if num_dims == 3 else weight, bias)
    right = F.linear(x, matrix.float(), bias)
    assert calls == [10] * is_int8
    assert float((found - right).norm() / right.norm()) < (0.015 if is_int8 else 1e-5)


def test_more_inputs_than_a_sum_holds_are_left_to_exact_products() -> None:
    assert 127**2 * MOST_INPUTS < 2**31 <= 127**2 * (MOST_INPUTS + 64)
    weight = torch.zeros(1, 1, dtype=torch.bfloat16).expand(32, MOST_INPUTS + 64).contiguous()
    assert not fit_int8(torch.zeros(1, MOST_INPUTS + 64), [weight])
    assert fit_int8(torch.zeros(1, MOST_INPUTS), [weight[:, :MOST_INPUTS].contiguous()])


def load(family: str, directory: Path, dtype: DType = DType.float32) -> LoadedModel:
    path = str(synthesize(family, directory / dtype.value))
    return load_model(ModelConfig(name="test", path=path, dtype=dtype, products=Products.int8), CPU, str(directory))


@needs_unit
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt2"])
def test_layers_are_rounded_and_neither_routers_nor_the_head(family: str, tmp_path: Path) -> None:
    stages = load(family, tmp_path).shape.stages
    for stage in stages:
        rounded = {p.name for p in stage.parameters if p.is_int8}
        per_expert = {p.name for p in stage.parameters if p.shape[:1] == (stage.num_experts,) and len(p.shape) == 2}
        assert not rounded or stage.kind.is_layer
        assert not {name for name in per_expert & rounded if "attn" not in name}
    assert any(p.is_int8 for stage in stages for p in stage.parameters)


def test_what_cannot_be_rounded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_weights, "has_int8_unit", lambda: True)
    with pytest.raises(ConfigError, match=r"model\.products=int8 is for float32 on a CPU.*bfloat16 on cpu"):
        load("llama", tmp_path / "llama", DType.bfloat16)
    with pytest.raises(ConfigError, match=r"model\.products=int8: no layer has bfloat16 matrices"):
        load("gpt2", tmp_path / "gpt2")
    monkeypatch.setattr(int8_weights, "has_int8_unit", lambda: False)
    with pytest.raises(ConfigError, match=r"model\.products=int8: this CPU has no matrix unit.*model\.products=exact"):
        load("llama", tmp_path / "llama")


@needs_unit
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_tokens_in_int8_are_the_same_in_every_tier(
    family: str, reference: References, opened: Runtimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LEAST_WEIGHTS", 1)
    ref, found = reference(family), list[list[list[int]]]()
    for tier in (Tier.none, Tier.nvme):
        config = config_for(ref, tier)
        found.append(tokens(opened(replace(config, model=replace(config.model, products=Products.int8))), ref.prompts))
    assert found[0] == found[1] != ref.expected
