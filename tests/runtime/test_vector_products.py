"""Products in vectors are as precise as those of float32, and an output never sees the rows beside its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from runtime.config.profiles import LinearBackend
from runtime.kernels.linear import CHAIN_INPUTS, CHUNK_ROWS
from runtime.linear import backends, work_items
from runtime.linear.kernel_products import fits_vectors, multiply_in_vectors
from runtime.linear.stored import StoredWeight

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
pytestmark = pytest.mark.usefixtures("two_threads")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 7, 16, 17, 40, 48, 49, 64, 113, 300])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(32, 16), (65, 96), (2 * CHUNK_ROWS + 40, 64), (1000, 2 * CHAIN_INPUTS), (96, CHAIN_INPUTS + 16)],
)
def test_products_are_as_precise_as_in_float32(dtype: torch.dtype, num_rows: int, outputs: int, inputs: int) -> None:
    """As torch's of many rows; of few, torch adds up shorter chains."""
    x, weight = random(300, inputs), random(outputs, inputs, seed=1).to(dtype)
    right, plain = x.double() @ weight.double().t(), x @ weight.float().t()
    ours = multiply_in_vectors(x[:num_rows], [weight])
    assert (ours - right[:num_rows]).abs().max() < 2 * (plain - right).abs().max() + 1e-6


def test_numbers_at_the_ends_of_float16_are_widened_exactly() -> None:
    """Subnormal ones too, and those that are none."""
    numbers = torch.tensor([6e-8, -6.1e-5, 65504.0, torch.inf, -torch.inf, torch.nan, 0.0, 1.0] * 4).half()
    weight = torch.zeros(32, 16, dtype=torch.float16)
    weight[:, 3] = numbers
    x = torch.zeros(1, 16)
    x[0, 3] = 1
    found = multiply_in_vectors(x, [weight])[0]
    torch.testing.assert_close(found, numbers.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_comes_to_the_same_in_any_company(dtype: torch.dtype) -> None:
    x, weight = random(500, 1040), random(320, 1040, seed=1).to(dtype)
    whole = multiply_in_vectors(x, [weight])
    for size in (1, 20, 33, 70, 250, 336):
        assert torch.equal(whole, torch.cat([multiply_in_vectors(rows, [weight]) for rows in x.split(size)])), size


def test_neither_threads_nor_passes_over_the_weights_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(200, 512), random(320, 512, seed=1).bfloat16()
    usual = multiply_in_vectors(x, [weight])
    monkeypatch.setattr(work_items, "SHARED_INPUTS", 1)
    assert torch.equal(multiply_in_vectors(x, [weight]), usual)
    monkeypatch.setattr(work_items, "INPUT_BYTES", 32 * 512 * 4)
    assert torch.equal(multiply_in_vectors(x, [weight]), usual)
    torch.set_num_threads(1)
    assert torch.equal(multiply_in_vectors(x, [weight]), usual)


NARROW = """
import torch
from runtime.kernels.primitives import LANES
from runtime.linear.kernel_products import multiply_in_vectors
assert LANES == 8
torch.manual_seed(0)
x, weight = torch.randn(350, 1040), torch.randn(96, 1040).bfloat16()
found = multiply_in_vectors(x, [weight])
from tests.packed import adversaries, packed_rows, tensor_of
words = adversaries((96, 1024))["rows of mixed scales"]
packed, plain = (multiply_in_vectors(x[:, :1024], [rows(words)]) for rows in (packed_rows, tensor_of))
assert torch.equal(packed, plain)
assert torch.equal(found, torch.cat([multiply_in_vectors(row[None], [weight]) for row in x]))
print(float((found - x.double() @ weight.double().t()).abs().max()))
"""


@pytest.mark.slow("runtime/test_vector_products.py::test_products_are_as_precise_as_in_float32")
def test_vectors_of_8_lanes_do_as_those_of_16(tmp_path: Path) -> None:
    """As where there is no AVX-512."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "WEIGHTSTREAM_ISA": "avx2"}
    ended = subprocess.run([sys.executable, "-c", NARROW], env=environment, capture_output=True, text=True, check=True)
    assert float(ended.stdout) < 1e-4


def test_memory_that_is_used_again_leaves_nothing_behind() -> None:
    x, weight = random(7, 512), random(96, 512, seed=1).bfloat16()
    usual = multiply_in_vectors(x, [weight])
    multiply_in_vectors(torch.full((40, 1024), torch.nan), [weight.view(48, 1024)])
    assert torch.equal(multiply_in_vectors(x, [weight]), usual)


def test_blocks_lie_below_each_other() -> None:
    x, blocks = random(7, 64), [random(rows, 64, seed=rows).bfloat16() for rows in (40, 96, 3)]
    whole = multiply_in_vectors(x, [torch.cat(blocks)])
    assert multiply_in_vectors(x, blocks) == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("bias", [None, random(512, seed=2)])
@pytest.mark.parametrize("is_flipped", [False, True])
def test_a_stored_weight_is_multiplied_so(
    bias: torch.Tensor | None, is_flipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    counted = {LinearBackend.vectors: lambda x, w: calls.append(len(x)) or multiply_in_vectors(x, w)}
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, **counted})
    matrix, x = random(512, 128, seed=1).half(), random(2, 5, 128)
    weight = StoredWeight([[matrix]], matrix.shape, torch.float32, is_stacked=False)
    found = torch.matmul(x, weight.t()) if is_flipped and bias is None else F.linear(x, weight, bias)
    assert calls == [10]
    torch.testing.assert_close(found, F.linear(x, matrix.float(), bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "blocks"),
    [
        (random(4, 512).bfloat16(), [random(256, 512).half()]),
        (random(4, 512).double(), [random(256, 512).double()]),
        (random(4, 512), [random(256, 512).double()]),
        (random(4, 500), [random(256, 500).bfloat16()]),
        (random(4, 512), [random(512, 256).bfloat16().t()]),
        (random(4, 512), [random(256, 512).bfloat16(), random(256, 512)]),
        (random(0, 512), [random(256, 512).bfloat16()]),
        (random(4, 64), [random(64, 64).bfloat16()]),
    ],
    ids=["other 16 bits", "float64", "float64 weights", "odd inputs", "strided", "two dtypes", "no rows", "small"],
)
def test_what_does_not_fit_is_left_to_panels(x: torch.Tensor, blocks: list[torch.Tensor]) -> None:
    assert all(fits_vectors(random(4, 512), [random(256, 512).to(dtype)]) for dtype in DTYPES)
    assert not fits_vectors(x, blocks)
