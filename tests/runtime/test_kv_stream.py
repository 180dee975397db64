"""Pages arrive as they were stored, in order, and what goes wrong in the background reaches the engine."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from runtime.config.settings import KVTier
from runtime.errors import KVFileError
from runtime.plan.placement import kv as kv_plan
from runtime.resources import Resource
from runtime.stream.clock import StreamCounters, TimingCallback
from runtime.stream.device import ComputeDevice, CopyPart
from runtime.trace import Trace
from tests.fake_device import FakeDevice, FakeEvent, FakeStream
from tests.kv_support import TIERS, opened, play

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("num_ahead", [0, 1, 2])
@pytest.mark.parametrize("name", ["cpu", CUDA])
def test_pages_come_back_as_they_were_stored(name: str, num_ahead: int, tier: KVTier, tmp_path: Path) -> None:
    device = ComputeDevice(name)
    with opened(tier, device, tmp_path, num_slots=num_ahead + 1) as stream:
        assert play(device, stream, num_ahead=num_ahead) == []


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
    """Nor do runs of pages that are copied at once, which end where a segment does."""
    monkeypatch.setattr(kv_plan, "SEGMENT_BYTES", 3 * 5000)
    for in_runs in (False, True):
        with opened(tier, device, tmp_path) as stream:
            assert play(device, stream, in_runs=in_runs) == []


class CountingCopies(FakeDevice):
    def __init__(self) -> None:
        self.num_copies = self.num_calls = 0
        super().__init__()

    def copy_all(
        self, parts: Sequence[CopyPart], *, on: FakeStream, after: FakeEvent, then: TimingCallback | None = None
    ) -> None:
        self.num_copies += len(parts)
        self.num_calls += 1
        super().copy_all(parts, on=on, after=after, then=then)


@pytest.mark.parametrize(("tier", "num_calls"), [(KVTier.cpu, 3), (KVTier.nvme, 4)])
def test_pages_that_lie_apart_are_one_piece_of_work_each_way(tier: KVTier, num_calls: int, tmp_path: Path) -> None:
    """One wait and one pair of timing events, however many copies; what was never stored comes from a disk alone."""
    device, pages = CountingCopies(), [9, 2, 7, 4]
    with opened(tier, device, tmp_path) as stream:
        for expected in (0, 6):
            stream.fetch(0, 0, pages)
            assert int(stream.acquire(0, 0).max()) == expected
            stream.acquire(0, 0).fill_(6)
            stream.store(0, 0, [0, 2, 3])
        stream.sync()
    assert device.num_calls == num_calls


@pytest.mark.parametrize(("segment_pages", "num_copies"), [(24, 2), (3, 6)])
def test_neighbouring_pages_are_copied_at_once_within_a_segment(
    segment_pages: int, num_copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages 1 to 6, there and back: with segments of three they lie in three."""
    monkeypatch.setattr(kv_plan, "SEGMENT_BYTES", segment_pages * 4096)
    device, pages = CountingCopies(), list(range(1, 7))
    with opened(KVTier.cpu, device, tmp_path) as stream:
        stream.fetch(0, 0, pages)
        stream.acquire(0, 0).copy_(torch.tensor(pages, dtype=torch.uint8)[:, None])
        stream.store(0, 0, list(range(6)))
        stream.fetch(0, 1, pages)
        assert stream.acquire(0, 1)[:, 0].tolist() == pages
        stream.store(0, 1, [])
    assert device.num_copies == num_copies


@pytest.mark.parametrize("tier", TIERS)
def test_a_barrier_waits_for_pages_that_come_and_for_pages_that_leave(tier: KVTier, tmp_path: Path) -> None:
    with opened(tier, FakeDevice(), tmp_path) as stream:
        stream.fetch(0, 0, [0])
        stream.acquire(0, 0).fill_(7)
        stream.store(0, 0, [0])
        stream.fetch(0, 1, [0])
        stream.sync()
        assert int(stream._fetched[0, 1][0].buffer[0]) == 7, "it has come, not only begun to"
        leaving = [
            slot.pending_store.written for slot in stream._slots if slot.pending_store and slot.pending_store.written
        ]
        assert all(written.done() for written in leaving)
        stream.store(0, 1, [])


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
        slot = stream._fetched[0, 2][0]
        assert slot.pending_fetch is not None
        assert not slot.pending_fetch.done()
        may_write.set()
        assert bool((stream.acquire(0, 2) == 7).all())
        stream.store(0, 1, [])
        stream.store(0, 2, [])


@pytest.mark.parametrize("call", ["acquire", "fetch", "store", "take_counters", "close"])
def test_a_write_that_fails_reaches_the_engine_at_the_next_call(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *args: 0)
    with pytest.raises(KVFileError, match="only 0 bytes were written") as error:  # noqa: PT012, SIM117
        with opened(KVTier.nvme, ComputeDevice("cpu"), tmp_path) as stream:
            stream.fetch(0, 0, [0])
            stream.fetch(0, 1, [1])
            stream.acquire(0, 0)
            stream.store(0, 0, [0])
            departure = stream._slots[0].pending_store
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
    assert "only 0 bytes were written" in error.value.__notes__[0]


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
            assert min(found.reads[0], found.stalls[0]) > 0
        assert stream.take_counters() == StreamCounters()


@pytest.mark.parametrize("tier", TIERS)
def test_in_front_of_an_accelerator_both_ways_of_a_page_are_in_the_trace(tier: KVTier, tmp_path: Path) -> None:
    device, trace = FakeDevice(), Trace()
    with opened(tier, device, tmp_path, trace=trace) as stream:
        for lane in (0, 1):
            stream.fetch(0, lane, [0])
            stream.acquire(0, lane).fill_(lane)
            stream.store(0, lane, [0])
    device.synchronize()
    both_ways = {(Resource.host_to_device, "fetch 0"), (Resource.device_to_host, "store 0")}
    on_disk = {(Resource.disk, "fetch 0"), (Resource.disk, "store 0")} if tier is KVTier.nvme else set()
    assert {(span.resource, span.name) for span in trace.take()} == both_ways | on_disk


def test_closing_ends_the_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    with opened(KVTier.nvme, ComputeDevice("cpu"), tmp_path) as stream:
        stream.fetch(0, 0, [0])
        stream.store(0, 0, [0])
    assert threading.active_count() == before
