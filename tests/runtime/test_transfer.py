"""All of a transfer goes, in as many calls as it takes, or it is known how much did."""

import pytest

from runtime.plan.shape.extents import ALIGNMENT_BYTES
from runtime.store.transfer import transfer

NUM_BYTES = 3 * ALIGNMENT_BYTES
DATA = bytes(place * 7 % 251 for place in range(NUM_BYTES))


class Disk:
    """Gives no more than `most` bytes a call, and to a direct transfer nothing from within a block."""

    def __init__(self, most: int, *, is_direct: bool):
        self._most, self._is_direct = most, is_direct
        self.offsets: list[int] = []

    def read(self, descriptor: int, views: list[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        if self._is_direct and offset % ALIGNMENT_BYTES:
            raise OSError(22, "Invalid argument")
        begin = offset
        for view in views:
            length = min(len(view), self._most - (offset - begin), NUM_BYTES - offset)
            view[:length] = DATA[offset : offset + length]
            offset += length
        return offset - begin


@pytest.mark.parametrize(
    ("is_direct", "offsets"), [(True, [0, 4096, 8192]), (False, [0, 5000, 10_000])], ids=["direct", "buffered"]
)
def test_a_short_direct_transfer_goes_on_from_the_last_whole_block(is_direct: bool, offsets: list[int]) -> None:
    memory, disk = bytearray(NUM_BYTES), Disk(5000, is_direct=is_direct)
    views = [memoryview(memory)[:6000], memoryview(memory)[6000:]]
    assert transfer(disk.read, 0, views, 0, NUM_BYTES, is_direct=is_direct) == NUM_BYTES
    assert disk.offsets == offsets
    assert memory == DATA


def test_less_than_a_block_is_no_progress_for_a_direct_transfer() -> None:
    memory, disk = bytearray(NUM_BYTES), Disk(1000, is_direct=True)
    assert transfer(disk.read, 0, [memoryview(memory)], 0, NUM_BYTES, is_direct=True) == 0
    assert disk.offsets == [0]
