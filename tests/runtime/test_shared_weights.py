"""Weights that processes share are read once, lie in memory once, and are nobody's when all have ended."""

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import connection

import pytest
import torch

from runtime.plan.shape.extents import Extent
from runtime.stream import shared_weights
from runtime.stream.device import ComputeDevice
from runtime.stream.shared_weights import TABLE_BYTES, SharedWeights, new_shared_memory
from runtime.units import KIB, MIB
from tests.processes import PROCESSES

NUM_BYTES = 3 * MIB


def extents(number: int) -> list[Extent]:
    return [Extent(file="a", offset=number * NUM_BYTES, num_bytes=NUM_BYTES, used_bytes=NUM_BYTES, slot_offset=0)]


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = new_shared_memory()
    yield descriptor
    os.close(descriptor)


def filled(shared: SharedWeights, number: int, value: int | None) -> torch.Tensor:
    """A piece whose bytes are all `value`; None: that somebody else is to have filled."""

    def fill(buffer: torch.Tensor) -> None:
        assert value is not None, "it was read twice"
        buffer.fill_(value)

    return shared.get_or_fill(extents(number), NUM_BYTES, fill, is_pinned=False)


def bytes_held(descriptor: int) -> int:
    """Of pieces; the table has some pages of its own."""
    return os.fstat(descriptor).st_blocks * 512 // MIB * MIB


def test_a_piece_is_read_by_one_and_lies_in_memory_once(descriptor: int) -> None:
    first, second = SharedWeights(descriptor, 2), SharedWeights(descriptor, 2)  # as in two processes: two openings
    one, two = filled(first, 0, 7), filled(first, 1, 8)
    there = filled(second, 0, None), filled(second, 1, None)
    assert [int(tensor.float().mean()) for tensor in (one, two, *there)] == [7, 8, 7, 8]
    assert [tensor.data_ptr() % (4 * KIB) for tensor in (one, *there)] == [0, 0, 0]
    assert bytes_held(descriptor) == 2 * NUM_BYTES
    one[5] = 9
    assert there[0][5] == 9, "the same memory"


def test_a_piece_stays_as_long_as_one_looks_at_it_and_then_its_memory_is_given_back(descriptor: int) -> None:
    first, second = SharedWeights(descriptor, 2), SharedWeights(descriptor, 2)
    tensors = [filled(first, 0, 7), filled(first, 0, None), filled(second, 0, None)]
    while len(tensors) > 1:
        tensors.pop(0)
        assert bytes_held(descriptor) == NUM_BYTES
    first.close()
    second.close()
    assert int(tensors[0][0]) == 7, "also behind its end"
    tensors.clear()
    assert bytes_held(descriptor) == 0
    third = SharedWeights(descriptor, 2)
    assert int(filled(third, 0, 6)[0]) == 6, "read again, in its place"
    assert os.fstat(descriptor).st_size < TABLE_BYTES + 2 * NUM_BYTES


def test_a_read_that_fails_leaves_nothing_and_the_next_one_reads(descriptor: int) -> None:
    def fail(buffer: torch.Tensor) -> None:
        buffer.fill_(1)
        raise OSError("the disk is gone")

    first, second = SharedWeights(descriptor, 2), SharedWeights(descriptor, 2)
    with pytest.raises(OSError, match="the disk is gone"):
        first.get_or_fill(extents(0), NUM_BYTES, fail, is_pinned=False)
    there = filled(second, 0, 7)
    assert torch.equal(there, filled(first, 0, None))


def fill_half(path: str, told: connection.Connection) -> None:
    descriptor = os.open(path, os.O_RDWR)

    def fill(buffer: torch.Tensor) -> None:
        buffer[: NUM_BYTES // 2].fill_(1)
        told.send("half")
        time.sleep(600)

    SharedWeights(descriptor, 2).get_or_fill(extents(0), NUM_BYTES, fill, is_pinned=False)


def test_whoever_is_killed_as_it_reads_is_followed_by_the_one_who_waits(descriptor: int) -> None:
    here, there = PROCESSES.Pipe()
    process = PROCESSES.Process(target=fill_half, args=(f"/proc/{os.getpid()}/fd/{descriptor}", there))
    process.start()
    assert here.recv() == "half"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    buffer = filled(SharedWeights(descriptor, 2), 0, 7)
    assert bool((buffer == 7).all())
    process.join()


def test_more_pieces_than_the_table_has_lines_are_refused(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_weights, "MAX_PIECES", 1)
    shared = SharedWeights(descriptor, 2)
    kept = filled(shared, 0, 7)
    with pytest.raises(OSError, match="full: 1 pieces"):
        filled(shared, 1, 7)
    assert int(kept[0]) == 7


def test_a_device_reads_into_memory_of_its_own_where_nothing_is_shared() -> None:
    reads = list[int]()
    for device in (ComputeDevice("cpu"), ComputeDevice("cpu")):
        device.load_host_weights(extents(0), NUM_BYTES, lambda buffer: reads.append(buffer.nbytes))
        assert device.num_sharers == 1
    assert reads == [NUM_BYTES, NUM_BYTES]
