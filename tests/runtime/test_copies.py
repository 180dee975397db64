"""Local copies of what lies at a URL: whole or not there, made once, taken up where they were left."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from runtime.errors import CheckpointError, Interrupted, StorageError
from runtime.remote import copies
from runtime.remote.copies import local_copy
from runtime.remote.object_store import ObjectStore, RetryPolicy

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(250)) * 40, "notes.md": b"not wanted"}
PATTERNS = ["*.json", "*.safetensors"]


class Place(ObjectStore):
    """A store that counts bytes and can end in the middle."""

    num_bytes = 0
    fails_behind: int | None = None

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        if self.fails_behind is not None and self.num_bytes >= self.fails_behind:
            raise StorageError("gone")
        data = super().read(name, begin, end)
        self.num_bytes += len(data)
        return data


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(copies, "RANGE_BYTES", 1000)
    monkeypatch.setattr(copies, "NUM_RANGES", 2)
    store = Place(f"memory://{tmp_path.name}/model", "model.path", RetryPolicy(seconds=0))
    for name, data in FILES.items():
        store.write(name, data)
    store.write("inside/other.json", b"{}")
    store.write(".hidden.json", b"{}")
    return store


def copied(store: ObjectStore, cache: Path) -> Path:
    return local_copy(store, cache, PATTERNS, CheckpointError)


def contents(folder: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_copy_has_the_files_that_are_wanted_and_is_made_once(tmp_path: Path, place: Place) -> None:
    folder = copied(place, tmp_path)
    assert folder.name == "model"
    assert contents(folder) == {name: FILES[name] for name in ("config.json", "model.safetensors")}
    num_bytes = place.num_bytes
    assert copied(place, tmp_path) == folder
    assert place.num_bytes == num_bytes


def test_a_copy_that_was_ended_goes_on_behind_its_last_byte_and_no_half_is_seen(tmp_path: Path, place: Place) -> None:
    place.fails_behind = 4000
    with pytest.raises(StorageError):
        copied(place, tmp_path)
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == []
    before, place.fails_behind = place.num_bytes, None
    assert before < 10_000
    folder = copied(place, tmp_path)
    assert contents(folder)["model.safetensors"] == FILES["model.safetensors"]
    assert place.num_bytes == len(FILES["model.safetensors"]) + len(FILES["config.json"])


def test_what_was_written_again_there_is_another_copy_and_the_old_one_stays(tmp_path: Path, place: Place) -> None:
    old = copied(place, tmp_path)
    place.write("model.safetensors", FILES["model.safetensors"][::-1])
    new = copied(place, tmp_path)
    assert contents(new)["model.safetensors"] == FILES["model.safetensors"][::-1]
    assert contents(old)["model.safetensors"] == FILES["model.safetensors"]


def test_what_is_written_while_it_is_copied_is_no_copy(tmp_path: Path, place: Place) -> None:
    read = place.read

    def writing(name: str, begin: int | None = None, end: int | None = None) -> bytes:
        if name == "model.safetensors" and begin == 8000:
            place.write(name, FILES[name][::-1])
        return read(name, begin, end)

    place.read = writing  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(StorageError, match="changed while it was copied"):
        copied(place, tmp_path)
    assert list(tmp_path.rglob("*.safetensors*")) == []


def test_a_url_of_a_file_is_copied_by_its_name(tmp_path: Path, place: Place) -> None:
    file = copied(ObjectStore(f"{place.url}/notes.md", "model.path"), tmp_path)
    assert (file.name, file.read_bytes()) == ("notes.md", b"not wanted")


def test_a_copy_that_has_no_room_is_refused_with_numbers(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = copies.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda path: usage._replace(free=512))
    with pytest.raises(CheckpointError, match=r"model\.path=memory://.* a local copy needs .* has 512 B.* free"):
        copied(place, tmp_path)


def test_a_stop_ends_a_copy_and_the_next_goes_on(tmp_path: Path, place: Place) -> None:
    place.retry = RetryPolicy(seconds=0, should_stop=lambda: place.num_bytes > 3000)
    with pytest.raises(Interrupted):
        copied(place, tmp_path)
    place.retry = RetryPolicy(seconds=0)
    assert contents(copied(place, tmp_path))["model.safetensors"] == FILES["model.safetensors"]
