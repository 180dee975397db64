"""Products in the matrix unit are as precise as those of float32, and an output never sees the rows beside its own."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from runtime.config.profiles import LinearBackend
from runtime.kernels import compiler
from runtime.kernels.amx.linear import CHUNK_ROWS
from runtime.kernels.compiler import has_matrix_unit
from runtime.linear import backends, work_items
from runtime.linear.kernel_products import fits_tiles, multiply_in_tiles
from runtime.linear.stored import StoredWeight

WITHOUT_UNIT = "this processor has no matrix unit that Linux lets us use"
needs_unit = pytest.mark.skipif(not has_matrix_unit(), reason=WITHOUT_UNIT)
pytestmark = pytest.mark.usefixtures("two_threads")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def errors(x: torch.Tensor, weight: torch.Tensor) -> tuple[float, float]:
    """The largest of ours, and of a product of float32, from one in float64."""
    right = x.double() @ weight.double().t()
    ours, plain = multiply_in_tiles(x, [weight]), x @ weight.float().t()
    return float((ours - right).abs().max()), float((plain - right).abs().max())


@needs_unit
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 33, 129, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (65, 96), (CHUNK_ROWS + 40, 64), (1000, 2048)])
def test_products_are_as_precise_as_in_float32(num_rows: int, outputs: int, inputs: int) -> None:
    ours, plain = errors(random(num_rows, inputs), random(outputs, inputs, seed=1).bfloat16())
    assert ours < 2 * plain + 1e-6


@needs_unit
def test_all_24_bits_of_an_input_count() -> None:
    x = torch.tensor([1 + 2**-23, 1 - 2**-24, -3 - 2**-22, 2**-100 * (1 + 2**-23)])
    x_MK = torch.zeros(4, 32)
    x_MK[:, 5] = x
    weight = torch.zeros(32, 32, dtype=torch.bfloat16)
    weight[7, 5] = 1
    assert torch.equal(multiply_in_tiles(x_MK, [weight])[:, 7], x)


@needs_unit
@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_precision_does_not_depend_on_the_scale(scale: float) -> None:
    x, weight = random(20, 256), random(64, 256, seed=1).bfloat16()
    assert errors(x * scale, weight)[0] < 3 * scale * errors(x, weight)[1]


@needs_unit
def test_a_row_comes_to_the_same_in_any_company() -> None:
    x, weight = random(200, 512), random(320, 512, seed=1).bfloat16()
    alone = torch.cat([multiply_in_tiles(row[None], [weight]) for row in x])
    assert torch.equal(multiply_in_tiles(x, [weight]), alone)


@needs_unit
def test_neither_threads_nor_passes_over_the_weights_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(200, 512), random(320, 512, seed=1).bfloat16()
    usual = multiply_in_tiles(x, [weight])
    monkeypatch.setattr(work_items, "SHARED_INPUTS", 1)
    assert torch.equal(multiply_in_tiles(x, [weight]), usual)
    monkeypatch.setattr(work_items, "INPUT_BYTES", 32 * 512 * 6)
    assert torch.equal(multiply_in_tiles(x, [weight]), usual)
    torch.set_num_threads(1)
    assert torch.equal(multiply_in_tiles(x, [weight]), usual)


@needs_unit
def test_blocks_lie_below_each_other() -> None:
    x, blocks = random(7, 64), [random(rows, 64, seed=rows).bfloat16() for rows in (40, 96, 3)]
    whole = multiply_in_tiles(x, [torch.cat(blocks)])
    assert multiply_in_tiles(x, blocks) == pytest.approx(whole, abs=1e-5)


@needs_unit
def test_what_is_no_number_stays_none() -> None:
    x, weight = random(3, 64), random(32, 64, seed=1).bfloat16()
    x[1, 3], x[2, 4] = torch.nan, torch.inf
    found = multiply_in_tiles(x, [weight])
    assert found[0].isfinite().all()
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()


@needs_unit
@pytest.mark.parametrize("bias", [None, random(512, seed=2)])
@pytest.mark.parametrize("is_flipped", [False, True])
def test_a_stored_weight_takes_the_unit(
    bias: torch.Tensor | None, is_flipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    counted = {LinearBackend.tiles: lambda x, w: calls.append(len(x)) or multiply_in_tiles(x, w)}
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, **counted})
    matrix, x = random(512, 128, seed=1).bfloat16(), random(2, 5, 128)
    weight = StoredWeight([[matrix]], matrix.shape, torch.float32, is_stacked=False)
    found = torch.matmul(x, weight.t()) if is_flipped and bias is None else F.linear(x, weight, bias)
    assert calls == [10]
    torch.testing.assert_close(found, F.linear(x, matrix.float(), bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "block"),
    [
        (random(4, 512).bfloat16(), random(256, 512).bfloat16()),
        (random(4, 512), random(256, 512)),
        (random(4, 512), random(256, 512).half()),
        (random(4, 500), random(256, 500).bfloat16()),
        (random(4, 512), random(512, 256).bfloat16().t()),
        (random(0, 512), random(256, 512).bfloat16()),
        (random(4, 64), random(64, 64).bfloat16()),
    ],
    ids=["bfloat16", "float32 weights", "float16 weights", "odd inputs", "strided", "no rows", "small"],
)
def test_what_does_not_fit_is_left_to_panels(x: torch.Tensor, block: torch.Tensor) -> None:
    assert fits_tiles(random(4, 512), [random(256, 512).bfloat16()])
    assert not fits_tiles(x, [block])


def test_without_a_compiler_there_is_no_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "has_compiler", lambda: False)
    assert not has_matrix_unit()


@pytest.mark.slow("runtime/test_host_attention.py::test_the_compiler_is_loaded_at_first_use")
def test_the_compiler_is_loaded_at_first_use() -> None:
    program = "import sys, runtime.linear.stored; print('numba' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"
