import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from jobs.files import publishing as files
from jobs.files.publishing import canonical_json, make_directory, parse_json, publish, read_json, write_json
from runtime.errors import ConfigError, DamagedRunError, OutputError
from tests.odd_files import ODD_FILES, limited_file_size

ROOT = Path(__file__).resolve().parents[2]


def writer(data: bytes) -> Callable[[BinaryIO], None]:
    def write(file: BinaryIO) -> None:
        file.write(data)

    return write


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_first_exclusive_commit_wins(tmp_path: Path) -> None:
    path = tmp_path / "part"
    assert publish(path, writer(b"first"), exclusive=True)
    assert not publish(path, writer(b"second"), exclusive=True)
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == ["part"]


def test_replacing_publish_leaves_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    for data in (b"old", b"new"):
        assert publish(path, writer(data), exclusive=False)
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["cache"]


def test_name_appears_only_when_the_file_is_complete_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "part"

    def check(temp: Path) -> None:
        assert not path.exists()
        assert temp.name.startswith(".")
        assert temp.read_bytes() == b"whole"

    assert publish(path, writer(b"whole"), exclusive=True, check=check)


STEPS = [(step, exclusive) for step in ("write", "check", "fsync") for exclusive in (True, False)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize(("step", "exclusive"), [*STEPS, ("link", True), ("replace", False)])
def test_fault_commits_nothing_and_keeps_the_good_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, exclusive: bool, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "part"
    (tmp_path / "good").write_bytes(b"good")
    if not exclusive:
        path.write_bytes(b"older")
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    if step not in ("write", "check"):
        monkeypatch.setattr(os, step, fail)
    write, check = (fail if step == "write" else writer(b"newer")), (fail if step == "check" else None)
    with pytest.raises(OutputError, match=rf"{path}: .*{errno.errorcode[number]}.*free there.*8 MiB needed.*_root="):
        publish(path, write, exclusive=exclusive, check=check, expected_bytes=8 << 20)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before


def test_failed_fsync_of_the_directory_is_reported_though_the_file_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "fsync_directory", fail)
    with pytest.raises(OutputError, match="EIO"):
        publish(tmp_path / "part", writer(b"whole"), exclusive=True)
    assert names(tmp_path) == ["part"]
    assert (tmp_path / "part").read_bytes() == b"whole"


def test_a_real_full_device_is_an_output_error(tmp_path: Path) -> None:
    def write(_: BinaryIO) -> None:
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"x")

    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(OutputError, match="ENOSPC") as caught:
        publish(tmp_path / "part", write, exclusive=True)
    assert caught.value.exit_code == 75
    assert names(tmp_path) == []


def test_a_limit_on_file_sizes_is_named(tmp_path: Path) -> None:
    with limited_file_size(1000), pytest.raises(OutputError, match=r"EFBIG.*ulimit -f, RLIMIT_FSIZE") as caught:
        publish(tmp_path / "part", writer(b"x" * 2000), exclusive=True)
    assert "make room" not in str(caught.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize("place", ["/proc/nope/generate/run", "/dev/full/generate/run", "{tmp_path}/file/run"])
def test_a_directory_that_can_never_be_made_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot create directory .*; choose another"):
        make_directory(Path(place.format(tmp_path=tmp_path)))


def test_programmers_errors_pass_through_and_leave_no_temp(tmp_path: Path) -> None:
    def write(_: BinaryIO) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publish(tmp_path / "part", write, exclusive=True)
    assert names(tmp_path) == []


@pytest.mark.parametrize("parent", ["file", "missing"])
def test_a_directory_that_is_gone_or_none_is_an_output_error(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="free there"):
        publish(tmp_path / parent / "part", writer(b""), exclusive=True)


def test_no_hard_links_names_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OutputError, match="hard links"):
        publish(tmp_path / "part", writer(b""), exclusive=True)


def test_json_round_trips_and_equal_values_give_equal_text(tmp_path: Path) -> None:
    value: dict[str, files.JsonValue] = {"b": [1, 2.5, None, True], "a": {"text": "ä\u2028\ud800"}}
    write_json(tmp_path / "value.json", value, exclusive=True)
    assert read_json(tmp_path / "value.json") == value
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_json_never_holds_what_is_not_json(tmp_path: Path, number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "value.json", {"a": number}, exclusive=True)
    with pytest.raises(ValueError, match="JSON"):
        canonical_json([number])
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b'{"a": 1', b"[]", b"null", b'"x"', b'{"a": NaN}', b"\xff\xfe", b"{}{}", b"\0" * 64, b"[" * 100_000],
    ids=["empty", "torn", "cut", "list", "null", "string", "nan", "not-utf8", "two", "zeros", "deep"],
)
def test_damaged_json_is_named_and_needs_a_person(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(data)
    with pytest.raises(DamagedRunError, match=str(path)) as caught:
        read_json(path)
    assert caught.value.exit_code == 4
    assert path.read_bytes() == data


@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_file_is_never_waited_for_and_needs_a_person(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.json"
    ODD_FILES[kind](path)
    with pytest.raises(DamagedRunError, match=f"{path} is .*in place of a file of Weightstream: remove it"):
        read_json(path)


def test_a_record_without_end_is_not_read_and_one_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(FileNotFoundError):
        read_json(path)
    path.touch()
    os.truncate(path, 1 << 40)  # no byte of it is written
    with pytest.raises(DamagedRunError, match="has 1024 GiB; the limit is 256 MiB"):
        read_json(path)


def test_a_link_to_a_record_is_followed(tmp_path: Path) -> None:
    write_json(tmp_path / "there.json", {"a": 1}, exclusive=True)
    (tmp_path / "run.json").symlink_to("there.json")
    assert read_json(tmp_path / "run.json") == {"a": 1}


def test_every_cut_and_byte_flip_of_json_is_an_object_or_a_clear_error() -> None:
    whole = json.dumps({"semantic": {"model.name": "tiny", "seed": 0}, "format": 1}).encode()
    damaged = [whole[:length] for length in range(len(whole))]
    damaged += [whole[:i] + bytes([whole[i] ^ bit]) + whole[i + 1 :] for i in range(len(whole)) for bit in (1, 0x80)]
    outcomes = {type(_parse(data)) for data in damaged}
    assert outcomes == {dict, DamagedRunError}


def _parse(data: bytes) -> dict[str, files.JsonValue] | DamagedRunError:
    try:
        return parse_json(data, Path("run.json"))
    except DamagedRunError as error:
        return error
