"""Pages come back as they were written, or with an error that names the page; nothing is left of the file."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from runtime.config.settings import KVTier
from runtime.errors import BudgetError, ConfigError, KVFileError
from runtime.plan.placement.kv import KVLayout
from runtime.store import kv_file
from runtime.store.kv_file import KVFile
from runtime.stream.device import ComputeDevice
from runtime.units import GIB

NUM_PAGES = 40
LAYOUT = KVLayout(
    tier=KVTier.nvme, page_bytes={1: 4096, 4: 5000}, num_pages=NUM_PAGES, slot_pages=NUM_PAGES, num_slots=1
)
LAYERS = tuple(LAYOUT.page_bytes)
DEVICE = ComputeDevice("cpu")


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVFile]:
    with KVFile(LAYOUT, directory=str(tmp_path), num_threads=3, chunk_bytes=4 * 8192, direct=request.param) as opened:
        yield opened


def slot() -> torch.Tensor:
    return DEVICE.host_buffer(LAYOUT.slot_bytes).fill_(0xEE)


def put(file: KVFile, layer: int, values: dict[int, int]) -> None:
    """Fills page p with `values[p]`, the slot's places in another order than the pages."""
    buffer, stride = slot(), LAYOUT.stride_bytes(layer)
    places = {page: place for place, page in enumerate(values)}
    for page, place in places.items():
        buffer[place * stride : (place + 1) * stride] = values[page]
    file.write(layer, places, buffer.numpy().data).wait()


def got(file: KVFile, layer: int, pages: Sequence[int]) -> dict[int, int]:
    """The one value that fills each page."""
    buffer, stride, size = slot(), LAYOUT.stride_bytes(layer), LAYOUT.page_bytes[layer]
    file.read(layer, {page: place for place, page in enumerate(pages)}, buffer.numpy().data).wait()
    found = {page: buffer[place * stride : place * stride + size].unique() for place, page in enumerate(pages)}
    assert all(values.numel() == 1 for values in found.values())
    return {page: int(values) for page, values in found.items()}


def test_random_subsets_of_pages_come_back_in_any_order(file: KVFile) -> None:
    generator = torch.Generator().manual_seed(0)
    truth = {layer: dict.fromkeys(range(NUM_PAGES), 0) for layer in LAYERS}
    for turn in range(30):
        layer = LAYERS[turn % 2]
        order = torch.randperm(NUM_PAGES, generator=generator).tolist()
        changed = {page: (7 * turn + page) % 256 for page in order[: 1 + turn]}
        put(file, layer, changed)
        truth[layer] |= changed
        wanted = torch.randperm(NUM_PAGES, generator=generator).tolist()[: 1 + 29 - turn]
        for other in LAYERS:
            assert got(file, other, wanted) == {page: truth[other][page] for page in wanted}


def test_pages_never_written_are_zeros_without_a_read(file: KVFile, monkeypatch: pytest.MonkeyPatch) -> None:
    put(file, 4, {3: 9})
    monkeypatch.setattr(os, "preadv", lambda *args: pytest.fail("the disk was asked"))
    assert got(file, 4, [2, 4, 0]) == {2: 0, 4: 0, 0: 0}
    assert got(file, 1, [3]) == {3: 0}


def test_pages_that_were_forgotten_are_zeros_again(file: KVFile) -> None:
    put(file, 1, {3: 9, 4: 8})
    put(file, 4, {3: 7})
    file.forget([3])
    assert got(file, 1, [3, 4]) == {3: 0, 4: 8}
    assert got(file, 4, [3]) == {3: 0}


def test_neighbouring_pages_go_in_one_request(file: KVFile, monkeypatch: pytest.MonkeyPatch) -> None:
    put(file, 1, dict.fromkeys(range(NUM_PAGES), 1))
    seen: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: (seen.append(len(views)), preadv(fd, views, at))[1])
    got(file, 1, [9, 3, 4, 2, 20])
    assert sorted(seen) == [1, 1, 3]
    seen.clear()
    got(file, 1, range(16))
    assert sorted(seen) == [8, 8], "a request holds no more than chunk_bytes"


@pytest.mark.parametrize("bad", [0, 4999])
def test_a_flipped_bit_is_noticed_and_the_page_named(file: KVFile, bad: int) -> None:
    put(file, 4, {6: 1, 7: 2, 8: 3})
    offset = LAYOUT.offset_bytes(4) + 7 * LAYOUT.stride_bytes(4)
    descriptor = os.open(f"/proc/self/fd/{file._file.fileno()}", os.O_RDWR)
    os.pwrite(descriptor, bytes([2 ^ 16]), offset + bad)
    os.close(descriptor)
    with pytest.raises(KVFileError, match=rf"page 7 of layer 4, 5,000 bytes at {offset:,} .* kv.directory"):
        got(file, 4, [6, 7, 8])
    assert got(file, 4, [6, 8]) == {6: 1, 8: 3}


def test_pages_that_the_file_lost_are_noticed(file: KVFile) -> None:
    put(file, 1, {5: 1})
    os.ftruncate(file._file.fileno(), 0)
    with pytest.raises(KVFileError, match="page 5 of layer 1"):
        got(file, 1, [5])


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_short_transfers_are_continued(call: str, file: KVFile, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(os, call)
    cut = 5000 if not file._is_direct else 4096
    monkeypatch.setattr(os, call, lambda fd, views, at: real(fd, [views[0][:cut]], at))
    values = {page: page + 1 for page in range(10)}
    put(file, 4, values)
    assert got(file, 4, list(values)) == values


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, r"No space left.*needs up to 480 KiB on disk, .* are free: .*kv\.directory"),
        (
            errno.EIO,
            r"writing 4,096 bytes at 12,288 of the KV file .*layer 1, pages 3 to 3.* failed: Input/output",
        ),
    ],
)
def test_a_write_that_fails_says_where_and_what_to_change(
    code: int, message: str, file: KVFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(KVFileError, match=message) as error:
        put(file, 1, {3: 1})
    assert error.value.exit_code == 75
    assert got(file, 1, [3]) == {3: 0}


def test_a_write_that_takes_nothing_is_an_error(file: KVFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *args: 0)
    with pytest.raises(KVFileError, match="only 0 bytes were written"):
        put(file, 1, {3: 1})


def test_a_disk_without_room_is_refused_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(kv_file.shutil, "disk_usage", lambda path: usage(free=LAYOUT.tier_bytes - 1))
    with pytest.raises(BudgetError, match=r"needs up to 480 KiB on disk, 480 KiB are free: .*kv\.directory"):
        KVFile(LAYOUT, directory=str(tmp_path))


def test_the_room_is_stated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), KVFile(LAYOUT, directory=str(tmp_path)):
        assert "needs up to 480 KiB on disk" in caplog.text


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    for name in ("gone", "plain"):
        with pytest.raises(ConfigError, match=rf"kv\.directory={tmp_path / name}: cannot create a file there"):
            KVFile(LAYOUT, directory=str(tmp_path / name))


def test_where_o_direct_is_refused_the_page_cache_is_used_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = kv_file.fcntl.fcntl

    def refuse(file: object, command: int, value: int = 0) -> int:
        if value & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, command, value)

    monkeypatch.setattr(kv_file.fcntl, "fcntl", refuse)
    with caplog.at_level(logging.WARNING), KVFile(LAYOUT, directory=str(tmp_path)) as opened:
        put(opened, 1, {3: 1})
        assert got(opened, 1, [3]) == {3: 1}
    assert "refuses O_DIRECT" in caplog.text


def test_a_directory_in_memory_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_file, "_is_memory", lambda directory: True)
    with caplog.at_level(logging.WARNING), KVFile(LAYOUT, directory=str(tmp_path)):
        assert "in-memory file system" in caplog.text


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="needs a file system in memory")
def test_a_file_system_in_memory_is_recognised() -> None:
    assert kv_file._is_memory("/dev/shm")
    assert not kv_file._is_memory("/proc")


def test_only_the_owner_may_read_and_nothing_is_left_after_close(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    with KVFile(LAYOUT, directory=str(tmp_path)) as opened:
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(opened._file.fileno()).st_mode & 0o777 == 0o600
        put(opened, 1, {3: 1})
    assert (len(list(Path("/proc/self/fd").iterdir())), threading.active_count()) == before


def test_nothing_is_left_of_a_file_with_a_removed_name_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_file.tempfile, "_O_TMPFILE_WORKS", False)
    with KVFile(LAYOUT, directory=str(tmp_path)) as opened:
        assert list(tmp_path.iterdir()) == []
        put(opened, 1, {3: 1})
        assert got(opened, 1, [3]) == {3: 1}


PROGRAM = """
import sys
from tests.runtime.test_kv_file import KVFile, LAYOUT, put
with KVFile(LAYOUT, directory=sys.argv[1]) as file:
    put(file, 1, {page: 1 for page in range(40)})
    print("written", flush=True)
    sys.stdin.read()
"""


def test_nothing_is_left_after_kill(tmp_path: Path) -> None:
    root = Path(kv_file.__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=30) == -signal.SIGKILL
    process.stdin.close()
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_system_ends_in_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full fails every write for want of space."""
    big = KVLayout(tier=KVTier.nvme, page_bytes={0: 4096}, num_pages=4, slot_pages=4, num_slots=1)
    monkeypatch.setattr(kv_file, "open_unnamed", lambda directory: open("/dev/full", "r+b", buffering=0))  # noqa: PTH123, SIM115
    monkeypatch.setattr(kv_file, "free_bytes", lambda directory: GIB)
    with KVFile(big, direct=False) as opened, pytest.raises(KVFileError, match="No space left"):
        opened.write(0, {0: 0}, slot().numpy().data).wait()
