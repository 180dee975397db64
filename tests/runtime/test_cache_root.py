"""The directory for what is kept between runs, also where nobody has a home."""

import logging
import os
import pwd
import stat
import tempfile
from pathlib import Path

import pytest

from runtime import cache_root as caching
from runtime.cache_root import cache_root
from runtime.errors import ConfigError


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary directory of the test's own, and a first look at where caches lie."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    caching._user_cache_folder.cache_clear()


def unknown(_: int) -> pwd.struct_passwd:
    raise KeyError("getpwuid(): uid not found")


@pytest.fixture(params=["no home and no entry in passwd", "a home that cannot be made", "a cache that is a file"])
def homeless(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where what is kept goes instead."""
    if request.param.startswith("no home"):
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", unknown)
    elif request.param.startswith("a home"):
        monkeypatch.setenv("HOME", "/proc/nowhere")
    else:
        (tmp_path / ".cache").touch()
        monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "tmp" / f"weightstream-{os.geteuid()}"


def test_the_configured_directory_comes_first_and_the_users_own_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "weightstream"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert cache_root() == tmp_path / "other" / "weightstream"
    assert cache_root("~/mine") == tmp_path / "mine"


def test_without_a_home_a_directory_of_this_user_alone_is_used_and_said_once(
    homeless: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert cache_root() == cache_root() == homeless
    assert (homeless.is_dir(), stat.S_IMODE(homeless.stat().st_mode)) == (True, 0o700)
    [said] = [record.getMessage() for record in caplog.records]
    assert str(homeless) in said
    assert "set XDG_CACHE_HOME" in said
    assert cache_root("/where/the/user/says") == Path("/where/the/user/says")


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file", "of another user"])
def test_a_directory_that_another_could_have_made_is_never_used(
    homeless: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "open to others":
        homeless.mkdir()
        homeless.chmod(0o777)
    elif kind == "a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        homeless.symlink_to(tmp_path / "theirs")
    elif kind == "a file":
        homeless.touch()
    else:
        user = os.geteuid() + 1
        homeless = homeless.with_name(f"weightstream-{user}")
        homeless.mkdir(mode=0o700)
        monkeypatch.setattr(os, "geteuid", lambda: user)
    found = cache_root()
    assert found.name.startswith("weightstream-")
    assert found != homeless
    assert stat.S_IMODE(found.lstat().st_mode) == 0o700


def test_a_directory_for_caches_that_begins_with_nobodys_home_is_refused_by_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match=r"offload\.cache_dir=~/x"):
        cache_root("~/x")
