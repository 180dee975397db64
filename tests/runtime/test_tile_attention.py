"""Decode attention over bfloat16 KV: in tiles where the processor has them and pages fit, in vectors elsewhere."""

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from runtime.attention import host_attention
from runtime.attention.host_attention import can_use_tiles, decode_attention
from runtime.kernels.amx import unit
from tests.attention_cases import CASES, TOLERANCE, Case, make, naive, options

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture
def items_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_attention, "MIN_ITEM_BYTES", 1)


@pytest.fixture
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_attention, "has_matrix_unit", lambda: False)


needs_tiles = pytest.mark.skipif(not unit.may_use_tiles(), reason="the processor has no AMX")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("items_of_any_size", "no_tiles")
def test_vectors_give_it_of_bfloat16_where_there_are_no_tiles(case: Case) -> None:
    inputs = make(case, torch.bfloat16)
    out = decode_attention(*vars(inputs).values(), **options(case))
    torch.testing.assert_close(
        out.double(), naive(inputs, case), atol=TOLERANCE[torch.bfloat16], rtol=TOLERANCE[torch.bfloat16]
    )


@needs_tiles
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("items_of_any_size")
def test_tiles_are_as_exact_as_two_bfloat16_for_each_float32(case: Case) -> None:
    """Scores of peaked softmaxes are large, and so are their errors: 2^-16 of what they are sums of."""
    inputs = make(case, torch.bfloat16)
    if not can_use_tiles(inputs.k_NPHD, inputs.v_NPHD):
        pytest.skip("heads of no whole tiles")
    inputs = replace(inputs, q_BHD=inputs.q_BHD.float())
    out = decode_attention(*vars(inputs).values(), **options(case))
    assert out.dtype == torch.float32
    tolerance = 1e-5 * max(1.0, case.size)
    torch.testing.assert_close(out.double(), naive(inputs, case), atol=tolerance, rtol=tolerance)


@needs_tiles
def test_tiles_round_their_answer_as_torch_does() -> None:
    inputs = make(Case(), torch.bfloat16)
    wide = replace(inputs, q_BHD=inputs.q_BHD.float())
    out, wide_out = (decode_attention(*vars(x).values(), **options(Case())) for x in (inputs, wide))
    assert torch.equal(out, wide_out.bfloat16())


@pytest.mark.parametrize(
    ("dtype", "page_tokens", "dims", "fits"),
    [
        (torch.bfloat16, 16, (128, 128), True),
        (torch.bfloat16, 1, (192, 32), True),
        (torch.bfloat16, 17, (128, 128), False),
        (torch.bfloat16, 16, (80, 128), False),
        (torch.bfloat16, 16, (128, 80), False),
        (torch.float16, 16, (128, 128), False),
        (torch.float32, 16, (128, 128), False),
    ],
)
def test_tiles_take_bfloat16_in_whole_tiles(
    dtype: torch.dtype, page_tokens: int, dims: tuple[int, int], fits: bool
) -> None:
    k, v = (torch.zeros(1, page_tokens, 1, dim, dtype=dtype) for dim in dims)
    assert can_use_tiles(k, v) == fits


@pytest.mark.parametrize("has_tiles", [True, False])
def test_tiles_are_taken_where_there_are_any(monkeypatch: pytest.MonkeyPatch, has_tiles: bool) -> None:
    taken = []

    def record(name: str) -> Callable[..., host_attention.Work]:
        def work(q_BHGD: torch.Tensor, *_: object) -> host_attention.Work:
            taken.append(name)
            return (lambda piece: None), q_BHGD

        return work

    monkeypatch.setattr(host_attention, "has_matrix_unit", lambda: has_tiles)
    for name in ("prepare_tile_work", "prepare_vector_work"):
        monkeypatch.setattr(host_attention, name, record(name))
    for dtype in (torch.bfloat16, torch.float32):
        decode_attention(*vars(make(Case(), dtype)).values(), **options(Case()))
    assert taken == ["prepare_tile_work" if has_tiles else "prepare_vector_work", "prepare_vector_work"]


@pytest.mark.parametrize("answer", [0, -1])
def test_the_kernel_is_asked_for_tiles_and_may_refuse(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: int
) -> None:
    asked = []

    def syscall(*arguments: int) -> int:
        asked.append(arguments)
        return answer

    monkeypatch.setattr(unit, "LANES", 16)
    monkeypatch.setattr(unit, "features", lambda: {"amx-bf16": True})
    monkeypatch.setattr(unit, "config", SimpleNamespace(CPU_NAME=None, CPU_FEATURES=None))
    monkeypatch.setattr(unit.ctypes, "CDLL", lambda name: SimpleNamespace(syscall=syscall))
    with caplog.at_level(logging.INFO):
        assert unit.may_use_tiles.__wrapped__() == (answer == 0)
    assert asked == [(158, 0x1023, 18)]
    assert ("Linux denies" in caplog.text) == (answer != 0)


def test_a_processor_without_tiles_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit, "features", lambda: {"avx512f": True})
    monkeypatch.setattr(unit.ctypes, "CDLL", lambda name: pytest.fail("asked"))
    assert not unit.may_use_tiles.__wrapped__()
