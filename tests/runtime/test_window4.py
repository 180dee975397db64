"""Packed bfloat16 is the original, bit by bit: as rows, and in every product."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from runtime.formats.kinds import window4
from runtime.formats.kinds.window4 import pack_window4
from runtime.linear import backends, work_items
from runtime.linear.backends import linear
from runtime.linear.kernel_products import fits_vectors, multiply_in_vectors
from runtime.linear.stored import StoredWeight
from runtime.linear.window4_rows import Window4Rows
from tests.packed import Words, adversaries, packed_rows, tensor_of, words_of

SHAPE = (192, 512)
CASES = adversaries(SHAPE)
CHOICES = [slice(None), slice(0, 1), slice(50, 150), torch.tensor([3, 3, 191, 0, 3, 96])]
pytestmark = pytest.mark.usefixtures("two_threads")


def trained_like(shape: tuple[int, int]) -> Words:
    return words_of(np.random.default_rng(0).standard_t(4, shape) * 0.02)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_rows_are_the_original_bit_by_bit(case: str, choice: slice | torch.Tensor) -> None:
    """Compiled, and by the operators that a device has."""
    words, rows = CASES[case], packed_rows(CASES[case], spare_escapes=7)
    right = (words.astype(np.uint32) << 16)[choice.numpy() if isinstance(choice, torch.Tensor) else choice]
    for decode in (rows.dequantize, rows.decode):
        out = torch.full(right.shape, 7.0)
        decode(choice, out)
        assert np.array_equal(out.numpy().view(np.uint32), right)


def test_a_matrix_that_is_packed_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pack_window4(CASES["rows of mixed scales"])
    monkeypatch.setattr(window4, "ROWS_AT_ONCE_NUMBERS", 7 * SHAPE[1])
    for one, other in zip(whole, pack_window4(CASES["rows of mixed scales"]), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("case", ["normal", "Student's t", "30 % zeros", "rows of mixed scales"])
def test_it_takes_three_quarters_of_the_bytes(case: str) -> None:
    words = adversaries((512, 2048))[case]
    assert pack_window4(words).num_bytes / words.nbytes <= 0.755


@pytest.mark.parametrize("num_rows", [1, 3, 8, 64, 300])
@pytest.mark.parametrize("shape", [(131, 512), (1000, 320), (2 * 256 + 41, 64 * 9), (96, 1024)], ids=str)
def test_products_are_those_of_the_unpacked_weight_bit_by_bit(num_rows: int, shape: tuple[int, int]) -> None:
    words = trained_like(shape)
    words[7] = words_of(np.full(shape[1], 1e-20))  # a row of escapes
    x = torch.randn(num_rows, shape[1], generator=torch.Generator().manual_seed(0))
    rows = packed_rows(words)
    assert fits_vectors(x, [rows])
    assert torch.equal(multiply_in_vectors(x, [rows]), multiply_in_vectors(x, [tensor_of(words)]))


def test_packed_and_plain_blocks_lie_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that does not pack stays raw beside those that do; inputs may pass by in several runs."""
    first, second = trained_like((160, 512)), trained_like((96, 512))
    x = torch.randn(200, 512, generator=torch.Generator().manual_seed(0))
    right = multiply_in_vectors(x, [tensor_of(first), tensor_of(second)])
    assert torch.equal(multiply_in_vectors(x, [packed_rows(first), tensor_of(second)]), right)
    monkeypatch.setattr(work_items, "INPUT_BYTES", 32 * 512 * 4)
    assert torch.equal(multiply_in_vectors(x, [tensor_of(first), packed_rows(second)]), right)


def test_numbers_that_are_none_pass_through_a_product() -> None:
    words = trained_like((64, 1024))
    words[5, 70], words[6, 900], words[9, 3] = 0x7FC1, 0xFF80, 0x7F80
    x = torch.ones(2, 1024)
    right = multiply_in_vectors(x, [tensor_of(words)])
    torch.testing.assert_close(multiply_in_vectors(x, [packed_rows(words)]), right, rtol=0, atol=0, equal_nan=True)
    assert right[0, [5, 6, 9]].isfinite().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stored_weight_looks_up_flips_and_multiplies_packed_rows(dtype: torch.dtype) -> None:
    words = trained_like(SHAPE)
    rows, plain, x = packed_rows(words), tensor_of(words), torch.randn(5, SHAPE[1]).to(dtype)
    packed = StoredWeight([[rows]], SHAPE, dtype, is_stacked=False)
    raw = StoredWeight([[plain]], SHAPE, dtype, is_stacked=False)
    ids = torch.tensor([[0, 191], [33, 33]])
    assert torch.equal(F.embedding(ids, packed), F.embedding(ids, plain.to(dtype)))
    assert torch.equal(F.linear(x, packed), F.linear(x, raw))
    y = torch.randn(5, SHAPE[0]).to(dtype)
    assert torch.equal(torch.matmul(y, packed), torch.matmul(y, raw))
    assert torch.equal(packed.dequantized(), plain.to(dtype))


def test_a_run_of_rows_finds_its_escapes_in_those_of_the_whole() -> None:
    words = CASES["rows of mixed scales"]
    packed = packed_rows(words)
    part = Window4Rows(packed._body_NB[64:160], packed._escapes, SHAPE[0] + 1, first_row=64)
    out, x = torch.empty(96, SHAPE[1]), torch.randn(3, SHAPE[1])
    for decode in (part.dequantize, part.decode):
        decode(slice(None), out)
        assert torch.equal(out.bfloat16(), tensor_of(words[64:160]))
    assert torch.equal(linear(x, [part]), linear(x, [tensor_of(words[64:160])]))


def test_products_of_bfloat16_are_those_of_the_unpacked_weight_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "has_matrix_unit", lambda: False)
    words = trained_like((192, 512))
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert torch.equal(linear(x, [packed_rows(words)]), linear(x, [tensor_of(words)]))


DAMAGES = {  # of the starts of rows, and the columns of escapes
    "starts far behind the end": lambda starts, columns: starts.fill(2**32 - 2),
    "an end far behind the end": lambda starts, columns: starts[40:].fill(2**32 - 1),
    "starts that descend": lambda starts, columns: starts.sort() or starts[:].put(range(len(starts)), starts[::-1]),
    "columns behind the last": lambda starts, columns: columns.fill(2**16 - 1),
    "columns that descend": lambda starts, columns: columns.sort() or columns.put(range(len(columns)), columns[::-1]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_of_escapes_reaches_nothing_outside_of_its_rows(damage: str) -> None:
    """A packed store may be a stranger's, whose sums are right: no index of its bytes is trusted."""
    shape = (48, 2048)  # several chains of a product's inputs
    words = adversaries(shape)["rows of mixed scales"]
    words[::3] = words_of(np.full(shape[1], 1e-20))
    rows = packed_rows(words)
    _, starts, columns, _ = (part.numpy() for part in rows._parts)
    DAMAGES[damage](starts.view(np.uint32), columns.view(np.uint16))
    around = torch.full((shape[0] + 80, shape[1]), 7.0)  # as many rows beside them as columns go up to
    for decode in (rows.dequantize, rows.decode):
        decode(slice(None), around[40:-40])
        assert (around[:40] == 7).all()
        assert (around[-40:] == 7).all()
    x = torch.ones(3, shape[1])
    assert multiply_in_vectors(x, [rows]).shape == (3, 48)
