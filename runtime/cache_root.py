"""Finds the cache directory for compiled kernels, measured rates, chosen policies, and copies of remote files."""

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
    """Returns `configured` (`offload.cache_dir`) or, if it is None, the user's XDG cache directory. If the latter is
    not writable, warns once and returns a private temporary directory. Raises ConfigError if no directory is usable."""
    if configured is None:
        return _user_cache_folder(os.environ.get("XDG_CACHE_HOME") or "~/.cache", os.environ.get("HOME"))
    try:
        return Path(configured).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"offload.cache_dir={configured}: HOME is not set: write the full path") from error


@cache
def _user_cache_folder(base: str, home: str | None) -> Path:
    """Creates the directory in `base`, which may begin with `~`. `home` is only a key for `@cache`: `~` depends on
    it."""
    try:
        root = Path(base).expanduser() / "weightstream"
    except RuntimeError:
        return _private_folder("HOME is not set")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _private_folder(f"cannot create {root} ({error.strerror})")
    return root if os.access(root, os.W_OK | os.X_OK) else _private_folder(f"{root} is not writable")


def _private_folder(problem: str) -> Path:
    """Creates a temporary directory that only this user can access. Its name is the same in each start, unless another
    user owns it."""
    try:
        folder = Path(tempfile.gettempdir()) / f"weightstream-{os.geteuid()}"
        with suppress(FileExistsError):
            folder.mkdir(mode=stat.S_IRWXU)
        # Compiled kernels in the directory are executed: never use a directory that others can write.
        folder = folder if is_private(folder) else Path(tempfile.mkdtemp(prefix="weightstream-"))
    except OSError as error:
        raise ConfigError(f"{problem}, and no temporary directory is usable ({error}): set XDG_CACHE_HOME") from error
    log.warning("%s: caching in %s; set XDG_CACHE_HOME to choose another directory", problem, folder)
    return folder


def is_private(folder: Path) -> bool:
    """True if `folder` is a real directory, not a symlink, that only this user can access. Raises OSError."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & GROUP_AND_OTHERS
