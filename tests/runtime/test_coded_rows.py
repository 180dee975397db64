"""Rounded weights: what a device's operators, the compiled decoding and every product make of them are the same
numbers, and no other code is nearer to the original."""

import pytest
import torch

from runtime.formats.kinds.rounded import ENCODINGS, Rounding
from runtime.linear.kernel_products import fits_vectors, multiply_in_vectors
from runtime.linear.packed_rows import CodedRows
from tests.packed import packed_rows, rounded_rows, tensor_of, words_of

ROUNDINGS = [Rounding("int8"), Rounding("fp8"), *(Rounding("int4", size) for size in (32, 64, 128))]
SHAPE = (131, 512)
CHOICES = [slice(None), slice(0, 1), slice(50, 130), torch.tensor([3, 3, 130, 0, 96])]
pytestmark = pytest.mark.usefixtures("two_threads")


def numbers(shape: tuple[int, int] = SHAPE, seed: int = 0) -> torch.Tensor:
    """Rows of mixed scales, one of zeros, one whose only number is large."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=generator) * torch.randn(shape[0], 1, generator=generator).exp() * 0.02
    found[5], found[6] = 0, 0
    found[6, 7] = -3.0
    return found.to(torch.bfloat16).float()


def rows_of(rounding: Rounding, original: torch.Tensor) -> CodedRows:
    return rounded_rows(original, rounding.name, rounding.group_size)


def decoded(rows: CodedRows, choice: slice | torch.Tensor = slice(None)) -> torch.Tensor:
    height = len(torch.arange(rows.shape[0])[choice])
    out = torch.full((height, rows.shape[1]), 7.0)
    rows.decode(choice, out)
    return out


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_compiled_rows_are_those_of_a_device_s_operators(rounding: Rounding, choice: slice | torch.Tensor) -> None:
    rows = rows_of(rounding, numbers())
    right = decoded(rows, choice)
    out = torch.full_like(right, 7.0)
    rows.dequantize(choice, out)
    assert torch.equal(out, right)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_no_other_code_is_nearer(rounding: Rounding) -> None:
    """By all 256 bytes, or 16 half bytes, times the scale."""
    original = numbers((24, 256))
    scales = rounding.choose_scales(original)
    if rounding.name == "int4":
        codes = torch.arange(-8, 8).float()
    else:
        every = torch.arange(256, dtype=torch.uint8)
        codes = every.view(torch.int8).float().clamp(min=-127)
        codes = codes if rounding.name == "int8" else every.view(torch.float8_e4m3fn).float().nan_to_num(0)
    factors = scales.float().repeat_interleave(256 // scales.shape[1], dim=1)
    nearest = ((factors[..., None] * codes) - original[..., None]).abs().amin(-1)
    off = (decoded(rows_of(rounding, original)) - original).abs()
    assert torch.equal(off, nearest)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.01), ("fp8", 0.03), ("int4", 0.1)])
def test_the_error_is_that_of_its_bits(name: str, most: float) -> None:
    original = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    off = decoded(rounded_rows(original, name)) - original
    assert 0 < off.norm() / original.norm() < most


def test_cutting_a_group_leaves_less_error_than_its_largest_number_as_the_scale() -> None:
    original, rounding = numbers((64, 1024)), Rounding("int4")
    groups = original.unflatten(1, (-1, 64))
    plain = (groups.abs().amax(2) / 7).to(torch.bfloat16)
    found = CodedRows(rounding.encode(original, plain), plain, rounding.encoding)
    assert (decoded(rows_of(rounding, original)) - original).norm() < (decoded(found) - original).norm()


@pytest.mark.parametrize("num_rows", [1, 3, 8, 64, 300])
@pytest.mark.parametrize("shape", [(131, 512), (1000, 384), (2 * 256 + 41, 128 * 5)], ids=str)
def test_products_are_those_of_the_decoded_weight_bit_by_bit(num_rows: int, shape: tuple[int, int]) -> None:
    x = torch.randn(num_rows, shape[1], generator=torch.Generator().manual_seed(0))
    for rounding in ROUNDINGS:
        rows = rows_of(rounding, numbers(shape))
        assert fits_vectors(x, [rows])
        assert torch.equal(multiply_in_vectors(x, [rows]), multiply_in_vectors(x, [decoded(rows)])), rounding


def test_all_ways_lie_below_each_other() -> None:
    """One product takes blocks of every way, as fused projections may be."""
    original, x = numbers((96, 512)), torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    words = words_of(original.numpy())
    blocks = [packed_rows(words), *(rounded_rows(original, name) for name in ENCODINGS), tensor_of(words)]
    right = torch.cat([multiply_in_vectors(x, [block]) for block in blocks], dim=1)
    assert torch.equal(multiply_in_vectors(x, blocks), right)
