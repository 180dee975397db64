"""A stage is laid out once, however often its size is asked for; what is tied lies in memory once."""

from collections import Counter
from collections.abc import Iterable

import pytest

from runtime.config.settings import OffloadConfig, RuntimeConfig, Tier
from runtime.plan.placement import placer
from runtime.plan.placement.load import Load
from runtime.plan.placement.placement import Budgets
from runtime.plan.placement.placer import choose_placement
from runtime.plan.shape import stage_sizes
from runtime.plan.shape.extents import SlotLayout, group_layout, group_tied_stages
from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.shapes import Stage
from runtime.units import MIB
from tests.toy import sizes_of, toy_shape


@pytest.mark.parametrize("resident", [(), (0,), (9,), (0, 9), (0, 3, 9), tuple(range(10))])
@pytest.mark.parametrize("is_tied", [True, False])
def test_resident_stages_take_the_buffers_that_hold_them(is_tied: bool, resident: tuple[int, ...]) -> None:
    shape = toy_shape(is_tied=is_tied)
    groups = group_tied_stages(shape.stages[index] for index in resident)
    expected = sum(group_layout(group).num_bytes for group in groups)
    assert shape.sizes.resident_bytes(frozenset(resident)) == expected


def search(shape: ModelShape, budgets: Budgets) -> None:
    config = RuntimeConfig(offload=OffloadConfig(tier=Tier.nvme))
    assert not choose_placement(shape, config, budgets, Load.from_lanes(shape, [sizes_of([30] * 8)] * 4, 512)).fits


def test_however_many_placements_are_tried_a_stage_is_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out = Counter[int]()

    def counted(stages: Iterable[Stage]) -> SlotLayout:
        members = list(stages)
        laid_out.update(stage.index for stage in members)
        return group_layout(members)

    monkeypatch.setattr(stage_sizes, "group_layout", counted)
    monkeypatch.setattr(stage_sizes, "slot_layout", lambda stage: counted([stage]))
    shape = toy_shape(40)
    for device_bytes in (None, MIB, 200 * MIB):
        search(shape, Budgets(host_bytes=MIB, device_bytes=device_bytes))
    assert dict(laid_out) == dict.fromkeys(range(42), 1)


def test_where_weights_alone_are_too_many_nothing_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """But the last one, whose ledger says why."""
    num_made = 0
    exchange_size = placer.exchange_size

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal num_made
        num_made += 1
        return exchange_size(*args, **kwargs)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(placer, "exchange_size", counted)
    search(toy_shape(40), Budgets(host_bytes=MIB))
    assert num_made == 1
