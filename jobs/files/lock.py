"""One process per run directory, or several that share it by leases."""

import fcntl
import json
import logging
import os
import socket
import stat
from pathlib import Path

from runtime.errors import DamagedRunError, RunInUseError

from .publishing import canonical_json, read_json

LOG = logging.getLogger(__name__)


class RunLock:
    """Held until `release` or the end of the process.

    The file stays: it names the last holder. Two processes would not damage a run, they would only do its work twice.
    `is_shared`: with others that share it, and with no other.
    """

    def __init__(self, path: Path, *, is_shared: bool = False) -> None:
        """Raises RunInUseError when another process holds the lock, DamagedRunError when the file is not a run's own,
        OSError when it cannot be written."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            self._require_own(path)
            self._acquire(path, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
        except BaseException:
            self.release()
            raise

    def _require_own(self, path: Path) -> None:
        """It is written into: a second name of some other file must not be."""
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise DamagedRunError(f"{path} is no file of its own but another's, under a second name: remove it")

    def _acquire(self, path: Path, kind: int) -> None:
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunInUseError(
                f"run directory {path.parent} is in use by {_holder(path)}. "
                f"Wait for that process to end or stop it; another run needs another directory (run=)"
            ) from error
        except OSError as error:
            LOG.warning("%s: the file system has no locks (%s): start only one process per run", path, error)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, canonical_json({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _holder(path: Path) -> str:
    try:
        holder = read_json(path)
    except (OSError, DamagedRunError):
        return "another process"
    return f"pid {holder.get('pid')} on host {json.dumps(holder.get('host'))}"
