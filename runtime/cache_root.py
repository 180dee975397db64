"""The directory for what may be kept between runs and made anew: kernels, measured rates, chosen policies, copies."""

import logging
import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from .errors import ConfigError

log = logging.getLogger(__name__)
GROUP_AND_OTHERS = 0o077  # who is not the owner


def cache_root(configured: str | None = None) -> Path:
    """`configured`, which is `offload.cache_dir`, or the user's cache directory by the XDG rules. Where that cannot be
    written, as without a home: a directory of this user's alone below the temporary one, which a warning names once.
    Raises ConfigError where there is none of these."""
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
    """`home` only tells one answer from another: `~` is by it."""
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
    """A directory below the temporary one that this user alone can read and write: the same at each start, unless
    somebody else has taken its name. Kernels that are kept there are run: a directory of others is never used."""
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
    """Whether it is a directory, no link to one, that nobody but this user can read or write. Raises OSError."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & GROUP_AND_OTHERS
