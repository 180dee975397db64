"""Writes a packed shard as stripes: its pieces are dealt to directories on several disks in turn."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from runtime.errors import OutputError
from runtime.plan.shape.shapes import Stripes
from runtime.store.file_digests import METADATA, PIECE_BYTES, crc32_sums
from runtime.store.striped_store import header_digest
from runtime.store.stripes import STRIPE_KEY, STRIPE_TENSOR, stripe_paths
from runtime.store.writer import atomic_write
from runtime.units import format_bytes, round_up

# Small, so that also one expert is on all disks. Pieces of a stripe are adjacent in its file and are read together.
STRIPE_BYTES = 256 * 1024
HEADER_BYTES = 4096  # of a stripe, without its checksums


class StripeWriter:
    """A file to write that is divided among `files`, each behind a reserved header. `name`: the path of the whole
    file, for errors."""

    def __init__(self, name: Path, files: Sequence[BinaryIO], data_offset: int):
        self.name, self._files, self._position, self._size = str(name), files, 0, 0
        self._empty = Stripes(
            files=tuple(file.name for file in files), data_offset=data_offset, piece_bytes=STRIPE_BYTES, num_bytes=0
        )

    @property
    def stripes(self) -> Stripes:
        """The stripes with all bytes that were written and flushed, to read them back."""
        return replace(self._empty, num_bytes=self._size)

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int) -> None:
        self._position = offset

    def truncate(self) -> None:
        """Discards all bytes from the current position on."""
        self._size = self._position
        for stripe, file in enumerate(self._files):
            with self._named(file):
                file.truncate(self._empty.data_offset + self._empty.stripe_bytes(stripe, self._size))

    def write(self, data: bytes | memoryview) -> None:
        """Raises OutputError."""
        view = memoryview(data).cast("B")
        for stripe, offset, begin, num_bytes in self._empty.ranges(self._position, len(view)):
            file = self._files[stripe]
            with self._named(file):
                if file.tell() != offset:
                    file.seek(offset)
                file.write(view[begin : begin + num_bytes])
        self._position += len(view)
        self._size = max(self._size, self._position)

    def flush(self) -> None:
        for file in self._files:
            with self._named(file):
                file.flush()

    def finish(self, file_name: str, stamp: str) -> None:
        """Writes the headers of the stripes. `stamp`: identifies the original shard and the format."""
        self.flush()
        stripes = self.stripes
        place = {"file": file_name, "count": len(self._files), "pack": header_digest(stripes)}
        sizes = {"piece_bytes": stripes.piece_bytes, "num_bytes": stripes.num_bytes}
        for number, file in enumerate(self._files):
            sums = crc32_sums(Path(file.name), stripes.data_offset)
            record = {"source": stamp, STRIPE_KEY: {**place, "number": number + 1, **sizes}, "crc32": sums}
            num_bytes = stripes.stripe_bytes(number, stripes.num_bytes)
            header = {
                "__metadata__": {"format": "pt", METADATA: json.dumps(record, separators=(",", ":"))},
                STRIPE_TENSOR: {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]},
            }
            text = json.dumps(header, separators=(",", ":")).encode()
            assert len(text) <= stripes.data_offset - 8, f"header of {len(text)} bytes"
            with self._named(file):
                file.seek(0)
                file.write((stripes.data_offset - 8).to_bytes(8, "little") + text.ljust(stripes.data_offset - 8))
                file.flush()

    @contextmanager
    def _named(self, file: BinaryIO) -> Iterator[None]:
        """Converts an OSError to an OutputError that names the stripe: else that of another disk would be blamed."""
        try:
            yield
        except OSError as error:
            free = ""
            with suppress(OSError):
                free = f", {format_bytes(shutil.disk_usage(Path(file.name).parent).free)} are free"
            name, _, _ = Path(file.name).name.removeprefix(".").partition(".safetensors")
            path = Path(file.name).with_name(f"{name}.safetensors")
            raise OutputError(f"{path} cannot be written: {error.strerror or error}{free}") from error


@contextmanager
def write_stripes(directories: Sequence[Path], file: str, num_bytes: int, stamp: str) -> Iterator[StripeWriter]:
    """Opens a file to write, divided among directories. On exit, the stripes appear, in the first directory last; on an
    error, none does. `num_bytes`: at most so many. `stamp`: see `StripeWriter.finish`. Raises OutputError."""
    count = len(directories)
    paths = stripe_paths(directories, file)
    data_offset = round_up(HEADER_BYTES + 8 * (num_bytes // count // PIECE_BYTES + 2), HEADER_BYTES)
    with ExitStack() as stack:
        files = [stack.enter_context(atomic_write(path, num_bytes // count)) for path in paths]
        writer = StripeWriter(directories[0] / file, files, data_offset)
        yield writer
        writer.finish(file, stamp)
