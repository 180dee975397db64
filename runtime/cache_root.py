"""The directory for regenerable data that is kept between runs: kernels, measured rates, chosen policies, copies."""

import logging
import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from .errors import ConfigError

log = logging.getLogger(__name__)
GROUP_AND_OTHERS = 0o077  # permission bits of group and others


def cache_root(configured: str | None = None) -> Path:
    """Returns `configured` (`offload.cache_dir`), or the user's XDG cache directory. Falls back to a private directory
    under the temporary directory, with one warning, if that is not writable. Raises ConfigError if none is usable."""
    if configured is None:
        return _user_cache_folder(os.environ.get("XDG_CACHE_HOME") or "~/.cache", os.environ.get("HOME"))
    try:
        return Path(configured).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"offload.cache_dir={configured}: no home directory is known; write the path in full"
        ) from error


@cache
def _user_cache_folder(base: str, home: str | None) -> Path:
    """Cached per `base` and `home`; `home` is only a cache key, since `~` expands by it."""
    try:
        root = Path(base).expanduser() / "weightstream"
    except RuntimeError:
        return _private_folder("no home directory is known")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _private_folder(f"{root} cannot be made ({error.strerror})")
    return root if os.access(root, os.W_OK | os.X_OK) else _private_folder(f"{root} cannot be written")


def _private_folder(problem: str) -> Path:
    """A directory in the temporary directory that only this user can access. Its name is stable across starts unless
    another user already owns it. Kernels in it are executed, so a directory that others can write is never used."""
    try:
        folder = Path(tempfile.gettempdir()) / f"weightstream-{os.geteuid()}"
        with suppress(FileExistsError):
            folder.mkdir(mode=stat.S_IRWXU)
        folder = folder if is_private(folder) else Path(tempfile.mkdtemp(prefix="weightstream-"))
    except OSError as error:
        raise ConfigError(f"{problem}, nor is there a temporary directory ({error}): set XDG_CACHE_HOME") from error
    log.warning("%s: what is kept between starts goes to %s; XDG_CACHE_HOME names another place", problem, folder)
    return folder


def is_private(folder: Path) -> bool:
    """True if `folder` is a real directory, not a symlink, that only this user can access. Raises OSError."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & GROUP_AND_OTHERS
