"""What can lie where a file belongs and is none: opening or reading it would wait, never end, or find nothing; and a
limit on how far files grow."""

import os
import resource
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        before = Path.cwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            listening.bind(path.name)
        finally:
            os.chdir(before)


ODD_FILES: Mapping[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": _socket,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("/nonexistent/x"),
    "a link to itself": lambda path: path.symlink_to(path),
}


@contextmanager
def limited_file_size(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond it: a write then fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
