"""Products with weights as others have quantised them, decoded in vectors, are those with their numbers, bit by bit."""

from pathlib import Path

import pytest
import torch

from runtime.engine import setup
from runtime.kernels.compiler import has_compiler, has_table_lookup
from runtime.linear import work_items
from runtime.linear.blocks import float_rows as numbers_of
from runtime.linear.kernel_products import fits_vectors, multiply_in_vectors
from runtime.linear.rows import KernelRows
from tests.published_formats import PUBLISHED
from tests.runtime.test_published_formats import rows_of, written
from tests.toy import toy_shape

N, K = 328, 320  # what is left behind the last 32 rows, behind a chain of inputs, and behind a tile
BY_PANELS = {"pack-quantized, ordered", "bitsandbytes int8"} | (set() if has_table_lookup() else {"bitsandbytes nf4"})

pytestmark = pytest.mark.skipif(not has_compiler(), reason="numba is not installed")


@pytest.mark.parametrize("name", PUBLISHED)
def test_products_are_those_of_the_numbers_bit_by_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(written(PUBLISHED[name], tmp_path, (N, K))[0])
    if name in BY_PANELS:
        assert not isinstance(rows, KernelRows)
        return
    assert isinstance(rows, KernelRows)
    numbers = numbers_of(rows, slice(0, N))
    for num_rows in (1, 40):
        x = torch.randn(num_rows, K, generator=torch.Generator().manual_seed(num_rows))
        assert fits_vectors(x, [rows])
        expected = multiply_in_vectors(x, [numbers])
        assert torch.equal(multiply_in_vectors(x, [rows]), expected)
        with monkeypatch.context() as few:  # a batch for each 32 rows
            few.setattr(work_items, "SCRATCH_BYTES", 40 * rows.row_scratch_bytes)
            assert torch.equal(multiply_in_vectors(x, [rows, rows]), torch.cat([expected, expected], dim=1))


@pytest.mark.parametrize("name", ["gptq", "gptq, desc_act, 8 bits", "awq", "bitsandbytes nf4"])
def test_products_of_a_run_of_rows_begin_in_the_middle_of_what_is_shared(name: str, tmp_path: Path) -> None:
    piece, numbers = written(PUBLISHED[name], tmp_path, (1152, 192))
    part = piece.row_part(1, 3)
    assert part is not None
    rows, x = rows_of(part), torch.randn(5, 192)
    assert fits_vectors(x, [rows])
    assert torch.equal(multiply_in_vectors(x, [rows]), multiply_in_vectors(x, [numbers[384:768].contiguous()]))


def test_what_does_not_fill_vectors_goes_by_panels(tmp_path: Path) -> None:
    for name in ("gptq", "awq", "pack-quantized", "mxfp4-pack-quantized"):
        (tmp_path / name).mkdir()
        piece, numbers = written(PUBLISHED[name], tmp_path / name, (48, 96))
        rows = rows_of(piece)
        assert not isinstance(rows, KernelRows)
        assert torch.equal(numbers_of(rows, slice(0, 48)), numbers)


def test_a_model_of_plain_numbers_waits_for_no_kernel_that_decodes() -> None:
    """Which takes some ten seconds to compile, at the first time."""
    parameters = (parameter for stage in toy_shape().stages for parameter in stage.parameters)
    assert not setup.product_kernels(parameters, torch.float32).formats
