"""Layers whose keys and values travel are spread over the depth, and every byte of theirs is in a ledger."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from runtime.config.settings import KVTier
from runtime.plan.placement.kv import SEGMENT_BYTES, KVCost, KVLayout, kv_cost, kv_layout, offloaded_kv_layers
from runtime.plan.placement.memory import PAGE_TOKENS
from runtime.plan.shape.extents import ALIGNMENT_BYTES
from runtime.plan.shape.model import ModelShape
from runtime.store.kv_file import KVFile
from runtime.units import KIB
from tests.toy import toy_shape

TRAVELLING_TIERS = (KVTier.cpu, KVTier.nvme)
HYBRID = (0, 0, 0, 100, 0, 0, 0, 300)  # states in most layers; latents of odd sizes


def hybrid() -> ModelShape:
    return replace_kv(toy_shape(8), HYBRID)


def replace_kv(shape: ModelShape, kv_layer_bytes: tuple[int, ...]) -> ModelShape:
    return replace(shape, kv_layer_bytes=kv_layer_bytes)


def layout_of(shape: ModelShape, tier: KVTier, fraction: float = 0.5, *, has_device: bool = True) -> KVLayout:
    travelling = offloaded_kv_layers(shape, tier, fraction, has_device=has_device)
    return kv_layout(shape, tier, travelling, num_pages=10, slot_pages=4, num_slots=3)


def total(cost: KVCost, name: str) -> int:
    return sum(entry.num_bytes for entry in (*cost.compute, *cost.host) if entry.name == name)


@pytest.mark.parametrize("tier", TRAVELLING_TIERS)
@pytest.mark.parametrize("fraction", [0, 0.1, 0.25, 0.5, 0.9, 1])
@pytest.mark.parametrize("num_layers", [1, 2, 8, 61])
def test_the_share_that_stays_is_the_fraction_and_spread_evenly(num_layers: int, fraction: float, tier: KVTier) -> None:
    travelling = offloaded_kv_layers(toy_shape(num_layers), tier, fraction, has_device=True)
    staying = sorted(set(range(num_layers)) - set(travelling))
    assert abs(len(staying) - fraction * num_layers) <= 0.5
    gaps = {later - earlier for earlier, later in pairwise(staying)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("tier", "has_device", "expected"),
    [
        (KVTier.device, True, ()),
        (KVTier.device, False, ()),
        (KVTier.cpu, False, ()),
        (KVTier.cpu, True, (0, 1, 2, 3)),
        (KVTier.nvme, True, (0, 1, 2, 3)),
        (KVTier.nvme, False, (0, 1, 2, 3)),
    ],
)
def test_nothing_travels_to_where_it_is_already(tier: KVTier, has_device: bool, expected: tuple[int, ...]) -> None:
    assert offloaded_kv_layers(toy_shape(4), tier, 0, has_device=has_device) == expected


def test_layers_without_keys_and_values_neither_travel_nor_count() -> None:
    assert offloaded_kv_layers(hybrid(), KVTier.nvme, 0, has_device=False) == (3, 7)
    assert offloaded_kv_layers(hybrid(), KVTier.nvme, 0.5, has_device=False) == (3,)


def test_windows_of_padded_lanes_stay_and_count_where_compute_is() -> None:
    shape = replace(toy_shape(4, is_packed=False), bounded_layers=frozenset({0, 2}))
    assert offloaded_kv_layers(shape, KVTier.nvme, 0, has_device=True) == (1, 3)
    assert offloaded_kv_layers(shape, KVTier.cpu, 0.5, has_device=True) == (1,)
    cost = kv_cost(shape, layout_of(shape, KVTier.nvme, 0), has_device=True)
    assert total(cost, "KV cache") == 10 * PAGE_TOKENS * 2 * shape.kv_layer_bytes[0]


@pytest.mark.parametrize("tier", TRAVELLING_TIERS)
@pytest.mark.parametrize("fraction", [0, 0.5, 1])
@pytest.mark.parametrize("shape", [toy_shape(8), hybrid()], ids=["toy", "hybrid"])
def test_pages_that_stay_and_pages_that_travel_are_all_of_them(
    shape: ModelShape, fraction: float, tier: KVTier
) -> None:
    layout = layout_of(shape, tier, fraction)
    cost = kv_cost(shape, layout, has_device=True)
    staying, away = total(cost, "KV cache"), layout.num_pages * sum(layout.page_bytes.values())
    assert staying + away == 10 * PAGE_TOKENS * shape.kv_bytes_per_token
    elsewhere = total(cost, "KV pages") if tier is KVTier.cpu else cost.disk_bytes
    assert away <= elsewhere <= 2 * away or elsewhere == layout.tier_bytes


def test_where_nothing_travels_the_ledger_has_one_entry() -> None:
    cost = kv_cost(toy_shape(), layout_of(toy_shape(), KVTier.device), has_device=True)
    assert [entry.name for entry in cost.compute] == ["KV cache"]
    assert (cost.host, cost.disk_bytes) == ((), 0)


@pytest.mark.parametrize(
    ("tier", "has_device", "compute", "host"),
    [
        (KVTier.cpu, True, ["KV cache", "KV slots"], ["KV pages"]),
        (KVTier.nvme, True, ["KV cache", "KV slots"], ["KV staging", "KV checksums"]),
        (KVTier.nvme, False, ["KV cache", "KV slots", "KV checksums"], []),
    ],
)
def test_each_memory_has_the_entries_of_the_tier(
    tier: KVTier, has_device: bool, compute: list[str], host: list[str]
) -> None:
    layout = layout_of(toy_shape(), tier, has_device=has_device)
    cost = kv_cost(toy_shape(), layout, has_device=has_device)
    assert [entry.name for entry in cost.compute] == compute
    assert [entry.name for entry in cost.host] == host
    assert total(cost, "KV slots") == 3 * 4 * max(layout.page_bytes.values())


@pytest.mark.parametrize("has_device", [True, False])
def test_what_is_kept_of_each_page_on_disk_is_counted(has_device: bool, tmp_path: Path) -> None:
    layout = layout_of(toy_shape(), KVTier.nvme, has_device=has_device)
    with KVFile(layout, directory=str(tmp_path)) as file:
        kept = file._checksums.nbytes
    assert total(kv_cost(toy_shape(), layout, has_device=has_device), "KV checksums") == kept == 10 * 4 * 8


def test_pages_on_disk_begin_at_whole_blocks_and_do_not_overlap() -> None:
    layout = layout_of(hybrid(), KVTier.nvme, 0)
    begins = [layout.offset_bytes(layer) for layer in (3, 7)]
    assert begins == [0, 10 * layout.stride_bytes(3)]
    assert all(layout.stride_bytes(layer) % ALIGNMENT_BYTES == 0 for layer in (3, 7))
    assert layout.tier_bytes == begins[1] + 10 * layout.stride_bytes(7)


def test_pages_in_host_memory_have_no_padding() -> None:
    layout = layout_of(hybrid(), KVTier.cpu, 0)
    assert [layout.stride_bytes(layer) for layer in (3, 7)] == [PAGE_TOKENS * 100, PAGE_TOKENS * 300]


@pytest.mark.parametrize("num_pages", [1, 127, 128, 129, 1000])
def test_many_pages_are_pinned_in_pieces_that_waste_little(num_pages: int) -> None:
    """In one piece of a power of two, 129 pages would take as much memory as 256."""
    layout = replace(layout_of(toy_shape(1), KVTier.cpu, 0), num_pages=num_pages, page_bytes={0: 128 * KIB})
    pages = layout.segment_pages(0)
    assert sum(pages) == num_pages
    assert all(n * layout.stride_bytes(0) <= SEGMENT_BYTES for n in pages)
    pinned = total(kv_cost(toy_shape(1), layout, has_device=True), "KV pages")
    assert layout.tier_bytes <= pinned <= layout.tier_bytes + SEGMENT_BYTES


def test_a_page_larger_than_a_segment_has_one_of_its_own() -> None:
    layout = replace(layout_of(toy_shape(1), KVTier.cpu, 0), page_bytes={0: SEGMENT_BYTES + 4})
    assert layout.segment_pages(0) == (1,) * layout.num_pages
