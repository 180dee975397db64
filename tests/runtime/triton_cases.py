"""Kernels on stored matrices in Triton's interpreter, which computes on a CPU: `test_device_kernels.py` runs these in a
process of their own, as TRITON_INTERPRET=1 must be set before Triton is imported."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.formats.kinds.window4 import escape_words, pack_window4, stack_escapes
from runtime.linear import device_codes
from runtime.linear.device_codes import DTYPES, decode, grouped_mm, multiply, multiply_groups
from runtime.linear.packed_rows import CodedRows
from runtime.linear.rows import Codes, Rows, stack_codes
from runtime.linear.window4_rows import Window4Rows
from tests.dealt import with_slow_others
from tests.packed import words_of
from tests.published_formats import PUBLISHED
from tests.runtime.stored_rows import CPU, MAKERS, in_memory, numbers_of, published_experts, random, rows_of
from tests.runtime.test_published_formats import written

SMALLEST, ODD = (8, 64), (72, 288)  # the second ends inside of tiles
STACKED = ("gptq_v2, zero points", "gptq, desc_act, 8 bits", "awq", "pack-quantized, zero points",
           "float-quantized, rows", "mxfp4-pack-quantized", "nvfp4-pack-quantized", "bitsandbytes fp4")  # fmt: skip
COUNTS = ([0, 3, 0, 19, 1], [0, 0, 17, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1])


@pytest.fixture(autouse=True)
def in_the_interpreter() -> Iterator[None]:
    assert os.environ["TRITON_INTERPRET"] == "1"
    with device_codes.interpreted():
        yield


def codes_of(rows: Rows) -> Codes:
    codes = rows.codes()
    assert codes is not None
    return codes


def are_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    assert actual.dtype == expected.dtype
    return bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())


def exact_product(x_MK: torch.Tensor, w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the numbers, and how far a sum of float32 that is rounded to x's dtype may be off."""
    x, w = x_MK.double(), w_NK.double()
    rounding = 2.0**-24 * x.shape[1] * (x.abs() @ w.abs().t())
    return x @ w.t(), rounding + (x @ w.t()).abs() * torch.finfo(x_MK.dtype).eps / 2


def assert_product(found_MN: torch.Tensor, x_MK: torch.Tensor, w_NK: torch.Tensor) -> None:
    expected, most = exact_product(x_MK, w_NK)
    assert found_MN.dtype == x_MK.dtype
    assert bool(((found_MN.double() - expected).abs() <= most).all())


def shape_for(name: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows of our own formats and bitsandbytes' blocks are whole groups of 64."""
    if "bitsandbytes" not in name and (name in PUBLISHED or "every" in name or "GGUF" in name):
        return shape
    return shape[0] + 1, -(-shape[1] // 64) * 64


@pytest.mark.dealt(most=10)
@pytest.mark.parametrize("name", MAKERS)
def test_numbers_are_those_of_torch_s_operators_bit_by_bit(name: str, tmp_path: Path) -> None:
    for shape, dtypes in ((SMALLEST, DTYPES), (ODD, DTYPES[:1])):
        rows = MAKERS[name](shape_for(name, shape), tmp_path, CPU)
        numbers = numbers_of(rows)
        for dtype in dtypes:
            out = torch.full(rows.shape, 7.0, dtype=dtype)
            decode(codes_of(rows), out)
            assert are_equal(out, numbers.to(dtype)), (shape, dtype)


MULTIPLIED = [name for name in MAKERS if name not in ("window4", "every exponent of MXFP4")]


@pytest.mark.dealt(most=4)
@pytest.mark.parametrize("name", with_slow_others(MULTIPLIED, MULTIPLIED[::3]))
def test_products_are_those_of_the_numbers(name: str, tmp_path: Path) -> None:
    rows = MAKERS[name](shape_for(name, (40, 160)), tmp_path, CPU)
    numbers = numbers_of(rows).nan_to_num(0, 0, 0)
    for num_rows, dtype in ((1, torch.float32), (19, torch.bfloat16)):
        x = random(num_rows, rows.shape[1]).to(dtype)
        actual = multiply(x, codes_of(rows))
        if "E4M3" in name or "E5M2" in name:  # infinities and NaN are among all bytes
            is_plain = numbers_of(rows).to(dtype).isfinite().all(1)
            assert not bool(actual[:, ~is_plain].isfinite().any())
            assert_product(actual[:, is_plain], x, numbers.to(dtype)[is_plain])
        else:
            assert_product(actual, x, numbers.to(dtype))


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("name", ["gptq_v2, zero points", "awq", "bitsandbytes fp4", "pack-quantized, zero points"])
def test_a_run_of_rows_begins_in_the_middle_of_a_word(name: str, tmp_path: Path) -> None:
    piece, numbers = written(PUBLISHED[name], tmp_path, (792, 64))
    parts = 6 if piece.is_interleaved else 9  # of 132 rows, more than a tile has, and no multiple of a word's 8
    for turn in (1, 4):
        part = piece.row_part(turn, parts)
        assert part is not None
        (rows,), height = rows_of(in_memory([part])), 792 // parts
        expected = numbers[turn * height : (turn + 1) * height]
        out, x = torch.empty(height, 64), random(2, 64)
        decode(codes_of(rows), out)
        assert torch.equal(out, expected)
        assert_product(multiply(x, codes_of(rows)), x, expected)


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("name", with_slow_others(STACKED, STACKED[::3]))
def test_experts_are_one_stack_which_a_launch_decodes_and_multiplies(name: str, tmp_path: Path) -> None:
    experts = rows_of(published_experts(name, 5, (24, 128), tmp_path))
    numbers = torch.stack([numbers_of(rows) for rows in experts])
    codes = stack_codes([codes_of(rows) for rows in experts])
    assert codes is not None
    out = torch.full((5, 40, 128), 7.0)
    decode(codes, out[:, 8:32])
    assert torch.equal(out[:, 8:32], numbers)
    assert bool((out[:, :8] == 7).all() and (out[:, 32:] == 7).all())
    assert_grouped(lambda x, ends: multiply_groups(x, codes, 5, ends), numbers.bfloat16(), COUNTS[:2])


@pytest.mark.parametrize("name", with_slow_others(PUBLISHED, [*PUBLISHED][::8]))
def test_joined_experts_are_decoded_as_one(name: str, tmp_path: Path) -> None:
    experts = published_experts(name, 3, (24, 128), tmp_path)
    assert experts.join is not None
    rows, out = experts.join(0, range(3)), torch.empty(3, 24, 128)
    if rows is not None:
        assert device_codes.try_decode(rows, out)
        assert torch.equal(out, torch.stack([numbers_of(each) for each in rows_of(experts)]))
    assert (rows is None) == (name == "pack-quantized, ordered")


def test_what_is_made_of_factors_is_no_stack(tmp_path: Path) -> None:
    experts = rows_of(published_experts("bitsandbytes nf4", 3, (24, 192), tmp_path))
    assert stack_codes([codes_of(rows) for rows in experts]) is None


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_experts_are_one_tall_matrix(counts: list[int]) -> None:
    """Gate and up of an expert may lie below each other in memory that holds more."""
    tall = MAKERS["int4-groups of 32"]((5 * 24, 128), Path(), CPU)
    numbers = numbers_of(tall).view(5, 24, 128)
    out = torch.full((5, 24 + 3, 128), 7.0)
    decode(codes_of(tall), out[:, :24])
    assert torch.equal(out[:, :24], numbers)
    assert_grouped(lambda x, ends: multiply_groups(x, codes_of(tall), 5, ends), numbers.bfloat16(), [counts])
    assert_grouped(lambda x, ends: multiply_groups(x, codes_of(tall), 5, ends), numbers, [counts])


@pytest.mark.dealt("dtype", "counts")
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_stacks_are_multiplied_as_torch_multiplies_them(dtype: torch.dtype, counts: list[int]) -> None:
    """As nn.Linear has weights, transposed, and a part of what lies side by side."""
    numbers = random(5, 37, 100).to(dtype)
    for stack in (numbers.mT, numbers.mT.contiguous(), torch.cat([numbers, numbers], dim=1)[:, 20:57].mT):
        assert_grouped(lambda x, ends, stack=stack: grouped_mm(x, stack, offs=ends), stack.mT.contiguous(), [counts])


def assert_grouped(products, numbers_ENK: torch.Tensor, all_counts: list[list[int]] | tuple[list[int], ...]) -> None:
    for counts in all_counts:
        x = random(sum(counts), numbers_ENK.shape[2]).to(numbers_ENK.dtype)
        ends = torch.tensor(counts).cumsum(0).int()
        actual = products(x, ends)
        assert actual.shape == (len(x), numbers_ENK.shape[1])
        for expert, count in enumerate(counts):
            rows = slice(int(ends[expert]) - count, int(ends[expert]))
            assert_product(actual[rows], x[rows], numbers_ENK[expert])


def window4_experts(count: int, shape: tuple[int, int]) -> list[Window4Rows]:
    packed = [pack_window4(words_of((random(*shape, seed=turn) * 10.0 ** (-turn)).numpy())) for turn in range(count)]
    bodies = torch.stack([torch.from_numpy(each.body) for each in packed])
    companions = torch.from_numpy(stack_escapes([[each] for each in packed]))
    return [Window4Rows(body, [companion], shape[0] + 1) for body, companion in zip(bodies, companions, strict=True)]


def test_packed_experts_have_escapes_of_their_own() -> None:
    experts = window4_experts(3, (9, 128))
    codes = stack_codes([codes_of(rows) for rows in experts])
    assert codes is not None
    out = torch.empty(3, 9, 128, dtype=torch.bfloat16)
    decode(codes, out)
    assert torch.equal(out.float(), torch.stack([numbers_of(rows) for rows in experts]))


def test_joined_packed_experts_have_escapes_behind_each_other() -> None:
    """As many as each has."""
    scales = [random(9, 1, seed=turn).mul(10 * turn).exp2() for turn in (1, 2)]
    packed = [pack_window4(words_of((random(9, 128) * scale).numpy())) for scale in scales]
    assert len({len(each.columns) for each in packed}) == 2
    companions = [torch.from_numpy(escape_words(each, len(each.columns))) for each in packed]
    rows = Window4Rows(torch.from_numpy(np.concatenate([each.body for each in packed])), companions, 10)
    out = torch.empty(2, 9, 128)
    decode(codes_of(rows), out)
    assert torch.equal(out.view(18, 128), numbers_of(rows))


def test_a_run_of_packed_rows_has_its_own_escapes() -> None:
    (rows,) = window4_experts(1, (9, 128))
    part = Window4Rows(rows._body_NB[4:7], rows._escapes, 10, first_row=4)
    out = torch.empty(3, 128)
    decode(codes_of(part), out)
    assert torch.equal(out, numbers_of(rows)[4:7])


def test_a_damaged_table_of_escapes_reaches_nothing_outside_of_its_rows() -> None:
    """Columns right behind a row's last one, and rows that begin before the first escape and end behind the last."""
    packed = pack_window4(words_of((random(9, 128) * random(9, 128, seed=1).mul(20).exp2()).numpy()))
    companion = torch.from_numpy(escape_words(packed, len(packed.columns)))
    damaged, num_words = companion.clone(), (len(companion) - 11) // 3 * 2
    damaged[1:11] = torch.tensor([-5, (1 << 31) - 1] * 5)
    damaged[11 : 11 + num_words] = torch.arange(128, 128 + 2 * num_words).short().view(torch.int32)
    assert num_words > 50
    memory = torch.full((32, 512), 7.0)
    decode(codes_of(Window4Rows(torch.from_numpy(packed.body), [damaged], 10)), memory[1:10, 1:129])
    memory[1:10, 1:129] = 7.0
    assert bool((memory == 7).all())


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("name", ["gptq", "awq", "mxfp4-pack-quantized", "int4-groups of 64", "window4"])
def test_what_works_is_taken_and_tried_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_codes, "_check_results", {})
    rows = MAKERS[name]((64, 128), tmp_path, CPU)
    assert device_codes.can_decode(rows, torch.bfloat16)
    assert device_codes.can_multiply(rows, torch.bfloat16) == (name != "window4")
    assert device_codes.can_multiply_groups(rows, torch.float16) == (name != "window4")
    assert device_codes.can_group(random(3, 40, 50))
    tried = dict(device_codes._check_results)
    monkeypatch.setattr(device_codes, "decode", None)
    assert device_codes.can_decode(rows, torch.bfloat16)
    assert device_codes._check_results == tried


def test_rows_beyond_what_32_bits_count_are_reached() -> None:
    """The memory between them is never touched."""
    rows = MAKERS["int8-rows"]((3, 64), Path(), CPU)
    assert isinstance(rows, CodedRows)
    stride = (1 << 30) + 64
    far = torch.empty(2 * stride + 64, dtype=torch.uint8).as_strided((3, 64), (stride, 1))
    far.copy_(rows._body_NB)
    out = torch.empty(rows.shape)
    decode(codes_of(CodedRows(far, rows._scales_NG, rows._encoding)), out)
    assert torch.equal(out, numbers_of(rows))
