"""The compiled decode attention gives what plain torch and a naive float64 reading of its definition give, and looks at
nothing outside of a row's range."""

import logging
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.attention import host_attention
from runtime.attention.host_attention import (
    cut_items,
    decode_attention,
    decode_attention_torch,
    make_row_tables,
    prepare_decode_attention,
)
from runtime.attention.views import Rule
from runtime.kernels import attention as vector_attention
from runtime.kernels import compiled, compiler
from runtime.kernels.amx import attention as amx_attention
from runtime.kernels.arguments import CHUNK_TOKENS, AttentionItem
from tests.attention_cases import CASES, NAN, TOLERANCE, Case, P, make, naive, options

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture
def items_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_attention, "MIN_ITEM_BYTES", 1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("items_of_any_size")
def test_kernel_and_torch_give_what_the_definition_gives(case: Case, dtype: torch.dtype) -> None:
    inputs = make(case, dtype)
    expected = naive(inputs, case)
    for attention in (decode_attention, decode_attention_torch):
        out = attention(*vars(inputs).values(), **options(case))
        assert out.dtype == dtype
        assert out.shape == expected.shape
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_queries_over_16_bit_pages_are_summed_in_float32(dtype: torch.dtype) -> None:
    inputs = make(Case(), dtype)
    inputs = replace(inputs, q_BHD=inputs.q_BHD.float())
    out = decode_attention(*vars(inputs).values(), **options(Case()))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), naive(inputs, Case()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_stored_number_is_widened_exactly(dtype: torch.dtype) -> None:
    """One position per row: its weight is 1, so the value comes out as it is stored, subnormal numbers and infinities
    too."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    v = bits.view(dtype).view(64, 1, 1, 1024)
    q, rows = torch.zeros(64, 1, 8), torch.arange(64)
    k, zeros = torch.zeros(64, 1, 1, 8, dtype=dtype), torch.zeros(64, dtype=torch.int64)
    out = decode_attention(q, k, v, rows[:, None], zeros, zeros + 1, Rule(1.0))
    assert torch.equal(out.flatten().nan_to_num(12345.0), v.float().flatten().nan_to_num(12345.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_what_is_not_a_number_is_not_hidden(bad: float, dtype: torch.dtype) -> None:
    """A broken row shows, and shows nowhere else."""
    case = Case(ends=(70, 70), begins=(0, 0))
    inputs = make(case, dtype)
    inputs.k_NPHD[inputs.tables_Bn[0, 2], 3] = bad
    out = decode_attention(*vars(inputs).values(), **options(case))
    expected = decode_attention_torch(*vars(inputs).values(), **options(case))
    assert torch.equal(out.isnan(), expected.isnan())
    assert out[0].isnan().any()
    assert not out[1].isnan().any()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.usefixtures("items_of_any_size")
def test_result_does_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    case = Case(ends=(130, 40, 700), begins=(0, 8, 0))
    inputs = make(case, dtype)
    results = [decode_attention(*vars(inputs).values(), **options(case), num_threads=n) for n in (1, 2, 5)]
    assert all(torch.equal(results[0], result) for result in results)


def test_layers_of_other_shapes_see_the_same_rows() -> None:
    """A pass brings them as the same tensors, whatever the heads of the layer."""
    rows = make(Case(), torch.float32)
    for case in (Case(), Case(num_kv_heads=4, group=1, key_dim=32, value_dim=16), Case()):
        inputs = replace(make(case, torch.float32), begins_B=rows.begins_B, ends_B=rows.ends_B)
        assert torch.equal(inputs.tables_Bn, rows.tables_Bn)
        inputs = replace(inputs, tables_Bn=rows.tables_Bn)
        for num_threads in (1, 3):
            out = decode_attention(*vars(inputs).values(), **options(case), num_threads=num_threads)
            torch.testing.assert_close(out.double(), naive(inputs, case), atol=1e-5, rtol=1e-5)


def test_rows_are_cut_once_a_pass_however_many_lanes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 lanes with two kinds of layers, lanes taking turns within each layer."""
    num_cuts, real_cut = 0, host_attention.cut_items

    def count(*args: Any) -> list[AttentionItem]:
        nonlocal num_cuts
        num_cuts += 1
        return real_cut(*args)

    monkeypatch.setattr(host_attention, "cut_items", count)
    case = Case(ends=(20,), begins=(0,))
    lanes = [make(case, torch.float32) for _ in range(32)]
    sliding = [replace(lane, begins_B=lane.begins_B + 4) for lane in lanes]
    for _ in range(2):
        for layer in (lanes, sliding):
            for lane in layer:
                decode_attention(*vars(lane).values(), **options(case), num_threads=1)
    assert num_cuts == 64


def test_callers_on_several_threads_do_not_disturb_each_other() -> None:
    cases = [Case(ends=(130, 40 + n), begins=(0, n)) for n in range(6)]
    prepared = [make(case, torch.float32) for case in cases]

    def attend(index: int) -> torch.Tensor:
        return decode_attention(*vars(prepared[index]).values(), **options(cases[index]), num_threads=2)

    alone = [attend(index) for index in range(len(cases))]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            together = pool.map(attend, range(len(cases)))
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("place", [1, 4])
def test_page_that_does_not_exist_is_refused(dtype: torch.dtype, place: int) -> None:
    inputs = make(Case(begins=(0, 0, 15, 0)), dtype)
    inputs.tables_Bn[2, place] = len(inputs.k_NPHD)
    with pytest.raises(IndexError, match="out of range"):
        decode_attention(*vars(inputs).values(), **options(Case()))


def test_range_beyond_the_table_is_refused() -> None:
    inputs = make(Case(), torch.float32)
    inputs.ends_B[0] = inputs.tables_Bn.shape[1] * P + 1
    with pytest.raises(AssertionError, match="its pages hold"):
        decode_attention(*vars(inputs).values(), **options(Case()))


@pytest.mark.parametrize("lengths", [[512] * 64, [4000, 1, 1, 0, 700], [90_000], [0, 5000, 0], [3] * 9, []])
@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_items_hold_each_head_of_each_row_once_and_about_the_same_bytes(lengths: list[int], num_threads: int) -> None:
    num_heads, position_bytes = 8, 8192
    items = cut_items(np.array(lengths, dtype=np.int64), num_heads, position_bytes, num_threads)
    held = [(row, head) for item in items for row in range(*item.rows) for head in range(*item.heads)]
    assert sorted(held) == [(row, head) for row in range(len(lengths)) for head in range(num_heads)]
    if lengths in ([512] * 64, [90_000]) and num_threads > 1:
        sizes = [sum(lengths[slice(*p.rows)]) * (p.heads[1] - p.heads[0]) for p in items]
        assert len(items) >= min(2 * num_threads, num_heads)
        assert max(sizes) <= 2 * min(sizes)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_what_is_prepared_serves_every_decode_of_its_dtype(dtype: torch.dtype) -> None:
    prepare_decode_attention(dtype)
    compiled = signatures()
    for case in (CASES["ragged"], CASES["softcap"], CASES["group of five"], CASES["heads of 80"]):
        decode_attention(*vars(make(case, dtype)).values(), **options(case))
    assert signatures() == compiled


def signatures() -> list[object]:
    """The argument types that the kernel has been compiled for."""
    kernels = (vector_attention.attend, amx_attention.attend)
    return [signature for kernel in kernels for signature in getattr(kernel, "signatures")]  # noqa: B009 - the compiler's


def test_without_the_compiler_torch_takes_over_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    compiler.can_compile.cache_clear()
    inputs = make(Case(), torch.float32)
    try:
        with caplog.at_level(logging.WARNING):
            results = [decode_attention(*vars(inputs).values(), **options(Case())) for _ in range(2)]
    finally:
        compiler.can_compile.cache_clear()
    assert torch.equal(results[0], decode_attention_torch(*vars(inputs).values(), **options(Case())))
    assert [record.message.count("numba") for record in caplog.records] == [1]


def test_where_nothing_can_be_written_it_is_compiled_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Callable[..., object]) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(compiled, "njit", lambda **options: lambda function: function)
    monkeypatch.setattr(compiled, "_LockedCache", refuse)
    monkeypatch.setattr(compiled.COMPILATION, "are_cached", True)
    assert compiled.cached_kernel(make) is make


def test_the_compiler_is_loaded_at_first_use() -> None:
    program = "import sys, runtime.attention.host_attention; print('numba' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.usefixtures("items_of_any_size")
def test_rows_that_share_pages_add_up_to_the_same_bits_as_rows_that_do_not(seed: int) -> None:
    """Groups of rows begin with the same pages, some of them with more in common than others; windows begin anywhere,
    and rows end anywhere, also in pages that are shared."""
    draw, num_heads, dim = np.random.default_rng(seed), 2, 24
    pages, tables = 0, list[list[int]]()
    for _ in range(3):
        stem = list(range(pages, pages := pages + int(draw.integers(0, 14))))
        for _ in range(int(draw.integers(1, 5))):
            num_common, num_own = int(draw.integers(0, len(stem) + 1)), int(draw.integers(1, 9))
            tables.append([*stem[:num_common], *range(pages, pages := pages + num_own)])
    width = max(map(len, tables))
    tables_Bn = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32)
    ends_B = torch.tensor([int(draw.integers(1, len(table) * P + 1)) for table in tables])
    begins_B = torch.tensor([int(draw.integers(0, end)) if draw.random() < 0.3 else 0 for end in ends_B.tolist()])
    torch.manual_seed(seed)
    k_NPHD, v_NPHD = torch.randn(2, pages, P, num_heads, dim)
    q_BHD, sinks_H = torch.randn(len(tables), 3 * num_heads, dim), torch.randn(3 * num_heads)
    own_Bn = torch.arange(tables_Bn.numel(), dtype=torch.int32).view(tables_Bn.shape)  # each row's copies
    rule = Rule(0.3, 20.0 if seed % 2 else None, sinks_H)
    shared = decode_attention(q_BHD, k_NPHD, v_NPHD, tables_Bn, begins_B, ends_B, rule)
    k_copies, v_copies = (x_NPHD[tables_Bn.long()].flatten(0, 1) for x_NPHD in (k_NPHD, v_NPHD))
    assert torch.equal(shared, decode_attention(q_BHD, k_copies, v_copies, own_Bn, begins_B, ends_B, rule))


def test_positions_count_as_shared_as_far_as_whole_chunks_of_full_pages_are_the_same() -> None:
    tables_Bn = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 5, 6], [9, 2, 3, 4, 5, 6]])
    ends_B, per_chunk = torch.tensor([96, 96, 79, 96]), CHUNK_TOKENS // 16
    assert per_chunk == 4
    rows = make_row_tables(tables_Bn, torch.zeros(4), ends_B, 16)
    assert rows.shared_B.tolist() == [64, 64, 64, 0]
    rows = make_row_tables(tables_Bn, torch.zeros(4), torch.tensor([96, 63, 96, 96]), 16)
    assert rows.shared_B.tolist() == [0, 0, 0, 0]
    assert make_row_tables(tables_Bn[:1], torch.zeros(1), ends_B[:1], 16).shared_B.tolist() == [0]
