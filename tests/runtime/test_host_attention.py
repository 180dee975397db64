"""The compiled decode attention gives what plain torch and a naive float64 reading of its definition give, and looks at
nothing outside of a row's range."""

import hashlib
import logging
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.cache import attention_kernel, host_attention
from runtime.cache.host_attention import cut, decode_attention, prepare_decode_attention
from runtime.cache.plain_attention import decode_attention_torch

pytestmark = pytest.mark.usefixtures("two_threads")

P = 16
NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    begins: tuple[int, ...] = (0, 0, 0, 0)
    ends: tuple[int, ...] = (1, 16, 77, 130)
    num_kv_heads: int = 2
    group: int = 4
    key_dim: int = 64
    value_dim: int = 64
    softcap: float | None = None
    has_sinks: bool = False
    is_in_one_run: bool = True  # keys and then values of a page side by side, so that pages lie apart
    size: float = 1.0  # of queries


@dataclass(frozen=True)
class Inputs:
    q_BHD: torch.Tensor
    k_NPHD: torch.Tensor
    v_NPHD: torch.Tensor
    tables_Bn: torch.Tensor
    begins_B: torch.Tensor
    ends_B: torch.Tensor


CASES = {
    "ragged": Case(),
    "one query head": Case(group=1, num_kv_heads=3),
    "group of five": Case(group=5),
    "group of eight": Case(group=8, num_kv_heads=1),
    "heads of 24": Case(key_dim=24, value_dim=24),
    "heads of 80": Case(key_dim=80, value_dim=80),
    "heads of 96": Case(key_dim=96, value_dim=96, group=1),
    "heads of 3": Case(key_dim=3, value_dim=5, group=3),
    "expanded latents": Case(key_dim=192, value_dim=128, group=1, num_kv_heads=4),
    "windows and chunks": Case(begins=(0, 15, 64, 127), ends=(1, 17, 77, 130)),
    "rows without positions": Case(begins=(0, 5, 9, 130), ends=(0, 5, 40, 130)),
    "no rows": Case(begins=(), ends=()),
    "softcap": Case(softcap=5.0, size=8.0),
    "softcap and small scores": Case(softcap=50.0, size=0.01),
    "sinks": Case(has_sinks=True),
    "sinks and softcap": Case(has_sinks=True, softcap=2.0, begins=(0, 3, 0, 100)),
    "peaked": Case(size=10.0),
    "keys apart from values": Case(is_in_one_run=False),
}


def make(case: Case, dtype: torch.dtype) -> Inputs:
    """Pages are handed out at random; what no row sees is NaN, and so are pages and table entries that none uses."""
    random = torch.Generator().manual_seed(5)
    num_rows, num_pages_of = len(case.ends), [-(-end // P) for end in case.ends]
    num_pages = sum(num_pages_of) + 2
    width = max(num_pages_of, default=0) + 1
    order = torch.randperm(num_pages, generator=random).tolist()
    shapes = [(num_pages, P, case.num_kv_heads, dim) for dim in (case.key_dim, case.value_dim)]
    if case.is_in_one_run:
        sizes = [torch.Size(shape[1:]).numel() for shape in shapes]
        run = torch.full((num_pages, sum(sizes)), NAN, dtype=dtype)
        k, v = (part.unflatten(1, shape[1:]) for part, shape in zip(run.split(sizes, 1), shapes, strict=True))
    else:
        k, v = (torch.full(shape, NAN, dtype=dtype) for shape in shapes)
    tables = torch.full((num_rows, width), -1, dtype=torch.int32)
    for row, (begin, end) in enumerate(zip(case.begins, case.ends, strict=True)):
        for position in range(begin, end):
            if tables[row, position // P] < 0:
                tables[row, position // P] = order.pop()
            page = int(tables[row, position // P])
            k[page, position % P] = torch.randn(k.shape[2:], generator=random).to(dtype)
            v[page, position % P] = torch.randn(v.shape[2:], generator=random).to(dtype)
    q = case.size * torch.randn(num_rows, case.num_kv_heads * case.group, case.key_dim, generator=random)
    return Inputs(q.to(dtype), k, v, tables, torch.tensor(case.begins, dtype=torch.int32), torch.tensor(case.ends))


def options(case: Case) -> dict[str, object]:
    sinks = torch.linspace(-1, 3, case.num_kv_heads * case.group) if case.has_sinks else None
    return {"scale": case.key_dim**-0.5, "softcap": case.softcap, "sinks_H": sinks}


def naive(inputs: Inputs, case: Case) -> torch.Tensor:
    """Position by position and head by head in float64, as the definition reads."""
    out = torch.zeros(*inputs.q_BHD.shape[:2], case.value_dim, dtype=torch.float64)
    sinks = options(case)["sinks_H"]
    for row, (begin, end) in enumerate(zip(case.begins, case.ends, strict=True)):
        places = [(int(inputs.tables_Bn[row, p // P]), p % P) for p in range(begin, end)]
        for head in range(inputs.q_BHD.shape[1]) if places else ():
            k_SD = torch.stack([inputs.k_NPHD[page, at, head // case.group] for page, at in places]).double()
            v_SD = torch.stack([inputs.v_NPHD[page, at, head // case.group] for page, at in places]).double()
            scores = k_SD @ inputs.q_BHD[row, head].double() * case.key_dim**-0.5
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            if isinstance(sinks, torch.Tensor):
                scores = torch.cat([scores, sinks[head, None].double()])
            out[row, head] = torch.softmax(scores, 0)[: len(places)] @ v_SD
    return out


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of 16 bits: their own rounding of `out`


@pytest.fixture
def pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_attention, "MIN_PIECE_BYTES", 1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("pieces_of_any_size")
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
    out = decode_attention(q, k, v, rows[:, None], zeros, zeros + 1, scale=1.0)
    assert torch.equal(out.flatten().nan_to_num(12345.0), v.float().flatten().nan_to_num(12345.0))


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_what_is_not_a_number_is_not_hidden(bad: float) -> None:
    """A broken row shows, and shows nowhere else."""
    case = Case(ends=(70, 70), begins=(0, 0))
    inputs = make(case, torch.float32)
    inputs.k_NPHD[inputs.tables_Bn[0, 2], 3] = bad
    out = decode_attention(*vars(inputs).values(), **options(case))
    expected = decode_attention_torch(*vars(inputs).values(), **options(case))
    assert torch.equal(out.isnan(), expected.isnan())
    assert out[0].isnan().any()
    assert not out[1].isnan().any()


@pytest.mark.usefixtures("pieces_of_any_size")
def test_result_does_not_depend_on_the_number_of_threads() -> None:
    case = Case(ends=(130, 40, 700), begins=(0, 8, 0))
    inputs = make(case, torch.float32)
    results = [decode_attention(*vars(inputs).values(), **options(case), num_threads=n) for n in (1, 2, 5)]
    assert all(torch.equal(results[0], result) for result in results)


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


def test_page_that_does_not_exist_is_refused() -> None:
    inputs = make(Case(), torch.float32)
    inputs.tables_Bn[2, 1] = len(inputs.k_NPHD)
    with pytest.raises(IndexError, match="does not exist"):
        decode_attention(*vars(inputs).values(), **options(Case()))


def test_range_beyond_the_table_is_refused() -> None:
    inputs = make(Case(), torch.float32)
    inputs.ends_B[0] = inputs.tables_Bn.shape[1] * P + 1
    with pytest.raises(AssertionError, match="its pages hold"):
        decode_attention(*vars(inputs).values(), **options(Case()))


@pytest.mark.parametrize("lengths", [[512] * 64, [4000, 1, 1, 0, 700], [90_000], [0, 5000, 0], [3] * 9, []])
@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_pieces_hold_each_head_of_each_row_once_and_about_the_same_bytes(lengths: list[int], num_threads: int) -> None:
    num_heads, position_bytes = 8, 8192
    pieces = cut(np.array(lengths, dtype=np.int64), num_heads, position_bytes, num_threads)
    held = [(row, head) for piece in pieces for row in range(*piece.rows) for head in range(*piece.heads)]
    assert sorted(held) == [(row, head) for row in range(len(lengths)) for head in range(num_heads)]
    if lengths in ([512] * 64, [90_000]) and num_threads > 1:
        sizes = [sum(lengths[slice(*p.rows)]) * (p.heads[1] - p.heads[0]) for p in pieces]
        assert len(pieces) >= min(2 * num_threads, num_heads)
        assert max(sizes) <= 2 * min(sizes)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_what_is_prepared_serves_every_decode_of_its_dtype(dtype: torch.dtype) -> None:
    prepare_decode_attention(dtype)
    compiled = list(signatures())
    for case in (CASES["ragged"], CASES["softcap"], CASES["group of five"]):
        decode_attention(*vars(make(case, dtype)).values(), **options(case))
    assert signatures() == compiled


def signatures() -> list[object]:
    """The argument types that the kernel has been compiled for."""
    return getattr(attention_kernel.attend, "signatures")  # noqa: B009 - the compiler's, which annotations do not know


def test_without_the_compiler_torch_takes_over_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_attention, "find_spec", lambda name: None)
    host_attention._has_compiler.cache_clear()
    inputs = make(Case(), torch.float32)
    try:
        with caplog.at_level(logging.WARNING):
            results = [decode_attention(*vars(inputs).values(), **options(Case())) for _ in range(2)]
    finally:
        host_attention._has_compiler.cache_clear()
    assert torch.equal(results[0], decode_attention_torch(*vars(inputs).values(), **options(Case())))
    assert [record.message.count("numba") for record in caplog.records] == [1]


def test_where_nothing_can_be_written_it_is_compiled_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(cache: bool = False, **options: object) -> Callable[[Callable[..., object]], Callable[..., object]]:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(attention_kernel, "njit", njit)
    assert attention_kernel.kept(make) is make


def test_what_is_kept_on_disk_follows_the_kernels_parts_too() -> None:
    """numba compiles anew when the kernel's file changes, and looks at no other."""
    kernel = Path(attention_kernel.__file__)
    parts = sorted({*kernel.parent.glob("attention_*.py")} - {kernel})
    source = b"".join(part.read_bytes() for part in parts)
    assert hashlib.sha256(source).hexdigest() == attention_kernel.PARTS_SHA256


def test_the_compiler_is_loaded_at_first_use() -> None:
    program = "import sys, runtime.cache.host_attention; print('numba' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"
