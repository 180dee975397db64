"""CRC-32 of the pieces of a packed shard, and how they are checked: all of them, or a few that lie far apart."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import CheckpointError
from .faults import read_fault
from .header import MAX_HEADER_BYTES

PIECE_BYTES = 4 << 20
NUM_SAMPLED = 8  # pieces that every start reads: 32 MiB at most
METADATA = "millrace"  # in a header: what is said of the original, and the sums


def sums_of(path: Path, begin: int) -> str:
    """Eight hexadecimal digits for each piece from `begin` on, one behind the other."""
    sums = list[str]()
    with path.open("rb") as file:
        file.seek(begin)
        while piece := file.read(PIECE_BYTES):
            sums.append(f"{zlib.crc32(piece):08x}")
    return "".join(sums)


def check_pieces(path: Path, begin: int, sums: str, pieces: Sequence[int]) -> None:
    """Reads these pieces. Raises CheckpointError for one that is not as it was written."""
    try:
        with path.open("rb") as file:
            for number in pieces:
                file.seek(begin + number * PIECE_BYTES)
                found = f"{zlib.crc32(file.read(PIECE_BYTES)):08x}"
                if found != sums[8 * number : 8 * number + 8]:
                    raise CheckpointError(
                        f"{path}: the 4 MiB at byte {begin + number * PIECE_BYTES:,} are not as packed (CRC-32 "
                        f"{found}, not {sums[8 * number : 8 * number + 8]}): pack the original anew"
                    )
    except OSError as error:
        raise read_fault(path, "checking pieces of it", error) from error


def told_of(path: Path) -> tuple[Mapping[str, object], int]:
    """Returns what the header of a packed shard says of its original, and where its data begins. Raises CheckpointError
    for a file that is no such shard."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        told = json.loads(header["__metadata__"][METADATA])
        num_pieces = -(-(path.stat().st_size - 8 - length) // PIECE_BYTES)
        if len(told["crc32"]) != 8 * num_pieces:
            raise ValueError("not a sum for each piece")
        return told, 8 + length
    except OSError as error:
        raise read_fault(path, "reading its header", error) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: no shard of a packed store, as `millrace pack` writes them, or damaged: pack the original anew"
        ) from error


def check_packed(files: Sequence[str], *, is_full: bool) -> None:
    """Checks all pieces of a packed store's shards, or a few at equal distances. Raises CheckpointError."""
    told = {file: told_of(Path(file)) for file in files}
    pieces = [(file, number) for file, (about, _) in told.items() for number in range(len(str(about["crc32"])) // 8)]
    count = len(pieces) if is_full else min(NUM_SAMPLED, len(pieces))
    chosen = [pieces[turn * len(pieces) // count] for turn in range(count)]
    for file, (about, begin) in told.items():
        check_pieces(Path(file), begin, str(about["crc32"]), [number for name, number in chosen if name == file])
