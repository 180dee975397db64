"""Copies of a checkpoint on other disks, from which weights are read at the same time."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from ..errors import CheckpointError, StorageError
from .checkpoint import Checkpoint, open_checkpoint

log = logging.getLogger(__name__)

Copies: TypeAlias = Mapping[str, Sequence[str]]  # file of a checkpoint -> the same file in each of its mirrors


def find_copies(
    checkpoint: Checkpoint,
    mirrors: Sequence[str],
    digests: Mapping[str, str] | None = None,
    compute_digests: Callable[[Sequence[str]], Mapping[str, str]] | None = None,
) -> Copies:
    """Returns the copies of the checkpoint's files in `mirrors`: directories, or GGUF files.

    A mirror that cannot be read is left out with a warning. Raises CheckpointError if one has other weights: other
    names, sizes, headers or samples of data (see `Checkpoint.fingerprint`), or with `digests` of the checkpoint's files
    any other byte.
    """
    copies, directories = dict[str, list[str]](), [Path(checkpoint.path)]
    for mirror in mirrors:
        path = Path(mirror).expanduser()
        try:
            other = open_checkpoint(path)
            is_same = other.fingerprint() == checkpoint.fingerprint()
            if is_same and digests and compute_digests is not None:
                found = compute_digests(other.files)
                is_same = [found[file] for file in other.files] == [digests[file] for file in checkpoint.files]
        except (CheckpointError, StorageError, OSError) as error:
            log.warning("model.mirrors: %s is left out, weights are read from the others: %s", mirror, error)
            continue
        if other.stripes:
            raise CheckpointError(f"model.mirrors: {mirror} is a striped store, which cannot be a mirror: leave it out")
        if not is_same:
            raise CheckpointError(
                f"model.mirrors: {mirror} has other weights than {checkpoint.path}: copy the files again, or leave "
                "the mirror out"
            )
        for file, copy in zip(checkpoint.files, other.files, strict=True):
            copies.setdefault(file, []).append(copy)
        directories.append(path)
    warn_of_shared_disk("model.mirrors", directories)
    return copies


def warn_of_shared_disk(key: str, directories: Sequence[Path]) -> None:
    """Warns if some of `directories` are in one file system. `key`: the setting that names them."""
    by_device = dict[int, list[str]]()
    for directory in directories:
        with suppress(OSError):
            by_device.setdefault(directory.stat().st_dev, []).append(str(directory))
    for shared in by_device.values():
        if len(shared) > 1:
            log.warning(
                "%s: %s are on one disk, so reading them at the same time is not faster: put each on a disk of its own",
                key,
                " and ".join(shared),
            )
