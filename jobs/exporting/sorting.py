"""Rows in the order of the input, in memory that does not grow with their number: parts hold rows by length, so rows
are dealt out to files of neighbouring places first, and then each file is sorted by itself."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from runtime.closing import Closing
from runtime.errors import DamagedRunError

ORDER = ("row_index", "sample_index")
ORDER_OF_TURNS = ("row_index", "turn")  # of chats of several turns
MAX_FILES = 500  # that are open at once


class Sorter(Closing):
    """A context manager; its files are on the disk of the output and have no name, so that even a kill leaves none."""

    def __init__(self, folder: Path, num_places: int, num_files: int, order: Sequence[str] = ORDER):
        """`num_places`: how many rows the input has. With one file the rows stay in memory. `order`: the columns that
        say where a row belongs; the first is its place in the input."""
        self._order = order
        self._num_places, self._num_files = max(1, num_places), max(1, min(num_files, MAX_FILES))
        self._stack = ExitStack()
        self._tables: list[pa.Table] = []
        self._files: dict[int, BinaryIO] = {}
        self._writers: dict[int, pa.RecordBatchFileWriter] = {}
        self._folder = folder

    def add(self, table: pa.Table) -> None:
        if self._num_files == 1:
            self._tables.append(table)
            return
        places = table["row_index"].to_numpy()
        files = np.minimum(places * self._num_files // self._num_places, self._num_files - 1)
        for number in np.unique(files):
            self._writer(int(number), table.schema).write_table(table.filter(pa.array(files == number)))

    def sorted(self) -> Iterator[pa.Table]:
        """All rows, in a few tables that follow one another. Raises DamagedRunError for a row that came twice."""
        if self._num_files == 1:
            yield from (_in_order(self._tables, self._order),) if self._tables else ()
            return
        for writer in self._writers.values():
            writer.close()
        for number in sorted(self._writers):
            with self._files.pop(number) as file:
                yield _in_order([pa.ipc.open_file(pa.PythonFile(file, mode="r")).read_all()], self._order)

    def close(self) -> None:
        self._stack.close()

    def _writer(self, number: int, schema: pa.Schema) -> pa.RecordBatchFileWriter:
        if number not in self._writers:
            file = self._stack.enter_context(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115
            self._files[number] = file
            self._writers[number] = pa.ipc.new_file(file, schema)
        return self._writers[number]


def _in_order(tables: Iterable[pa.Table], order: Sequence[str]) -> pa.Table:
    table = pa.concat_tables(tables).sort_by([(name, "ascending") for name in order])
    same = [np.diff(table[name].to_numpy()) == 0 for name in order]
    twice = np.flatnonzero(np.logical_and(*same))
    if len(twice):
        row = {name: table[name][int(twice[0])].as_py() for name in ("row_index", "id")}
        raise DamagedRunError(f"row {row['row_index']}, id {row['id']!r}, is in two parts")
    return table
