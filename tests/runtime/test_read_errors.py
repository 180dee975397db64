"""A fault that may pass is waited out, and ends a run resumably where it does not; any other refuses at once."""

import errno
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from runtime.errors import CheckpointError, StorageError, WeightstreamError
from runtime.plan.shape.extents import Extent
from runtime.store import reader
from runtime.store.checkpoint import INDEX, SINGLE, open_checkpoint, read_index
from runtime.store.header import read_header
from runtime.store.reader import Reader
from runtime.stream.device import ComputeDevice
from tests.support import synthesize

NUM_BYTES = 3 * 4096
PASSING = [errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENETDOWN]
PreadV = Callable[[int, Sequence[memoryview], int], int]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PAUSES_SECONDS", (0.0, 0.0, 0.0))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(bytes(range(256)) * (NUM_BYTES // 256))
    return path


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """`fail(errno, times, then)`: so often reading fails; returns a list of the descriptors that were asked for."""
    real: PreadV = os.preadv

    def install(number: int, times: int, meanwhile: Callable[[], object] = lambda: None) -> list[int]:
        asked: list[int] = []

        def preadv(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
            asked.append(descriptor)
            if len(asked) <= times:
                meanwhile()
                raise OSError(number, os.strerror(number))
            return real(descriptor, views, offset)

        monkeypatch.setattr(os, "preadv", preadv)
        return asked

    return install


def read(path: Path) -> bytes:
    target = ComputeDevice("cpu").host_buffer(NUM_BYTES)
    extent = Extent(file=str(path), offset=0, num_bytes=NUM_BYTES, slot_offset=0, used_bytes=NUM_BYTES)
    with Reader(num_threads=1) as reader:
        view = memoryview(target.numpy())
        reader.submit([extent], view).wait()
        return bytes(view)


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_a_fault_that_passes_costs_a_warning(
    number: int, file: Path, fail: Callable[..., list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    asked = fail(number, 2)
    assert read(file) == file.read_bytes()
    assert len(asked) == 3
    assert caplog.text.count(errno.errorcode[number]) == 2
    assert (asked[-1] != asked[0]) == (number == errno.ESTALE), "a stale handle stays stale, and no other is given up"


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_one_that_does_not_pass_is_resumable_and_names_file_place_and_errno(
    number: int, file: Path, fail: Callable[..., list[int]]
) -> None:
    asked = fail(number, 100)
    with pytest.raises(StorageError) as ended:
        read(file)
    assert ended.value.exit_code == 75
    assert len(asked) == 4
    for part in (str(file), f"reading {NUM_BYTES:,} bytes at 0", errno.errorcode[number], "tried 4 times"):
        assert part in str(ended.value)


def test_any_other_fault_is_refused_at_once(file: Path, fail: Callable[..., list[int]]) -> None:
    asked = fail(errno.EBADF, 100)
    with pytest.raises(CheckpointError, match="EBADF"):
        read(file)
    assert len(asked) == 1


def test_a_file_that_was_replaced_behind_a_stale_handle_is_not_read(file: Path, fail: Callable[..., list[int]]) -> None:
    def replace() -> None:
        file.with_name("new").write_bytes(bytes(NUM_BYTES))
        file.with_name("new").replace(file)
        os.utime(file, ns=(0, 0))

    fail(errno.ESTALE, 1, replace)
    with pytest.raises(CheckpointError, match="was replaced while in use"):
        read(file)


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, StorageError), (errno.EACCES, CheckpointError)])
def test_headers_and_samples_too(
    number: int, kind: type[WeightstreamError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(synthesize("gpt2", tmp_path))

    def fail(*_: object, **__: object) -> object:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(kind, match=errno.errorcode[number]):
        checkpoint.fingerprint()
    with pytest.raises(kind, match=errno.errorcode[number]):
        read_header(Path(checkpoint.files[0]))


def _read_index(directory: Path) -> None:
    read_index(directory / INDEX)


def _read_weights(directory: Path) -> None:
    read(directory / SINGLE)


@pytest.mark.parametrize("act", [open_checkpoint, _read_index, _read_weights])
def test_too_many_open_files_name_the_limit_and_how_it_is_raised(act: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(bytes(NUM_BYTES))
    (tmp_path / INDEX).write_text("{}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        with pytest.raises(CheckpointError) as error:
            act(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert f": this process may have {first_free:,} files open (ulimit -n)" in str(error.value)
    assert f"type `ulimit -n {hard}` in this shell" in str(error.value)
