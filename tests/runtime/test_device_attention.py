"""Attention on an accelerator equals plain attention of each sequence alone, with flash kernels and with fused ones,
and costs few launches and no wait."""

import random
from collections.abc import Callable

import pytest
import torch

from runtime.attention import device_attention
from runtime.cache.paged import PagedKV
from runtime.config.settings import Tier
from runtime.measure.attention import UniformRows, attend_prompt
from runtime.stream.device import ComputeDevice
from tests.attention_doubles import FlashCall, FlashDouble, install_flash, refuse_groups
from tests.fake_device import FakeDevice
from tests.host_counters import CountedDevice, counting, mark
from tests.host_counts import HostCounts
from tests.runtime.test_beside import beside
from tests.runtime.test_fidelity import config_for, tokens
from tests.runtime.test_paged import (
    KINDS,
    LAYERS,
    PLAIN,
    Kind,
    PoisonedPages,
    Row,
    attend,
    run_pass,
    run_travelling_pass,
)
from tests.support import Reference


@pytest.fixture(params=["flash", "flash by name", "fused"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    refuse_groups(monkeypatch)
    if request.param != "fused":
        install_flash(monkeypatch, (torch.float32,), by_operator=request.param == "flash")
    return request.param


def cache_for(
    rows: list[Row], kind: Kind, travels: frozenset[int] = frozenset(), device: FakeDevice | None = None
) -> PagedKV:
    pages = PoisonedPages(64, device or FakeDevice((False,)))
    cache = PagedKV(pages, expands=kind.expand is not None, offloaded_layers=travels)
    for _ in rows:
        cache.table.add()
    return cache


def rows_of(num_rows: int, seed: int, kind: Kind, dims: tuple[int, int] = (8, 8)) -> list[Row]:
    rng = random.Random(seed)
    heads = (4, 1) if kind.expand is not None else (4, 2)
    return [Row(rng.randint(1, 24), rng.randint(1, 12), heads, dims, seed * 100 + n, kind) for n in range(num_rows)]


def run_mixed(rows: list[Row], seed: int, once: Callable[[list[int]], None]) -> None:
    rng = random.Random(seed)
    while any(row.past < row.capacity for row in rows):
        new = [min(rng.choice([0, 1, 1, 3, 9]), row.capacity - row.past) for row in rows]
        if any(new):
            once(new)


@pytest.mark.dealt
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_passes_may_mix_prefill_and_decode(way: str, kind: str, seed: int) -> None:
    rows = rows_of(6, seed, KINDS[kind])
    cache = cache_for(rows, KINDS[kind])
    run_mixed(rows, seed, lambda new: run_pass(cache, rows, new, KINDS[kind]))


@pytest.mark.parametrize("dims", [(16, 8), (12, 12)], ids=["values narrower", "no multiple of eight"])
def test_heads_of_other_sizes(way: str, dims: tuple[int, int]) -> None:
    rows = rows_of(5, 4, PLAIN, dims)
    cache = cache_for(rows, PLAIN)
    run_mixed(rows, 4, lambda new: run_pass(cache, rows, new))


@pytest.mark.parametrize("kind", ["plain", "chunks", "window, softcap and sinks"])
def test_what_is_gathered_at_a_time_may_be_less_than_a_lane(
    way: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_attention, "GATHERED_BYTES", 40 * 2 * 2 * 8 * 4)
    monkeypatch.setattr(device_attention, "SCORED_BYTES", 1)
    rows = rows_of(6, 9, KINDS[kind])
    cache = cache_for(rows, KINDS[kind])
    run_mixed(rows, 9, lambda new: run_pass(cache, rows, new, KINDS[kind]))


@pytest.mark.parametrize("kind", ["plain", "window", "latents, window"])
def test_layers_that_travel(way: str, kind: str) -> None:
    """Their pages lie apart, and a row's have other numbers."""
    rows = rows_of(5, 3, KINDS[kind])
    cache = cache_for(rows, KINDS[kind], travels=frozenset(range(LAYERS)))
    num_heads = rows[0].qkv[0][1].shape[0]
    tiers = [torch.zeros(64, 16 * num_heads * 16 * 4, dtype=torch.uint8) for _ in range(LAYERS)]
    run_mixed(rows, 3, lambda new: run_travelling_pass(cache, rows, new, KINDS[kind], tiers))


@pytest.mark.parametrize(
    ("kind", "new", "calls"),
    [
        ("plain", [20, 20, 20], [FlashCall(3, (-1, 0))]),
        ("window", [20, 20, 20], [FlashCall(3, (4, 0))]),
        ("chunks", [8, 8, 5], [FlashCall(6, (-1, 0))]),
        ("plain", [1, 1, 1], [FlashCall(3, (-1, -1))]),
        ("window", [1, 0, 1], [FlashCall(2, (-1, -1))]),
        ("plain", [1, 5, 1], [FlashCall(2, (-1, -1)), FlashCall(1, (-1, 0))]),
        ("sinks", [5, 3, 1], [FlashCall(1, (-1, -1)), FlashCall(2, (-1, 0))]),
        ("softcap", [5, 3, 1], []),
    ],
)
def test_a_lane_is_one_call_for_its_prompts_and_one_for_rows_that_decode(
    kind: str, new: list[int], calls: list[FlashCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    double = install_flash(monkeypatch, (torch.float32,))
    rows = [Row(24, 4, (4, 2), (8, 8), seed, KINDS[kind]) for seed in range(3)]
    cache = cache_for(rows, KINDS[kind])
    for before in [[16, 4, 3]] if 1 in new else []:
        run_pass(cache, rows, before, KINDS[kind])
    double.calls.clear()
    run_pass(cache, rows, new, KINDS[kind])
    assert double.calls == calls * LAYERS


def counts_of(kind: Kind, before: list[int], new: list[int]) -> list[HostCounts]:
    """Of a pass over these new tokens: what it takes to begin, and of each layer what is stored and attended to."""
    with counting() as counter, torch.inference_mode():
        rows = [Row(24, 4, (4, 2), (8, 8), seed, kind) for seed in range(len(new))]
        cache = cache_for(rows, kind, device=CountedDevice((False,)))
        run_pass(cache, rows, before, kind)
        counter.take()
        cache.begin_pass(new)
        found = [counter.take()]
        for layer in range(LAYERS):
            q, k, v = (
                mark(
                    torch.cat(
                        [row.qkv[layer][i][:, row.past : row.past + n] for row, n in zip(rows, new, strict=True)], 1
                    )[None]
                )
                for i in range(3)
            )
            counter.take()
            attend(cache, layer, kind, q, k, v)
            found.append(counter.take())
        return found


MOST_LAUNCHES = {  # of a layer, beside flash kernels, one each; two store keys and values, four are the tests' latents
    ("flash", "plain", "decode"): 4,
    ("flash", "window", "decode"): 4,
    ("flash", "sinks", "decode"): 7,
    ("flash", "window", "whole"): 3,
    ("flash", "window", "cut"): 5,
    ("flash", "plain", "mixed"): 9,
    ("fused", "plain", "decode"): 6,
    ("fused", "window", "decode"): 6,
    ("fused", "softcap", "decode"): 15,
    ("fused", "latents, window", "decode"): 16,
}
PASSES = {
    "decode": ([9, 5, 20], [1, 1, 1]),
    "whole": ([0, 0, 2], [9, 9, 0]),
    "cut": ([9, 4, 2], [3, 4, 2]),
    "mixed": ([9, 9, 0], [1, 5, 9]),
}


@pytest.mark.parametrize(("asked", "most"), MOST_LAUNCHES.items(), ids=str)
def test_no_layer_waits_or_uploads_and_few_operators_are_launched(
    asked: tuple[str, str, str], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, kind, of_pass = asked
    if way == "flash":
        install_flash(monkeypatch, (torch.float32,))
    begin, *layers = counts_of(KINDS[kind], *PASSES[of_pass])
    for each in (begin, *layers):
        assert each.syncs == {}
    assert len(begin.copies) + len(layers[0].copies) <= 7
    assert layers[1].copies == []
    assert layers[1].num_launches <= most


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", ["llama", "gpt-oss", "deepseek-v3"])
def test_tokens_through_flash_kernels_equal_transformers(
    family: str, reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in pieces beside rows that decode; keys and values of the first two in host memory, where the CPU attends
    for rows that decode."""
    double, ref = install_flash(monkeypatch, (torch.float32,)), reference(family)
    assert tokens(beside(ref, chunk=7), ref.prompts, FakeDevice((False,))) == ref.expected
    assert double.calls


def test_what_is_measured_is_what_a_run_computes(way: str) -> None:
    """By `jobs.measure` and before a run: rows of one length over pages in any order, and one prompt."""
    q, k, v = (torch.randn(3, heads, 20, 8) for heads in (4, 2, 2))
    pages = torch.randn(2, 6, 16, 2, 8)
    tables = [[4, 0], [1, 5], [2, 3]]
    found = UniformRows(tables, 20, FakeDevice()).attend(q[:, :, 0], *pages)
    assert torch.allclose(found, UniformRows(tables, 20, ComputeDevice("cpu")).attend(q[:, :, 0], *pages), atol=1e-5)
    prompt = attend_prompt(q[:1], k[:1], v[:1], FakeDevice())
    assert torch.allclose(prompt[None], PLAIN.plain(q[0], k[0], v[0]), atol=1e-5)


def test_the_double_refuses_what_kernels_do() -> None:
    """Each of these is an error of the caller's that a device would answer with an error, or with wrong numbers."""
    double = FlashDouble((torch.bfloat16,))
    q, k = torch.zeros(6, 4, 16, dtype=torch.bfloat16), torch.zeros(9, 2, 16, dtype=torch.bfloat16)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 5, 9], dtype=torch.int32)
    double(q, k, k, *bounds, 4, 5, window_size=(-1, 0), enable_gqa=True)
    crooked = torch.zeros(6 * 64 + 1, dtype=torch.bfloat16)[1:].view(6, 4, 16)
    for wrong in (
        lambda: double(q, k, k, *bounds, 4, 5),  # not told of groups
        lambda: double(q.float(), k.float(), k.float(), *bounds, 4, 5, enable_gqa=True),
        lambda: double(q, k, k[..., :8], *bounds, 4, 5, enable_gqa=True),
        lambda: double(q, k, k, bounds[0].long(), bounds[1], 4, 5, enable_gqa=True),
        lambda: double(q, k[:8], k[:8], *bounds, 4, 5, enable_gqa=True),
        lambda: double(q, k, k, *bounds, 4, 4, enable_gqa=True),
        lambda: double(crooked, k, k, *bounds, 4, 5, enable_gqa=True),
    ):
        with pytest.raises(AssertionError):
            wrong()


@pytest.mark.slow("runtime/test_device_attention.py::test_tokens_through_flash_kernels_equal_transformers")
def test_a_run_waits_for_the_device_neither_to_attend_nor_to_begin_a_pass(
    reference: Callable[[str], Reference],
) -> None:
    ref = reference("llama")
    with counting() as counter:
        assert tokens(config_for(ref, tier=Tier.cpu), ref.prompts, CountedDevice((False, True))) == ref.expected
    ours = ("runtime/attention/", "runtime/cache/", "runtime/model/attention.py", "runtime/engine/lanes/packed.py")
    hosts = ("runtime/attention/host_", "runtime/cache/host_")  # a host's own waits, as measured
    waits = [what for what in counter.take().syncs if not any(name in what for name in hosts)]
    assert [what for what in waits if any(name in what for name in ours)] == []
    assert waits  # the sampler's
