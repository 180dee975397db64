"""Whichever way the streams of a device race, pages arrive as they were stored: slots are never reused too early."""

import itertools
from functools import partial
from pathlib import Path

import pytest

from runtime.config.settings import KVTier
from tests.fake_device import Careless, FakeDevice
from tests.kv_support import TIERS, Model, opened, play

RACES = [  # who is late: compute, the weights' copies, copies in, copies out
    (compute, True, into, out) for compute, into, out in itertools.product([False, True], repeat=3)
]


@pytest.mark.dealt(most=16)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("late", RACES, ids=lambda late: "".join("EL"[is_late] for is_late in late))
@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_no_race_gives_wrong_bytes(num_ahead: int, late: tuple[bool, ...], tier: KVTier, tmp_path: Path) -> None:
    """E: that stream overtakes what it does not wait for. L: it runs when it is waited for, and no sooner."""
    device = FakeDevice(late, defers_compute=True)
    with opened(tier, device, tmp_path, num_slots=num_ahead + 1) as stream:
        assert play(device, stream, num_ahead=num_ahead) == []


@pytest.mark.parametrize(
    ("tier", "forgetful", "late"),
    [
        (KVTier.cpu, 0, (False, True, True, True)),  # compute does not wait for pages to arrive
        (KVTier.cpu, 2, (True, True, False, True)),  # pages arrive while compute uses the slot
        (KVTier.cpu, 3, (True, True, True, False)),  # pages leave before compute has written them
        (KVTier.nvme, 0, (False, True, True, True)),
        (KVTier.nvme, 3, (True, True, True, False)),
    ],
)
def test_the_fake_device_shows_a_wait_that_is_missing(
    tier: KVTier, forgetful: int, late: tuple[bool, ...], tmp_path: Path
) -> None:
    device = Careless(late, forgetful=forgetful, defers_compute=True)
    with opened(tier, device, tmp_path) as stream:
        assert play(device, stream, num_ahead=2) != []


def look_while_the_next_pages_arrive(device: FakeDevice, directory: Path) -> list[int]:
    """What compute sees of a page of 1s when it is as late as it may be, and a page of 2s is read into its slot."""
    seen: list[int] = []
    with opened(KVTier.nvme, device, directory, num_slots=1) as stream:
        for page, value in enumerate((1, 2)):
            stream.fetch(0, 0, [page])
            device.compute(partial(stream.acquire(0, 0).fill_, value))
            stream.store(0, 0, [0])
        stream.fetch(0, 0, [0])
        held = stream.acquire(0, 0)
        device.compute(lambda: seen.extend(held.unique().tolist()))
        stream.store(0, 0, [])
        stream.fetch(0, 1, [1])
        arriving = stream._fetched[0, 1][0].pending_fetch
        assert arriving is not None
        arriving.result(10)
        device.wait_for_compute()
    return seen


def test_a_disk_does_not_fill_a_slot_that_compute_still_looks_at(tmp_path: Path) -> None:
    late = (True, True, False, True)
    assert look_while_the_next_pages_arrive(FakeDevice(late, defers_compute=True), tmp_path) == [1]
    assert look_while_the_next_pages_arrive(Careless(late, forgetful=2, defers_compute=True), tmp_path) == [2]


@pytest.mark.parametrize("late", RACES, ids=lambda late: "".join("EL"[is_late] for is_late in late))
@pytest.mark.parametrize("tier", TIERS)
def test_pages_on_their_way_back_arrive_before_they_are_fetched(
    tier: KVTier, late: tuple[bool, ...], tmp_path: Path
) -> None:
    """Also into another slot than the one that they leave."""
    device = FakeDevice(late, defers_compute=True)
    with opened(tier, device, tmp_path) as stream:
        model = Model(device, stream)
        for lane, pages in enumerate([[5, 6], [6, 5, 7], [7, 6]]):
            stream.fetch(0, lane, pages)
            model.compute(0, lane, pages, [0, 1], 10 + lane)
        device.wait_for_compute()
        assert model.problems == []
