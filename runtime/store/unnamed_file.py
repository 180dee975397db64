"""A file without a name, in a directory that the user names: gone with the process, however that ends."""

import errno
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from ..errors import ConfigError

log = logging.getLogger(__name__)

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def open_unnamed(directory: str, *, key: str = "kv.directory") -> BinaryIO:
    """Opens a file without a name for its owner alone (0600), unbuffered; the caller closes it. It is made with
    O_TMPFILE, or where the file system knows no such thing, as a file whose name is removed at once. Warns when
    `directory`, named by the setting `key`, lies in memory."""
    try:
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise _unusable(directory, key, error) from error
    if _is_memory(directory):
        log.warning("%s=%s lies in memory: what is kept there is in no ledger; name a disk", key, directory)
    return file


def make_direct(file: BinaryIO, directory: str) -> bool:
    """Whether the file system allows O_DIRECT, which is then set."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        log.warning("%s: this file system refuses O_DIRECT; keys and values go through the page cache", directory)
        return False
    return True


def free_bytes(directory: str, *, key: str = "kv.directory") -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError as error:
        raise _unusable(directory, key, error) from error


def _unusable(directory: str, key: str, error: OSError) -> ConfigError:
    return ConfigError(f"{key}={directory}: no file can be made there: {error.strerror}")


def _is_memory(directory: str) -> bool:
    device = Path(directory).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.partition(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return any(place.split()[2] == number and kind.split()[0] in MEMORY_FILE_SYSTEMS for place, _, kind in mounts)
