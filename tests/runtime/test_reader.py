"""Bytes in memory equal bytes on disk, and whatever goes wrong in a thread reaches the one who waits."""

import errno
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.errors import CheckpointError
from runtime.plan.shape.extents import ALIGNMENT_BYTES, SlotLayout, make_layout
from runtime.plan.shape.shapes import TensorSlice
from runtime.store import reader as reader_module
from runtime.store.reader import Reader
from runtime.stream.device import ComputeDevice

SIZE = 1_000_003  # ends inside a block
DEVICE = ComputeDevice("cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(torch.randint(0, 256, (SIZE,), generator=torch.Generator().manual_seed(0)).tolist()))
    return path


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    with Reader(num_threads=3, chunk_bytes=16 * ALIGNMENT_BYTES, direct=request.param) as reader:
        yield reader


def layout(file: Path, *ranges: tuple[int, int]) -> SlotLayout:
    return make_layout(
        TensorSlice(name=str(n), file=str(file), offset=begin, num_bytes=end - begin, dtype="U8", shape=(end - begin,))
        for n, (begin, end) in enumerate(ranges)
    )


def target_of(found: SlotLayout) -> torch.Tensor:
    return DEVICE.host_buffer(found.num_bytes)


RANGES = {
    "inside": [(5, 4000)], "whole": [(0, SIZE)], "last byte": [(SIZE - 1, SIZE)], "end": [(SIZE - 70_000, SIZE)],
    "two": [(100, 200), (700_001, SIZE)], "block": [(4096, 8192)], "chunks": [(1, 16 * 4096 * 3)],
}  # fmt: skip


@pytest.mark.parametrize("name", RANGES)
def test_memory_equals_the_file(name: str, reader: Reader, file: Path) -> None:
    found = layout(file, *RANGES[name])
    buffer = target_of(found)
    pending = reader.submit(found.extents, memoryview(buffer.numpy()))
    pending.wait()
    raw = file.read_bytes()
    for number, (begin, end) in enumerate(RANGES[name]):
        place = found.tensor_offsets[str(number)]
        assert bytes(buffer[place : place + end - begin].numpy()) == raw[begin:end]
    assert pending.is_done
    assert sum(e.used_bytes for e in found.extents) <= pending.timing.num_bytes <= found.num_bytes
    assert pending.timing.end >= pending.timing.begin


def test_a_buffer_that_is_too_small_is_our_mistake_and_no_changed_file(reader: Reader, file: Path) -> None:
    found = layout(file, (0, SIZE))
    with pytest.raises(AssertionError, match="bytes to read into a buffer of"):
        reader.submit(found.extents, memoryview(target_of(found).numpy())[:-1])


@pytest.mark.parametrize("lost", [1, 5000, 500_000, SIZE])
def test_a_file_that_shrinks_after_it_was_planned_is_noticed(lost: int, reader: Reader, file: Path) -> None:
    """Also when it loses a single byte of its last block."""
    found = layout(file, (0, SIZE))
    os.truncate(file, SIZE - lost)
    with pytest.raises(CheckpointError, match=rf"{file}: changed while in use: .*found {SIZE - lost:,}"):
        reader.submit(found.extents, memoryview(target_of(found).numpy())).wait()


@pytest.mark.parametrize("lost", [1, 5000, 500_000])
def test_a_file_that_shrinks_while_it_is_read_is_noticed(lost: int, reader: Reader, file: Path) -> None:
    found = layout(file, (0, SIZE))
    buffer = memoryview(target_of(found).numpy())
    reader.submit(found.extents, buffer).wait()
    os.truncate(file, SIZE - lost)
    with pytest.raises(CheckpointError, match=rf"{file}: changed while in use: .*found {SIZE - lost:,}"):
        reader.submit(found.extents, buffer).wait()


def test_a_file_that_is_gone_is_named_and_other_reads_go_on(reader: Reader, file: Path) -> None:
    found = layout(file.with_name("gone"), (0, 100))
    pending = reader.submit(found.extents, memoryview(target_of(found).numpy()))
    with pytest.raises(CheckpointError, match=r"gone: cannot be opened: No such file"):
        pending.wait()
    good = layout(file, (0, 100))
    reader.submit(good.extents, memoryview(target_of(good).numpy())).wait()


@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_are_continued(direct: bool, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][: 2 * ALIGNMENT_BYTES]], offset))
    found = layout(file, (0, SIZE))
    buffer = target_of(found)
    with Reader(num_threads=2, direct=direct) as reader:
        reader.submit(found.extents, memoryview(buffer.numpy())).wait()
    assert bytes(buffer[:SIZE].numpy()) == file.read_bytes()


def test_where_direct_reads_are_refused_the_page_cache_is_used_and_said_so(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open, flags_seen = os.open, []

    def refuse(path: str, flags: int, *args: int) -> int:
        flags_seen.append(flags)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    found = layout(file, (10, 5000))
    buffer = target_of(found)
    with caplog.at_level(logging.WARNING), Reader(num_threads=1) as reader:
        reader.submit(found.extents, memoryview(buffer.numpy())).wait()
    assert bytes(buffer[10:5000].numpy()) == file.read_bytes()[10:5000]
    assert [bool(flags & os.O_DIRECT) for flags in flags_seen] == [True, False]
    assert "refuses O_DIRECT" in caplog.text


def test_a_file_that_several_threads_come_to_is_opened_once(
    reader: Reader, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that another thread's covers would never be closed."""
    opened, open_file = list[str](), reader_module._open_file

    def slowly(path: str, direct: bool) -> reader_module._File:
        opened.append(path)
        time.sleep(0.05)
        return open_file(path, direct)

    monkeypatch.setattr(reader_module, "_open_file", slowly)
    found = layout(file, (0, SIZE))
    reader.submit(found.extents, memoryview(target_of(found).numpy())).wait()
    assert opened == [str(file)]


def test_nothing_is_begun_behind_the_close(file: Path) -> None:
    found = layout(file, (0, SIZE))
    reader = Reader(num_threads=1)
    reader.close()
    with pytest.raises(RuntimeError, match="transfer threads are closed"):
        reader.submit(found.extents, memoryview(target_of(found).numpy()))


def test_threads_that_wait_hold_no_memory(reader: Reader, file: Path) -> None:
    found = layout(file, (0, SIZE))
    target = np.zeros(found.num_bytes + ALIGNMENT_BYTES, np.uint8)
    reference, begin = weakref.ref(target), -target.ctypes.data % ALIGNMENT_BYTES
    reader.submit(found.extents, memoryview(target)[begin : begin + found.num_bytes]).wait()
    del target
    deadline = time.monotonic() + 60
    while reference() is not None and time.monotonic() < deadline:  # answers come before threads have let go
        gc.collect()
        time.sleep(0.001)
    assert reference() is None


def test_closing_drops_what_was_not_begun(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, begun, may_go_on = os.preadv, threading.Event(), threading.Event()
    offsets = []

    def wait_and_read(descriptor: int, views: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        begun.set()
        may_go_on.wait()
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", wait_and_read)
    found = layout(file, (0, SIZE))
    reader = Reader(num_threads=1, chunk_bytes=16 * ALIGNMENT_BYTES)
    pending = reader.submit(found.extents, memoryview(target_of(found).numpy()))
    begun.wait()
    closing = threading.Thread(target=reader.close)
    closing.start()
    while not reader._queues[0]._is_closed:
        time.sleep(0.001)
    may_go_on.set()
    closing.join()
    assert offsets == [0]
    with pytest.raises(CancelledError):
        pending.wait()


def test_closing_ends_the_threads_and_the_descriptors(file: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    found = layout(file, (0, SIZE))
    with Reader(num_threads=4) as reader:
        reader.submit(found.extents, memoryview(target_of(found).numpy())).wait()
    assert (len(list(Path("/proc/self/fd").iterdir())), threading.active_count()) == before
