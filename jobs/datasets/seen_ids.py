"""Ids of any number of rows, kept on disk as digests, and which rows have one that an earlier row has."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from runtime.closing import Closing

NUM_FILES = 64  # each is sorted in memory by itself, 24 bytes for each of its rows
ENTRY = np.dtype([("high", np.int64), ("low", np.int64), ("row", np.int64)])


class SeenIds(Closing):
    """A context manager; its files have no name, so that even a kill leaves none. Ids are told apart by 128 bits of
    Python's own keyed hash, which two different ones share as good as never. Raises OSError where the disk is full."""

    def __init__(self, folder: Path):
        """`folder`: on whose disk the files are."""
        self._stack = ExitStack()
        files = (tempfile.TemporaryFile(dir=folder) for _ in range(NUM_FILES))  # noqa: SIM115 - the stack closes them
        self._files: list[BinaryIO] = [self._stack.enter_context(file) for file in files]

    def close(self) -> None:
        with suppress(OSError):  # a full disk takes what is still in buffers as little as what was written before
            self._stack.close()

    def add(self, ids: Sequence[str], first: int) -> None:
        """The ids of rows that follow one another from number `first` on."""
        entries = np.empty(len(ids), ENTRY)
        entries["high"] = [hash(id) for id in ids]
        entries["low"] = [hash("\0" + id) for id in ids]
        entries["row"] = np.arange(first, first + len(ids))
        numbers = entries["high"] % NUM_FILES
        order = np.argsort(numbers, kind="stable")
        begins = np.searchsorted(numbers[order], np.arange(NUM_FILES + 1))
        for file, begin, end in zip(self._files, begins[:-1], begins[1:], strict=True):
            file.write(entries[order[begin:end]].tobytes())

    def repeated(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The number of each row whose id an earlier row has, in order, and beside it that of the first row with its
        id."""
        rows, firsts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for file in self._files:
            file.seek(0)
            entries = np.frombuffer(file.read(), ENTRY)
            entries = entries[np.lexsort((entries["row"], entries["low"], entries["high"]))]
            same = (np.diff(entries["high"]) == 0) & (np.diff(entries["low"]) == 0)
            begins = np.concatenate([[True], ~same])[: len(entries)]
            first_of = entries["row"][np.flatnonzero(begins)][np.cumsum(begins) - 1]
            rows.append(entries["row"][~begins])
            firsts.append(first_of[~begins])
        found, first = np.concatenate(rows), np.concatenate(firsts)
        order = np.argsort(found)
        return found[order], first[order]
