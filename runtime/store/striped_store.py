"""Finds the stripes of a striped store, and checks that they are whole, in order and of one pack."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import CheckpointError
from ..plan.shape.extents import ALIGNMENT_BYTES
from ..plan.shape.shapes import Stripes
from .file_digests import check_packed, read_record
from .header import MAX_HEADER_BYTES
from .json_object import read_json_object
from .stripes import RESTORE, STRIPE_KEY, STRIPE_NAME, STRIPES_KEY, open_whole, stripe_paths


def named_directories(entry: Path) -> list[str]:
    """Returns the directories that the index of a striped store names, or [] if the weights file or index `entry` is
    not of one. Raises CheckpointError."""
    metadata = read_json_object(entry).get("metadata") if entry.suffix == ".json" else None
    named = metadata.get(STRIPES_KEY) if isinstance(metadata, Mapping) else None
    if named is None:
        return []
    texts = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if len(texts) < 2 or texts != named:
        raise CheckpointError(f"{entry}: metadata.{STRIPES_KEY} must list directories, got {named!a:.80}")
    return texts


def stripe_directories(entry: Path, others: Sequence[str] = ()) -> list[Path]:
    """Returns the directories of a striped store in order, or [] if the weights file or index `entry` is not of one.
    `others`: all but the first, in place of those that the index names. Raises CheckpointError."""
    if not (texts := named_directories(entry)):
        return []
    if others and len(others) != len(texts) - 1:
        raise CheckpointError(
            f"{entry.parent}: a store striped over {len(texts)} directories, but {1 + len(others)} are named: name all "
            "of them once in the order of `pack out=[...]`, or only the first; a striped store has no mirrors"
        )
    directories = [entry.parent, *(Path(name).expanduser() for name in others or texts[1:])]
    for number, directory in enumerate(directories):
        place = f"directory {number + 1} of {len(texts)} of the striped store {entry.parent}"
        if not directory.is_dir():
            names = ",".join([str(entry.parent), *(f"DIR{index}" for index in range(2, len(texts) + 1))])
            raise CheckpointError(
                f"{directory}: missing: {place}: mount its disk, or if it was moved, name all directories in order: "
                f"model=[{names}]"
            )
        if directory.resolve() in [other.resolve() for other in directories[:number]]:
            raise CheckpointError(f"{directory}: named twice: {place}: name each directory once, in order")
    return directories


def find_stripes(directories: Sequence[Path], file: str) -> Stripes:
    """Returns the stripes of a shard, of which each directory has one. Raises CheckpointError or StorageError."""
    paths = stripe_paths(directories, file)
    first: tuple[Stripes, str] | None = None
    for number, path in enumerate(paths):
        if not path.exists():
            raise _missing_stripe_error(path, file, number, len(paths))
        stripes, pack_digest = found = _read_stripe(path, (file, number + 1, len(paths)), tuple(map(str, paths)))
        if found != (first := first or found):
            raise CheckpointError(
                f"{path}: a stripe of another pack than {paths[0]}: restore the stripes of one pack, or pack the "
                "original again"
            )
        size, expected = path.stat().st_size, stripes.data_offset + stripes.stripe_bytes(number, stripes.num_bytes)
        if size != expected:
            problem = "cut short" if size < expected else "trailing bytes"
            raise CheckpointError(f"{path}: {size:,} bytes on disk, expected {expected:,}: {problem}: {RESTORE}")
        if number == len(paths) - 1 and header_digest(stripes) != pack_digest:
            check_packed(stripes.files, is_full=True)  # names the stripe
            raise CheckpointError(f"{paths[0]}: the header of {file}, which its stripes hold, is damaged: {RESTORE}")
    assert first is not None, "a store has directories"
    return first[0]


def _read_stripe(path: Path, place: tuple[str, int, int], files: tuple[str, ...]) -> tuple[Stripes, str]:
    """Reads a stripe's header. Returns the stripes, and the digest that those of one shard have in common. `place`:
    the file, number and count that the header must say."""
    record, data_offset = read_record(path)
    own = record.get(STRIPE_KEY)
    own = own if isinstance(own, Mapping) else {}
    piece_bytes, num_bytes, pack_digest = own.get("piece_bytes"), own.get("num_bytes"), own.get("pack")
    if not (
        isinstance(piece_bytes, int)
        and isinstance(num_bytes, int)
        and isinstance(pack_digest, str)
        and min(piece_bytes, num_bytes) > 0
        and piece_bytes % ALIGNMENT_BYTES == data_offset % ALIGNMENT_BYTES == 0
    ):
        raise CheckpointError(f"{path}: not a stripe that `weightstream pack` wrote, or damaged: {RESTORE}")
    found = own.get("file"), own.get("number"), own.get("count")
    if found != place:
        raise CheckpointError(f"{path}: has stripe {found[1]} of {found[2]} of {found[0]}: it was renamed: {RESTORE}")
    stripes = Stripes(files=files, data_offset=data_offset, piece_bytes=piece_bytes, num_bytes=num_bytes)
    return stripes, pack_digest


def header_digest(stripes: Stripes) -> str:
    """Returns the SHA-256 of a shard's header, which has checksums of all its data: it identifies the shard's bytes."""
    with open_whole("", stripes) as file:
        length = file.read(8)
        return hashlib.sha256(length + file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))).hexdigest()


def _missing_stripe_error(path: Path, file: str, number: int, count: int) -> CheckpointError:
    matches = filter(None, (STRIPE_NAME.fullmatch(other.name) for other in path.parent.iterdir()))
    other = next((match for match in matches if f"{match['file']}.safetensors" == file), None)
    if other is None:
        return CheckpointError(f"{path}: missing: {RESTORE}")
    return CheckpointError(
        f"{path.parent}: has stripe {other['number']} of {other['count']} of {file}, expected {number + 1} of {count}: "
        "name the directories in the order of `pack out=[...]`"
    )
