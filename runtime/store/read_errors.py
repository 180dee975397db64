"""Read errors of files: retries transient errors of a disk or network, and converts OSError to StorageError or
CheckpointError."""

import errno
import logging
import resource
from collections.abc import Callable, Sequence
from os import PathLike
from typing import TypeVar

from ..errors import CheckpointError, StorageError, WeightstreamError

log = logging.getLogger(__name__)

TRANSIENT_ERRNOS = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EBUSY),
        *(errno.ENOLINK, errno.ECOMM, errno.EPROTO, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNRESET),
        *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN),
        *(errno.ENETUNREACH, errno.ENETRESET, errno.ENFILE, errno.ENOBUFS),
    }
)
# Pauses between tries. A failover of a file server takes longer: the run then ends with exit code 75.
PAUSES_SECONDS = (0.5, 2.0, 5.0)
T = TypeVar("T")


def is_transient(error: OSError) -> bool:
    return error.errno in TRANSIENT_ERRNOS


def read_error(path: str | PathLike[str], what: str, error: OSError) -> WeightstreamError:
    """Returns the error to raise for an OSError: StorageError (exit code 75) if it is transient, else CheckpointError.
    `what`: the operation that failed, for the message."""
    name = errno.errorcode.get(error.errno or 0, "no errno")
    message = f"{path}: {what} failed: {error.strerror or error} ({name}){open_files_hint(error)}"
    if is_transient(error):
        return StorageError(f"{message}. Check the storage of the weights and start the same command again")
    return CheckpointError(message)


def open_files_hint(error: OSError) -> str:
    """Returns advice to append to the message of EMFILE (too many open files); "" for other errors."""
    if error.errno != errno.EMFILE:
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = 65_536 if hard == resource.RLIM_INFINITY else hard
    advice = f"type `ulimit -n {target}` in this shell" if soft != hard else "raise it for this account or container"
    return (
        f": this process may have {soft:,} files open (ulimit -n), and each shard of the weights is one: {advice} and "
        "start the same command again"
    )


def with_retries(
    read: Callable[[], T],
    path: str,
    what: str,
    pause: Callable[[float], object],
    pauses: Sequence[float] = PAUSES_SECONDS,
) -> T:
    """Calls `read`; after a transient error it waits (`pause`, which takes seconds) and tries again. `what`: see
    `read_error`. Raises StorageError or CheckpointError."""
    for seconds in pauses:
        try:
            return read()
        except OSError as error:
            if not is_transient(error):
                raise read_error(path, what, error) from error
            log.warning("%s; trying again in %.1f s", read_error(path, what, error), seconds)
            pause(seconds)
    try:
        return read()
    except OSError as error:
        tried = f"{what}, tried {len(pauses) + 1} times," if pauses else what
        raise read_error(path, tried, error) from error
