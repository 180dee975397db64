"""Quantised rows become the numbers that their definition says, whichever rows are asked for."""

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.formats.scaled_rows import ScaledRows
from runtime.linear import blocks as panels
from runtime.linear.rows import Rows
from runtime.linear.stored import StoredWeight
from tests.quantized import spread, to_mxfp4

N, K = 80, 96
BLOCKS = [(32, 48), (128, 128), (32, 50), (1, 32), (80, 96), (7, 5)]
CHOICES = [slice(None), slice(0, 1), slice(31, 77), torch.tensor([79, 0, 33, 33])]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def fp8(
    block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn, scales: torch.dtype = torch.float32
) -> tuple[Rows, torch.Tensor]:
    """The rows and the matrix that they stand for."""
    numbers = (random(N, K) * 40).to(dtype)
    factors = random(-(-N // block[0]), -(-K // block[1])).abs().to(scales)
    rows = ScaledRows(numbers.view(torch.uint8), dtype, factors, *block)
    return rows, numbers.float() * spread(factors, block, numbers.shape)


def mxfp4() -> tuple[Rows, torch.Tensor]:
    blocks, scales = to_mxfp4(random(1, N, K))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t()
    return ScaledRows(blocks[0].flatten(1), None, scales[0].view(torch.float8_e8m0fnu), 1, 32), expected


def widened(rows: Rows, choice: slice | torch.Tensor) -> torch.Tensor:
    out = torch.full((len(torch.arange(N)[choice]), K), float("nan"))
    rows.dequantize(choice, out)
    return out


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_fp8_is_each_number_times_the_factor_of_its_block(block: tuple[int, int], choice: slice | torch.Tensor) -> None:
    rows, expected = fp8(block)
    assert torch.equal(widened(rows, choice), expected[choice])


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_in_every_pair_of_dtypes(dtype: torch.dtype, scales: torch.dtype) -> None:
    rows, expected = fp8((32, 48), dtype, scales)
    assert torch.equal(widened(rows, slice(None)), expected)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_mxfp4_is_what_transformers_makes_of_it(choice: slice | torch.Tensor) -> None:
    rows, expected = mxfp4()
    assert torch.equal(widened(rows, choice), expected[choice])


def test_mxfp4_knows_every_byte_and_exponent() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16)
    scales = torch.tensor([0, 1, 2, 64, 120, 126, 127, 128, 129, 140, 180, 200, 220, 240, 250, 251], dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales.view(1, 16, 1), dtype=torch.float32)[0].t()
    rows = ScaledRows(blocks.view(16, 16), None, scales.view(16, 1).view(torch.float8_e8m0fnu), 1, 32)
    out = torch.empty(16, 32)
    rows.dequantize(slice(None), out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 100])
@pytest.mark.parametrize("make", [lambda: fp8((32, 50)), mxfp4], ids=["fp8", "mxfp4"])
def test_products_are_those_of_the_widened_matrix(
    make, num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "PANEL_BYTES", 13 * K * 4)  # several panels that begin inside of blocks
    rows, expected = make()
    weight = StoredWeight([[rows, rows]], (2 * N, K), dtype, is_stacked=False)
    plain = torch.cat([expected, expected]).to(dtype)
    x, ids = random(num_tokens, K).to(dtype), torch.tensor([[0, 79], [33, 1]])
    close = {"atol": 1e-3, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2.0, "rtol": 0.05}
    torch.testing.assert_close(F.linear(x, weight), F.linear(x, plain), **close)
    torch.testing.assert_close(weight.dequantized(), plain, atol=0, rtol=0)
    table = StoredWeight([[rows]], (N, K), dtype, is_stacked=False)
    assert torch.equal(F.embedding(ids, table), F.embedding(ids, expected.to(dtype)))


def test_experts_that_lie_transposed_multiply_as_they_lie() -> None:
    rows, expected = mxfp4()
    weight = StoredWeight([[rows], [rows]], (2, K, N), torch.float32, is_stacked=True, is_transposed=True)
    x = random(3, K)
    assert torch.equal(weight.dequantized(), torch.stack([expected.t(), expected.t()]))
    expert = weight[1]
    assert expert.shape == (K, N)
    torch.testing.assert_close(F.linear(x, expert.t()), F.linear(x, expected), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(torch.addmm(torch.zeros(N), x, expert), x @ expected.t(), atol=1e-3, rtol=1e-4)
