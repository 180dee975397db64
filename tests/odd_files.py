"""What can lie where a file belongs and is none: opening or reading it would wait, never end, or find nothing."""

import os
import socket
from collections.abc import Callable, Mapping
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
