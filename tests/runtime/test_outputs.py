"""Sums of float32 become an output's numbers as torch rounds them."""

import numpy as np
import pytest
import torch

from runtime.kernels.compiler import has_compiler
from runtime.linear.kernel_products import KINDS

pytestmark = pytest.mark.skipif(not has_compiler(), reason="numba is not there")


def adversarial() -> torch.Tensor:
    """Every sign and exponent with fractions on both sides of a tie of 16 bits, subnormal numbers, infinities, NaN."""
    tops = torch.arange(1 << 9, dtype=torch.int64) << 23
    random = torch.randint(1 << 23, (39,), generator=torch.Generator().manual_seed(0))
    ties = [end + (1 << bit) * odd for bit in (12, 15) for odd in (1, 3) for end in (-1, 0, 1)]
    low = torch.cat([torch.tensor([*ties, 0, (1 << 23) - 1, (1 << 23) - (1 << 12), (1 << 23) - (1 << 15)]), random])
    bits = (tops[:, None] + low[None]).to(torch.uint32).view(torch.int32)
    return bits.view(torch.float32)[:, : len(low) // 16 * 16].contiguous()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_each_is_the_nearest_number(dtype: torch.dtype) -> None:
    from numba import njit

    from runtime.kernels.linear_parts import as_output, output_at, write_rows
    from runtime.kernels.primitives import RowsAt

    @njit
    def give(numbers: np.ndarray, halves: np.ndarray, kind: int) -> None:
        height, width = numbers.shape
        write_rows(RowsAt(numbers, 0, width), height, width, output_at(as_output(halves, kind), 1, 16), kind)

    numbers = adversarial()
    out = torch.full((len(numbers) + 2, numbers.shape[1] + 32), 7.0, dtype=dtype)
    give(numbers.numpy(), out.view(torch.uint16).numpy(), KINDS[dtype])
    found, frame = out[1:-1, 16:-16].clone(), out
    torch.testing.assert_close(found, numbers.to(dtype), rtol=0, atol=0, equal_nan=True)
    frame[1:-1, 16:-16] = 7
    assert (frame == 7).all(), "something was written beside the rows"
