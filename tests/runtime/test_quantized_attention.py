"""The compiled decode attention over quantised pages, held against dequantised ones in plain torch."""

from dataclasses import dataclass

import pytest
import torch

from runtime.attention.device_attention import decode_on_device
from runtime.attention.host_attention import decode_quantized
from runtime.attention.layout import PassLayout, QuantizedKV
from runtime.attention.page_codes import PageFormat
from runtime.attention.views import DecodeRows, Reach, Rule
from runtime.config.settings import KVDType
from runtime.kernels.compiler import has_compiler

CPU = torch.device("cpu")
LENGTHS = (1, 16, 17, 200, 64, 79, 130)  # positions of each row, the new one included
PLAIN, EVERYTHING = Rule(0.2), Reach()

pytestmark = pytest.mark.skipif(not has_compiler(), reason="numba is not installed")


@dataclass(frozen=True, kw_only=True)
class Heads:
    num: int
    group: int
    key_dim: int
    value_dim: int


MANY, ODD = Heads(num=3, group=6, key_dim=64, value_dim=64), Heads(num=2, group=1, key_dim=22, value_dim=38)


def made(dtype: KVDType, heads: Heads, *, apart: int = 0) -> tuple[torch.Tensor, QuantizedKV, DecodeRows]:
    """Queries, pages of random numbers in any order, `apart` bytes between them, and rows that decode."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    counts = [-(-length // 16) for length in LENGTHS]
    page_format = PageFormat(dtype, heads.num, heads.key_dim, heads.value_dim)
    k, v = (draw(sum(counts) + 1, 16, heads.num, dim) + 1 for dim in (heads.key_dim, heads.value_dim))
    room = torch.full((len(k), page_format.page_bytes + apart), 0x7F, dtype=torch.uint8)
    room[:, : page_format.page_bytes] = page_format.encode(k, v)
    order = torch.randperm(len(k), generator=generator)[: sum(counts)].split(counts)
    numbers = tuple(range(len(LENGTHS)))
    rows = DecodeRows(numbers, tuple(length - 1 for length in LENGTHS), numbers, CPU)
    slots = [*reversed(numbers)]
    layout = PassLayout([own.tolist() for own in order], [], rows, [], CPU, expands=False, slots=slots)
    tails = draw(len(LENGTHS), 16, heads.num, heads.key_dim), draw(len(LENGTHS), 16, heads.num, heads.value_dim)
    kv = QuantizedKV(page_format, room[:, : page_format.page_bytes], tails, {}, layout)
    return draw(len(LENGTHS), heads.num * heads.group, heads.key_dim), kv, rows


@pytest.mark.parametrize("heads", [MANY, ODD])
@pytest.mark.parametrize("dtype", [KVDType.int8, KVDType.int4])
def test_the_kernel_gives_what_dequantised_pages_give(dtype: KVDType, heads: Heads) -> None:
    """Whole rows, the last nine positions, chunks of forty; capped and with sinks; by one thread and by three."""
    q, kv, rows = made(dtype, heads, apart=48)
    sinks = torch.linspace(-1, 1, heads.num * heads.group)
    for reach in (EVERYTHING, Reach(window=9), Reach(window=30), Reach(chunk=40)):
        for rule in (PLAIN, Rule(0.2, softcap=2.0), Rule(0.2, sinks=sinks)):
            expected = decode_on_device(q, kv, rows, reach, rule)
            for num_threads in (1, 3):
                found = decode_quantized(q, kv, rows, reach, rule, num_threads)
                torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [KVDType.int8, KVDType.int4])
def test_a_row_gets_the_same_bits_beside_others_and_alone(dtype: KVDType) -> None:
    q, kv, rows = made(dtype, MANY)
    together = decode_quantized(q, kv, rows, EVERYTHING, PLAIN, 2)
    alone = DecodeRows((3,), (LENGTHS[3] - 1,), (0,), CPU)
    pages, slots = (
        [kv.layout.page_numbers(row).tolist() for row in range(len(LENGTHS))],
        [kv.layout.slot(r) for r in range(7)],
    )
    layout = PassLayout(pages, [], alone, [], CPU, expands=False, slots=slots)
    single = QuantizedKV(kv.format, kv.pages, kv.tails, {}, layout)
    assert torch.equal(decode_quantized(q[3:4], single, alone, EVERYTHING, PLAIN, 1)[0], together[3])


@pytest.mark.parametrize("dtype", [KVDType.int8, KVDType.int4])
def test_pages_that_a_row_does_not_see_may_hold_anything(dtype: KVDType) -> None:
    q, kv, rows = made(dtype, MANY)
    before = decode_quantized(q, kv, rows, Reach(window=9), PLAIN)
    kv.pages[kv.layout.page_numbers(3)[:10]] = 0xFF
    assert torch.equal(decode_quantized(q, kv, rows, Reach(window=9), PLAIN), before)


def test_a_page_that_does_not_exist_is_an_error() -> None:
    q, kv, rows = made(KVDType.int8, MANY)
    fewer = QuantizedKV(kv.format, kv.pages[:3], kv.tails, {}, kv.layout)
    with pytest.raises(IndexError, match="KV page"):
        decode_quantized(q, fewer, rows, EVERYTHING, PLAIN, 1)
