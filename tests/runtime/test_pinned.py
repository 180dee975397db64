"""Pinned memory takes what was asked for, and goes back to the system when nobody looks at it any more."""

import gc

import pytest
import torch

from runtime.plan.shape.extents import ALIGNMENT_BYTES, REGISTERED_BYTES, pinned_bytes
from runtime.stream import pinned as module
from runtime.stream.pinned import OUT_OF_MEMORY, allocate_pinned
from runtime.units import GIB, MIB


class FakeDriver:
    """Locks up to `room_bytes`."""

    def __init__(self, room_bytes: int, error: int = OUT_OF_MEMORY):
        self.room_bytes, self.error, self.locked = room_bytes, error, dict[int, int]()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1, "for every device"
        assert address % ALIGNMENT_BYTES == num_bytes % ALIGNMENT_BYTES == 0
        if sum(self.locked.values()) + num_bytes > self.room_bytes:
            return self.error
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver(8 * MIB)
    monkeypatch.setattr(module, "cuda_driver", lambda: made)
    monkeypatch.setattr(module, "_clear_cuda_error", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return made


@pytest.mark.parametrize("num_bytes", [REGISTERED_BYTES, 3 * MIB + 1, 5 * MIB])
@pytest.mark.parametrize("is_aligned", [False, True])
def test_a_large_piece_takes_whole_pages_and_goes_back_with_its_last_view(
    num_bytes: int, is_aligned: bool, driver: FakeDriver
) -> None:
    piece = allocate_pinned(num_bytes, is_aligned=is_aligned)
    assert (len(piece), piece.data_ptr() % ALIGNMENT_BYTES) == (num_bytes, 0)
    assert list(driver.locked.values()) == [pinned_bytes(num_bytes, is_aligned=is_aligned)]
    view = piece[1:].view(torch.uint8)
    del piece
    gc.collect()
    assert driver.locked, "a view still looks at it"
    del view
    gc.collect()
    assert not driver.locked


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, 801])
def test_what_cannot_be_locked_is_too_little_memory(error: int, driver: FakeDriver) -> None:
    driver.error = error
    held = allocate_pinned(5 * MIB, is_aligned=True)
    with pytest.raises(MemoryError, match="4 MiB of host memory cannot be pinned"):
        allocate_pinned(4 * MIB, is_aligned=True)
    gc.collect()
    assert driver.locked == {held.data_ptr(): 5 * MIB}


def test_the_ledger_counts_no_more_than_a_page_for_rounding() -> None:
    kv_bytes = round(33.6 * GIB)
    assert pinned_bytes(kv_bytes, is_aligned=False) - kv_bytes < ALIGNMENT_BYTES
    assert pinned_bytes(3000, is_aligned=False) == 4096
    assert pinned_bytes(5000) == 16384
    assert pinned_bytes(0) == 0
