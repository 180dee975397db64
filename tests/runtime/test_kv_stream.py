"""Pages arrive as they were stored, whichever way the streams of the device race; slots are never reused too early."""

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from runtime.config import KVTier
from runtime.errors import KVFileError
from runtime.plan import kv as kv_plan
from runtime.plan.kv import KVLayout
from runtime.store.kv_file import KVFile
from runtime.stream.device import ComputeDevice
from runtime.stream.kv import KVStream
from tests.fake_device import Careless, FakeDevice

NUM_PAGES, SLOT_PAGES = 24, 8
PAGE_BYTES = {0: 4096, 2: 5000}
LAYERS = tuple(PAGE_BYTES)
RACES = [  # who is late: compute, the weights' copies, copies in, copies out
    (compute, True, into, out) for compute, into, out in itertools.product([False, True], repeat=3)
]
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
TIERS = [KVTier.cpu, KVTier.nvme]


@contextmanager
def opened(
    tier: KVTier, device: ComputeDevice, directory: Path, *, num_slots: int = 3, **settings: int
) -> Iterator[KVStream]:
    layout = KVLayout(tier=tier, page_bytes=PAGE_BYTES, num_pages=NUM_PAGES, slot_pages=SLOT_PAGES, num_slots=num_slots)
    if tier is KVTier.cpu:
        with KVStream(layout, device) as stream:
            yield stream
    else:
        with KVFile(layout, directory=str(directory), **settings) as file, KVStream(layout, device, file) as stream:
            yield stream


class Model:
    """What the tier should hold, and the compute that reads and writes it: queued where the device defers compute."""

    def __init__(self, device: ComputeDevice, stream: KVStream):
        self._device, self._stream = device, stream
        self.truth = {(layer, page): 0 for layer in LAYERS for page in range(NUM_PAGES)}
        self.problems: list[str] = []

    def compute(self, layer: int, lane: int, pages: list[int], changed: list[int], value: int) -> None:
        """Checks all pages and writes `value` into some, as one piece of work; then stores those."""
        held = self._stream.acquire(layer, lane)
        assert held.shape == (len(pages), PAGE_BYTES[layer])
        expected = [self.truth[layer, page] for page in pages]
        if isinstance(self._device, FakeDevice):
            self._device.compute(lambda: self._work(layer, pages, held, expected, changed, value))
        else:
            self._work(layer, pages, held, expected, changed, value)
        self.truth |= {(layer, pages[place]): value for place in changed}
        self._stream.store(layer, lane, changed)

    def _work(
        self, layer: int, pages: list[int], held: torch.Tensor, expected: list[int], changed: list[int], value: int
    ) -> None:
        for page, row, wanted in zip(pages, held, expected, strict=True):
            if not bool((row == wanted).all()):
                self.problems.append(f"layer {layer} page {page}: {row.unique().tolist()} instead of {wanted}")
        for place in changed:
            held[place] = value


def play(device: ComputeDevice, stream: KVStream, num_turns: int = 30, num_ahead: int = 1) -> list[str]:
    """Lanes with pages of their own, layer by layer, each fetched `num_ahead` turns before it computes. Sequences
    grow, pages are given back and taken again. Returns what was wrong."""
    generator = torch.Generator().manual_seed(num_ahead)
    lanes = [list(range(lane, NUM_PAGES, 3)) for lane in range(3)]
    model = Model(device, stream)
    turns = [(LAYERS[turn // 3 % 2], turn % 3) for turn in range(num_turns)]
    fetched: dict[int, list[int]] = {}
    for turn, (layer, lane) in enumerate(turns):
        for ahead in range(turn, min(turn + num_ahead + 1, num_turns)):
            if ahead not in fetched:
                order = torch.randperm(len(lanes[turns[ahead][1]]), generator=generator).tolist()
                fetched[ahead] = [lanes[turns[ahead][1]][place] for place in order][: 3 + ahead % 6]
                stream.fetch(*turns[ahead], fetched[ahead])
        pages = fetched[turn]
        changed = [place for place in range(len(pages)) if (turn + place) % 3] if turn % 4 else []
        model.compute(layer, lane, pages, changed, 1 + turn % 200)
    device.finish()
    return model.problems


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("num_ahead", [0, 1, 2])
@pytest.mark.parametrize("name", ["cpu", CUDA])
def test_pages_come_back_as_they_were_stored(name: str, num_ahead: int, tier: KVTier, tmp_path: Path) -> None:
    device = ComputeDevice(name)
    with opened(tier, device, tmp_path, num_slots=num_ahead + 1) as stream:
        assert play(device, stream, num_ahead=num_ahead) == []


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
        arriving = stream._held[0, 1].slot.arriving
        assert arriving is not None
        arriving.result(10)
        device.finish()
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
        device.finish()
        assert model.problems == []


@pytest.fixture(params=["memory", "accelerator"])
def device(request: pytest.FixtureRequest) -> ComputeDevice:
    return ComputeDevice("cpu") if request.param == "memory" else FakeDevice()


@pytest.mark.parametrize("tier", TIERS)
def test_pages_never_stored_or_given_back_are_zeros(tier: KVTier, device: ComputeDevice, tmp_path: Path) -> None:
    with opened(tier, device, tmp_path) as stream:
        stream.fetch(0, 0, [1, 2, 3])
        assert not stream.acquire(0, 0).any()
        stream.acquire(0, 0)[1:] = 9
        stream.store(0, 0, [1, 2])
        stream.forget([3])
        stream.fetch(0, 1, [3, 2, 1])
        assert [int(row.max()) for row in stream.acquire(0, 1)] == [0, 9, 0]
        stream.store(0, 1, [])
        stream.fetch(2, 0, [2])
        assert not stream.acquire(2, 0).any(), "layers have pages of their own"


@pytest.mark.parametrize("tier", TIERS)
def test_segments_of_pinned_memory_do_not_show(
    tier: KVTier, device: ComputeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_plan, "SEGMENT_BYTES", 3 * 5000)
    with opened(tier, device, tmp_path) as stream:
        assert play(device, stream) == []


@pytest.mark.parametrize("tier", TIERS)
def test_a_slot_is_taken_from_fetch_to_store(tier: KVTier, device: ComputeDevice, tmp_path: Path) -> None:
    with opened(tier, device, tmp_path, num_slots=2) as stream:
        stream.fetch(0, 0, [0])
        stream.fetch(0, 1, [1])
        with pytest.raises(IndexError):  # both slots are taken; a checked schedule never asks
            stream.fetch(0, 2, [2])
        stream.store(0, 0, [])
        stream.fetch(0, 2, [2])
        stream.store(0, 1, [])
        stream.store(0, 2, [])


def test_a_fetch_waits_for_the_store_of_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, pwritev = threading.Event(), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: (may_write.wait(10), pwritev(*args))[1])
    with opened(KVTier.nvme, ComputeDevice("cpu"), tmp_path) as stream:
        stream.fetch(0, 0, [5, 6])
        stream.acquire(0, 0)[:] = 7
        stream.store(0, 0, [0, 1])
        stream.fetch(0, 1, [1])
        assert not stream.acquire(0, 1).any(), "other pages do not wait"
        stream.fetch(0, 2, [6])
        slot = stream._held[0, 2].slot
        assert slot.arriving is not None
        assert not slot.arriving.done()
        may_write.set()
        assert bool((stream.acquire(0, 2) == 7).all())
        stream.store(0, 1, [])
        stream.store(0, 2, [])


@pytest.mark.parametrize("call", ["acquire", "fetch", "store", "take_counters", "close"])
def test_a_write_that_fails_reaches_the_engine_at_the_next_call(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *args: 0)
    with pytest.raises(KVFileError, match="only 0 bytes were taken") as error:  # noqa: PT012, SIM117
        with opened(KVTier.nvme, ComputeDevice("cpu"), tmp_path) as stream:
            stream.fetch(0, 0, [0])
            stream.fetch(0, 1, [1])
            stream.acquire(0, 0)
            stream.store(0, 0, [0])
            departure = stream._slots[0].departure
            assert departure is not None
            assert departure.written is not None
            departure.written.exception(10)
            calls = {
                "acquire": lambda: stream.acquire(0, 1),
                "fetch": lambda: stream.fetch(0, 2, [2]),
                "store": lambda: stream.store(0, 1, []),
                "take_counters": stream.take_counters,
            }
            if call in calls:
                calls[call]()
                pytest.fail("the call did not notice")
    assert not getattr(error.value, "__notes__", [])


def test_what_fails_in_the_background_is_noted_on_the_error_that_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *args: 0)
    with pytest.raises(ZeroDivisionError) as error:  # noqa: PT012, SIM117
        with opened(KVTier.nvme, ComputeDevice("cpu"), tmp_path) as stream:
            stream.fetch(0, 0, [0])
            stream.store(0, 0, [0])
            raise ZeroDivisionError
    assert "only 0 bytes were taken" in error.value.__notes__[0]


@pytest.mark.parametrize(
    ("tier", "is_accelerator", "expected"),
    [
        (KVTier.cpu, False, (0, 0, 1, 2)),
        (KVTier.cpu, True, (0, 0, 1, 2)),
        (KVTier.nvme, False, (1, 2, 0, 0)),
        (KVTier.nvme, True, (1, 2, 4, 2)),  # what a disk brings is copied on, zeros included
    ],
)
def test_counters_count_each_page_once_and_start_again(
    tier: KVTier, is_accelerator: bool, expected: tuple[int, ...], tmp_path: Path
) -> None:
    with opened(tier, FakeDevice() if is_accelerator else ComputeDevice("cpu"), tmp_path) as stream:
        stream.fetch(0, 0, [0, 1])
        stream.acquire(0, 0).zero_()
        stream.store(0, 0, [0, 1])
        stream.fetch(0, 1, [1, 2])
        for _ in range(3):
            stream.acquire(0, 1)
        stream.store(0, 1, [])
        found = stream.take_counters()
        pages = (found.bytes_read, found.bytes_written, found.bytes_copied, found.bytes_returned)
        assert tuple(num_bytes // 4096 for num_bytes in pages) == expected
        if tier is KVTier.nvme:
            assert min(found.read_seconds, found.write_seconds, found.stall_seconds) > 0
        assert vars(stream.take_counters()) == dict.fromkeys(vars(found), 0)


def test_closing_ends_the_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    with opened(KVTier.nvme, ComputeDevice("cpu"), tmp_path) as stream:
        stream.fetch(0, 0, [0])
        stream.store(0, 0, [0])
    assert threading.active_count() == before
