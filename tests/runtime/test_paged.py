"""Ragged attention over a packed lane equals plain attention of each sequence alone, whatever the passes were."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from runtime.cache.paged import PagedKV
from runtime.cache.pages import KVPages, PagePool
from runtime.errors import ConfigError
from runtime.events import LaneRun, NeedAttention
from runtime.model.attention import ragged_attention
from runtime.plan.placement.memory import PAGE_TOKENS
from runtime.stream.device import ComputeDevice

DEVICE = ComputeDevice("cpu")
LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What attention a layer wants, as transformers tells an attention function; `expand` makes keys or values of
    latents. Sinks are one for each query head."""

    sliding_window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    expand: Callable[[torch.Tensor], torch.Tensor] | None = None

    def sinks(self, num_heads: int, device: torch.device | None = None) -> torch.Tensor | None:
        return torch.linspace(-1, 2, num_heads, device=device) if self.has_sinks else None

    def plain(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """(H, S, D) each to (S, H, D), by a mask over all scores."""
        if self.expand is not None:
            k, v = self.expand(k), self.expand(v)
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        query, key = torch.arange(q.shape[1])[:, None], torch.arange(q.shape[1])[None]
        seen = key <= query
        if self.sliding_window is not None:
            seen &= key > query - self.sliding_window
        if self.chunk is not None:
            seen &= key // self.chunk == query // self.chunk
        exponents = scores.masked_fill(~seen, float("-inf")).exp()
        total = exponents.sum(-1, keepdim=True)
        sinks = self.sinks(q.shape[0])
        if sinks is not None:
            total = total + sinks.exp()[:, None, None]
        return (exponents / total @ v).transpose(0, 1)


PLAIN = Kind()
KINDS = {
    "plain": PLAIN,
    "window": Kind(sliding_window=5),
    "window of one": Kind(sliding_window=1),
    "chunks": Kind(chunk=4),
    "softcap": Kind(softcap=0.7),
    "sinks": Kind(has_sinks=True),
    "window, softcap and sinks": Kind(sliding_window=6, softcap=2.0, has_sinks=True),
    "latents": Kind(expand=lambda latents: torch.cat([latents, 1 - latents], 0)),
    "latents, window": Kind(sliding_window=7, expand=lambda latents: torch.cat([latents, 1 - latents], 0)),
}


class Row:
    """A sequence with all the queries, keys and values it will ever have, (H, S, D) per layer."""

    def __init__(
        self, num_prompt: int, num_new: int, heads: tuple[int, int], dims: tuple[int, int], seed: int, kind: Kind
    ):
        generator = torch.Generator().manual_seed(seed)
        self.num_prompt, self.capacity, self.past = num_prompt, num_prompt + num_new, 0
        shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])]
        self.qkv = [[torch.randn(h, self.capacity, d, generator=generator) for h, d in shapes] for _ in range(LAYERS)]
        self.full = [kind.plain(*qkv) for qkv in self.qkv]

    def expected(self, layer: int, new: int) -> torch.Tensor:
        return self.full[layer][self.past : self.past + new]


def attend(cache: PagedKV, layer: int, kind: Kind, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    module = torch.nn.Module()
    module.layer_idx = layer
    if kind.chunk is not None:
        module.config = SimpleNamespace(layer_types=["chunked_attention"] * LAYERS, attention_chunk_size=kind.chunk)

    sinks = kind.sinks(q.shape[1], q.device)

    def forward() -> torch.Tensor:
        keys, values = cache.update(k, v, layer)
        if kind.expand is not None:
            keys, values = (kind.expand(t[0])[None] for t in (keys, values))
        settings = {
            "sliding_window": kind.sliding_window,
            "softcap": kind.softcap,
            "s_aux": sinks,
        }
        return ragged_attention(module, q, keys, values, None, **settings)[0][0]

    run = LaneRun(forward, cache)
    event = run.switch()
    assert isinstance(event, NeedAttention)
    return run.switch(event.compute())


def run_pass(cache: PagedKV, rows: list[Row], new: list[int], kind: Kind = PLAIN) -> None:
    cache.begin_pass(new)
    for layer in range(LAYERS):
        q, k, v = (
            torch.cat([row.qkv[layer][i][:, row.past : row.past + n] for row, n in zip(rows, new, strict=True)], 1)[
                None
            ]
            for i in range(3)
        )
        out = attend(cache, layer, kind, q, k, v)
        expected = torch.cat([row.expected(layer, n) for row, n in zip(rows, new, strict=True)])
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    cache.end_pass()
    for row, n in zip(rows, new, strict=True):
        row.past += n
    assert cache.table.past == [row.past for row in rows]


def make(
    num_rows: int,
    seed: int,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    kind: Kind = PLAIN,
) -> tuple[PagedKV, list[Row]]:
    rng = random.Random(seed)
    rows = [Row(rng.randint(1, 24), rng.randint(1, 12), heads, dims, seed * 100 + n, kind) for n in range(num_rows)]
    return cache_for(rows, expands=kind.expand is not None), rows


def cache_for(rows: list[Row], *, expands: bool = False, num_pages: int = 64) -> PagedKV:
    """Pages begin as NaN: what no token has written must not be looked at."""
    cache = PagedKV(PoisonedPages(num_pages, DEVICE), expands=expands)
    for _ in rows:
        cache.table.add()
    return cache


class PoisonedPages(KVPages):
    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return super()._allocate(like).fill_(float("nan"))


@pytest.mark.parametrize("dims", [(8, 8), (12, 8)], ids=["K = V", "K wider"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("chunk", [2, 7, 1000])
def test_prefill_in_chunks_decode_and_removal_equal_plain_attention(
    chunk: int, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    cache, rows = make(6, chunk, heads, dims)
    rng = random.Random(chunk)
    while any(row.past < row.num_prompt for row in rows):
        new, left = [], chunk
        for row in rows:
            new.append(min(left, row.num_prompt - row.past))
            left -= new[-1]
        run_pass(cache, rows, new)
    while rows:
        run_pass(cache, rows, [1] * len(rows))
        for position in reversed(range(len(rows))):
            if rows[position].past == rows[position].capacity or rng.random() < 0.1:
                cache.table.remove(position)
                del rows[position]
        assert cache.table.past == [row.past for row in rows]


@pytest.mark.dealt(most=24)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_passes_may_mix_prefill_and_decode(seed: int, kind: str) -> None:
    heads = (4, 1) if KINDS[kind].expand is not None else ((4, 2), (8, 2))[seed % 2]
    cache, rows = make(6, seed, heads, kind=KINDS[kind])
    rng = random.Random(seed)
    while any(row.past < row.capacity for row in rows):
        new = [min(rng.choice([0, 1, 1, 3, 9]), row.capacity - row.past) for row in rows]
        if any(new):
            run_pass(cache, rows, new, KINDS[kind])


def test_rows_may_enter_beside_others_that_decode() -> None:
    cache, rows = make(3, 1)
    run_pass(cache, rows, [row.num_prompt for row in rows])
    rows += make(2, 2)[1]
    cache.table.add()
    cache.table.add()
    run_pass(cache, rows, [1, 1, 1, rows[3].num_prompt, rows[4].num_prompt])
    run_pass(cache, rows, [1] * 5)


def test_a_row_takes_a_page_when_it_grows_into_it_and_gives_all_back_when_it_leaves() -> None:
    rows = [Row(PAGE_TOKENS - 1, 20, (4, 2), (8, 8), seed, PLAIN) for seed in (1, 2)]
    cache = cache_for(rows, num_pages=4)
    pool = cache._pages.pool
    run_pass(cache, rows, [PAGE_TOKENS - 1, PAGE_TOKENS - 1])
    assert pool.num_free == 2
    run_pass(cache, rows, [1, 0])
    assert pool.num_free == 2
    run_pass(cache, rows, [1, 1])
    assert pool.num_free == 1
    cache.table.remove(0)
    assert pool.num_free == 3


def test_pages_that_are_used_again_hold_nothing_of_their_last_owner() -> None:
    """A row that failed may leave NaN behind."""
    rows = [Row(20, 4, (4, 2), (8, 8), seed, PLAIN) for seed in (1, 2)]
    cache = cache_for(rows, num_pages=4)
    run_pass(cache, rows, [20, 20])
    for tensor in cache._pages.layer(0, rows[0].qkv[0][1][None], rows[0].qkv[0][2][None]):
        tensor[cache.table.pages[0]] = float("nan")
    cache.table.remove(0)
    fresh = Row(17, 4, (4, 2), (8, 8), 3, PLAIN)
    cache.table.add()
    run_pass(cache, [rows[1], fresh], [1, 17])
    run_pass(cache, [rows[1], fresh], [1, 1])


def test_changed_pages_are_those_that_the_pass_writes_to() -> None:
    rows = [Row(n, 40, (4, 2), (8, 8), n, PLAIN) for n in (20, 3, 16)]
    cache = cache_for(rows)
    cache.begin_pass([20, 3, 16])
    assert (len(cache.pages), cache.dirty_pages) == (4, [0, 1, 2, 3])
    cache.end_pass()
    cache.begin_pass([1, 0, 1])
    assert (len(cache.pages), cache.dirty_pages) == (5, [1, 4])


def test_a_pool_hands_out_each_page_once() -> None:
    pool = PagePool(5)
    first = pool.allocate(3)
    pool.free(first[:1])
    second = pool.allocate(3)
    assert len({*first[1:], *second}) == 5
    with pytest.raises(AssertionError, match="1 KV pages requested, 0 of 5 are free"):
        pool.allocate(1)


@pytest.mark.parametrize("kind", ["plain", "window, softcap and sinks", "latents, window"])
def test_layers_that_travel_attend_over_the_memory_they_were_brought_to(kind: str) -> None:
    heads = (4, 1) if KINDS[kind].expand is not None else (4, 2)
    home, rows = make(5, 3, heads, kind=KINDS[kind])
    cache = PagedKV(home._pages, expands=home.expands, offloaded_layers=frozenset(range(LAYERS)))
    for _ in rows:
        cache.table.add()
    page_bytes = PAGE_TOKENS * heads[1] * 16 * 4
    tiers = [torch.zeros(64, page_bytes, dtype=torch.uint8) for _ in range(LAYERS)]
    rng = random.Random(3)
    while any(row.past < row.capacity for row in rows):
        new = [min(rng.choice([0, 1, 1, 3, 9]), row.capacity - row.past) for row in rows]
        if any(new):
            run_travelling_pass(cache, rows, new, KINDS[kind], tiers)


def run_travelling_pass(cache: PagedKV, rows: list[Row], new: list[int], kind: Kind, tiers: list[torch.Tensor]) -> None:
    """Only changed pages are carried back."""
    begin_pass = cache.begin_pass

    def begin_and_bring(new_tokens: list[int]) -> None:
        begin_pass(new_tokens)
        for layer, tier in enumerate(tiers):
            cache.bind(layer, tier[cache.pages].clone())

    cache.begin_pass = begin_and_bring
    end_pass = cache.end_pass

    def carry_back_and_end() -> None:
        for layer, tier in enumerate(tiers):
            for position in cache.dirty_pages:
                tier[cache.pages[position]] = cache._bound[layer][position]
            cache.unbind(layer)
        end_pass()

    cache.end_pass = carry_back_and_end
    run_pass(cache, rows, new, kind)
    cache.begin_pass, cache.end_pass = begin_pass, end_pass


def test_attention_outside_a_packed_lane_says_so() -> None:
    q = torch.zeros(1, 1, 1, 4)
    with pytest.raises(AssertionError, match="outside a lane"):
        ragged_attention(torch.nn.Module(), q, q, q, None)


@pytest.mark.parametrize("name", ["position_bias", "indices"])
def test_what_packed_lanes_do_not_offer_is_refused_and_not_ignored(name: str) -> None:
    q = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ConfigError, match=f"{name}.*model.lanes=padded"):
        ragged_attention(torch.nn.Module(), q, q, q, None, **{name: 1.0})
