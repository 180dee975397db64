"""Striped files: each is divided among directories on several disks, which are read at the same time. A disk has about
the same share of every tensor, and no byte is on two disks.

A stripe is a safetensors file with one tensor of bytes. Like the header of a packed shard, its header has CRC-32 sums,
and also says which stripe of which file it is.
"""

import io
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from ..errors import CheckpointError
from ..plan.shape.shapes import Stripes
from .read_errors import read_error
from .transfer import transfer

if TYPE_CHECKING:
    from typing_extensions import Buffer

STRIPE_TENSOR, STRIPE_KEY = "stripe", "stripe"  # names in a stripe's header: of the tensor, and in the packing record
STRIPES_KEY = "stripes"  # in an index's metadata: the directories of the stripes, the index's own first
STRIPE_NAME = re.compile(r"(?P<file>.+)\.stripe-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
RESTORE = "no other disk has these bytes: restore the file, or pack the original again"


def stripe_name(file: str, number: int, count: int) -> str:
    """Returns the name of stripe `number` (from 0) of `count` of a safetensors file."""
    return f"{file.removesuffix('.safetensors')}.stripe-{number + 1}-of-{count}.safetensors"


def stripe_paths(directories: Sequence[Path], file: str) -> list[Path]:
    """Returns the paths of a file: of its stripes, or of the file itself if there is only one directory."""
    if len(directories) == 1:
        return [directories[0] / file]
    return [directory / stripe_name(file, number, len(directories)) for number, directory in enumerate(directories)]


def open_whole(file: str | os.PathLike[str], stripes: Stripes | None) -> BinaryIO:
    """Opens a file to read it, also if it is divided into stripes. Raises OSError, or for a stripe CheckpointError or
    StorageError with its name."""
    return Path(file).open("rb") if stripes is None else cast(BinaryIO, StripedFile(stripes))


class StripedFile(io.RawIOBase):
    """Reads a file that is divided into stripes. A read is only short at the end of the file."""

    def __init__(self, stripes: Stripes):
        super().__init__()
        self._stripes, self._position = stripes, 0
        self._descriptors: list[int] = []
        for file in stripes.files:
            try:
                self._descriptors.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                self.close()
                raise read_error(file, "opening it", error) from error

    def close(self) -> None:
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._stripes.num_bytes}[whence]
        self._position = max(0, begin + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: "Buffer", /) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._stripes.num_bytes - self._position))
        for stripe, offset, begin, num_bytes in self._stripes.ranges(self._position, count):
            self._fill(stripe, offset, view[begin : begin + num_bytes])
        self._position += count
        return count

    def _fill(self, stripe: int, offset: int, view: memoryview) -> None:
        file, descriptor = self._stripes.files[stripe], self._descriptors[stripe]
        try:
            count = transfer(os.preadv, descriptor, [view], offset, len(view), is_direct=False)
        except OSError as error:
            raise read_error(file, f"reading {len(view):,} bytes at {offset:,}", error) from error
        if count < len(view):
            raise CheckpointError(f"{file}: ends at byte {offset + count:,}, before its last piece: {RESTORE}")
