"""Ragged attention over a packed lane equals plain attention of each sequence alone, whatever the passes were."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from runtime.cache.ragged import RaggedKV
from runtime.errors import ConfigError
from runtime.model.attention import ragged_attention
from runtime.model.events import LaneRun
from runtime.stream.device import ComputeDevice
from runtime.units import round_up

DEVICE = ComputeDevice("cpu")
LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What attention a layer wants, as transformers tells an attention function; `expand` makes keys or values of
    latents."""

    sliding_window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    num_sinks: int = 0
    expand: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def sinks(self) -> torch.Tensor | None:
        return torch.linspace(-1, 2, self.num_sinks) if self.num_sinks else None

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
        if self.sinks is not None:
            total = total + self.sinks.exp()[:, None, None]
        return (exponents / total @ v).transpose(0, 1)


PLAIN = Kind()
KINDS = {
    "plain": PLAIN,
    "window": Kind(sliding_window=5),
    "window of one": Kind(sliding_window=1),
    "chunks": Kind(chunk=4),
    "softcap": Kind(softcap=0.7),
    "sinks": Kind(num_sinks=4),
    "window, softcap and sinks": Kind(sliding_window=6, softcap=2.0, num_sinks=4),
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


def attend(cache: RaggedKV, layer: int, kind: Kind, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    module = torch.nn.Module()
    module.layer_idx = layer
    if kind.chunk is not None:
        module.config = SimpleNamespace(layer_types=["chunked_attention"] * LAYERS, attention_chunk_size=kind.chunk)

    def forward() -> torch.Tensor:
        keys, values = cache.update(k, v, layer)
        if kind.expand is not None:
            keys, values = (kind.expand(t[0])[None] for t in (keys, values))
        settings = {"sliding_window": kind.sliding_window, "softcap": kind.softcap, "s_aux": kind.sinks}
        return ragged_attention(module, q, keys, values, None, **settings)[0][0]

    return LaneRun(forward, cache).switch()


def run_pass(cache: RaggedKV, rows: list[Row], new: list[int], kind: Kind = PLAIN) -> None:
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
    assert cache.past == [row.past for row in rows]


def make(
    num_rows: int,
    seed: int,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    kind: Kind = PLAIN,
) -> tuple[RaggedKV, list[Row]]:
    rng = random.Random(seed)
    rows = [Row(rng.randint(1, 24), rng.randint(1, 12), heads, dims, seed * 100 + n, kind) for n in range(num_rows)]
    rows.sort(key=lambda row: -row.capacity)
    return RaggedKV([row.capacity for row in rows], DEVICE, expands=kind.expand is not None), rows


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
                moved = cache.remove(position)
                rows[position] = rows[moved]
                del rows[moved]
        assert cache.past == [row.past for row in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_passes_may_mix_prefill_and_decode(seed: int, kind: str) -> None:
    heads = (4, 1) if KINDS[kind].expand is not None else (4, 2)
    cache, rows = make(6, seed, heads, kind=KINDS[kind])
    rng = random.Random(seed)
    while any(row.past < row.capacity for row in rows):
        new = [min(rng.choice([0, 1, 1, 3, 9]), row.capacity - row.past) for row in rows]
        if any(new):
            run_pass(cache, rows, new, KINDS[kind])


def test_rows_of_one_rounded_capacity_share_a_tensor() -> None:
    cache = RaggedKV([40, 33, 32, 17, 5], DEVICE)
    assert [(group.capacity, len(group.past)) for group in cache.groups] == [(48, 2), (32, 2), (16, 1)]
    assert all(group.capacity == round_up(group.capacity, 16) for group in cache.groups)


def test_capacities_must_be_sorted() -> None:
    with pytest.raises(AssertionError, match="neighbours"):
        RaggedKV([5, 40], DEVICE)


def prefilled_group(num_prompts: tuple[int, ...]) -> tuple[RaggedKV, list[Row]]:
    rows = [Row(n, 32 - n, (4, 2), (8, 8), n, PLAIN) for n in num_prompts]
    cache = RaggedKV([row.capacity for row in rows], DEVICE)
    run_pass(cache, rows, [row.num_prompt for row in rows])
    return cache, rows


def test_nan_in_keys_that_no_token_has_written_does_not_leak() -> None:
    cache, rows = prefilled_group((20, 3, 9))
    for tensor in cache.groups[0].keys.values():
        for row, past in enumerate(cache.past):
            tensor[row, :, past:] = float("nan")
    run_pass(cache, rows, [1, 1, 1])


def test_fresh_values_are_zeros_so_that_hidden_positions_add_nothing() -> None:
    cache, _ = prefilled_group((20, 3, 9))
    for tensor in cache.groups[0].values.values():
        assert all(not tensor[row, :, past:].any() for row, past in enumerate(cache.past))


def test_a_row_that_failed_with_nan_does_not_harm_the_row_that_takes_its_place() -> None:
    cache, rows = prefilled_group((25, 20, 3))
    for tensor in (*cache.groups[0].keys.values(), *cache.groups[0].values.values()):
        tensor[0] = float("nan")
    moved = cache.remove(0)
    rows = [rows[moved], rows[1]]
    run_pass(cache, rows, [1, 1])


def test_attention_outside_a_packed_lane_says_so() -> None:
    q = torch.zeros(1, 1, 1, 4)
    with pytest.raises(AssertionError, match="outside a lane"):
        ragged_attention(torch.nn.Module(), q, q, q, None)


@pytest.mark.parametrize("name", ["position_bias", "indices"])
def test_what_packed_lanes_do_not_offer_is_refused_and_not_ignored(name: str) -> None:
    q = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ConfigError, match=f"{name}.*model.lanes=padded"):
        ragged_attention(torch.nn.Module(), q, q, q, None, **{name: 1.0})
