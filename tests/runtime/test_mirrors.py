"""Weights that are on several disks come from all of them, and from those that are left when one fails or is slow."""

import errno
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from runtime import ModelConfig, Runtime
from runtime.errors import CheckpointError, StorageError
from runtime.store import reader as reader_module
from runtime.store.checkpoint import open_checkpoint
from runtime.store.file_digests import digest_files
from runtime.store.mirrors import find_copies, warn_of_shared_disk
from runtime.store.reader import Reader
from tests.runtime.test_fidelity import config_for, tokens_of
from tests.runtime.test_reader import SIZE, layout, target_of
from tests.support import Reference, flip_outside_samples

References = Callable[[str], Reference]
CHUNK = 16 * 4096
Read = Callable[[int, Sequence[memoryview], int], int]


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Three copies of a file."""
    content = bytes(torch.randint(0, 256, (SIZE,), generator=torch.Generator().manual_seed(0)).tolist())
    paths = [tmp_path / name / "data" for name in ("a", "b", "c")]
    for path in paths:
        path.parent.mkdir()
        path.write_bytes(content)
    return paths


class Watched:
    """Counts the bytes that are read in each directory. Those in `broken` raise EIO, those in `slow` take longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.num_bytes = Counter[str]()
        self.broken, self.slow = set[str](), dict[str, float]()
        self._read: Read = os.preadv
        monkeypatch.setattr(reader_module.os, "preadv", self)

    def __call__(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().parent.name
        if name in self.broken:
            raise OSError(errno.EIO, "input/output error")
        time.sleep(self.slow.get(name, 0.001))
        count = self._read(descriptor, views, offset)
        self.num_bytes[name] += count
        return count


def read(places: list[Path], *, num_times: int = 1, num_threads: int = 1) -> None:
    """Reads the first file `num_times`, and compares the bytes."""
    copies, raw = {str(places[0]): [str(path) for path in places[1:]]}, places[0].read_bytes()
    found = layout(places[0], (0, SIZE))
    with Reader(num_threads=num_threads, chunk_bytes=CHUNK, copies=copies) as reader:
        for _ in range(num_times):
            buffer = target_of(found)
            reader.submit(found.extents, memoryview(buffer.numpy())).wait()  # pyright: ignore[reportArgumentType]
            assert bytes(buffer[:SIZE].numpy()) == raw


def test_all_disks_are_read(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    read(places, num_times=3)
    assert {*watched.num_bytes} == {"a", "b", "c"}
    assert min(watched.num_bytes.values()) > SIZE // 3


@pytest.mark.parametrize("broken", ["a", "b", "ab", "bc"])
def test_disks_that_fail_are_named_and_the_others_go_on(
    broken: str, places: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(monkeypatch)
    watched.broken |= {*broken}
    with caplog.at_level(logging.WARNING):
        read(places, num_times=2)
    assert not {*watched.num_bytes} & watched.broken
    for name in broken:
        assert f"/{name}/data: reading" in caplog.text
        assert "reading goes on from" in caplog.text


def test_if_all_fail_the_run_ends_after_the_usual_tries(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.broken |= {"a", "b", "c"}
    monkeypatch.setattr(reader_module, "PAUSES_SECONDS", (0.0, 0.0))
    with pytest.raises(StorageError, match="tried 3 times"):
        read(places)


def test_a_file_that_vanishes_or_is_cut_short_is_read_elsewhere(
    places: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    places[1].unlink()
    places[2].write_bytes(places[2].read_bytes()[: SIZE // 2])
    with caplog.at_level(logging.WARNING):
        read(places, num_times=3)
    assert f"{places[1]}: cannot be opened" in caplog.text


def test_a_slow_disk_is_given_little(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.slow = {"b": 0.2}
    read(places[:2], num_times=4, num_threads=2)
    assert 0 < watched.num_bytes["b"] < watched.num_bytes["a"] / 4


def test_tokens_are_the_same_from_several_disks(
    reference: References, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = reference("llama")
    mirror = tmp_path / "mirror"
    shutil.copytree(ref.directory, mirror)
    mirrors = (str(mirror), str(tmp_path / "no"))
    model = ModelConfig(name="test", path=str(ref.directory), dtype="float32", mirrors=mirrors)
    with caplog.at_level(logging.WARNING):
        runtime = Runtime(config_for(ref), model=model)
    assert f"{tmp_path / 'no'} is left out" in caplog.text
    assert f"model.mirrors: {ref.directory} and {mirror} are on one disk" in caplog.text
    assert tokens_of(runtime, ref.prompts) == ref.expected


def test_only_directories_on_one_disk_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_shared_disk("out", [tmp_path, Path("/proc"), tmp_path / "missing"])
    assert not caplog.text
    warn_of_shared_disk("out", [tmp_path, Path("/proc"), tmp_path.parent])
    assert f"out: {tmp_path} and {tmp_path.parent} are on one disk" in caplog.text
    assert "/proc" not in caplog.text


def test_other_weights_are_refused(reference: References, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(reference("llama").directory)
    assert find_copies(checkpoint, [str(checkpoint.path)]) == {file: [file] for file in checkpoint.files}
    shutil.copytree(checkpoint.path, tmp_path / "changed")
    file = tmp_path / "changed" / Path(checkpoint.files[0]).name
    with file.open("r+b") as handle:
        handle.seek(-2, os.SEEK_END)
        handle.write(b"\1\2")
    with pytest.raises(CheckpointError, match="has other weights than"):
        find_copies(checkpoint, [str(tmp_path / "changed")])


def test_a_bit_between_the_samples_is_found_with_full_verification(reference: References, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(reference("llama").directory)
    mirror = tmp_path / "mirror"
    shutil.copytree(checkpoint.path, mirror)
    flip_outside_samples(mirror / Path(checkpoint.files[0]).name)
    assert find_copies(checkpoint, [str(mirror)])

    def digest(files: Sequence[str]) -> dict[str, str]:
        return {**digest_files(files, tmp_path / "cache")}

    with pytest.raises(CheckpointError, match="has other weights than"):
        find_copies(checkpoint, [str(mirror)], digest(checkpoint.files), digest)
