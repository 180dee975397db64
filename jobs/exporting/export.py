"""Exports the parts of a run's shards to one file: verifies and sorts rows, and publishes the file atomically."""

import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from runtime.closing import Closing
from runtime.config.texts import is_url
from runtime.errors import ConfigError, DamagedRunError
from runtime.units import MIB, format_bytes, format_count

from ..files.named import is_replaceable, named_file_error, publish_named
from ..files.publishing import PARQUET_PROBLEMS, make_directory, sweep_temps
from ..record.run_dir import RunDirectory
from ..record.run_reader import RunReader, find_runs
from .columns import WRITERS, JsonTypeInference, align_columns, merge_schemas, select_columns, write_csv
from .config import ErrorRows, ExportConfig, ExportFormat
from .fastchat import make_fastchat_writer
from .openai_batch import make_batch_writer
from .shards import check_complete, read_parts, require_one_run

log = logging.getLogger(__name__)
SORT_BYTES = 64 * MIB  # size of the parts sorted in one file; in memory, rows need a few times as much
SORT_COLUMNS = ("row_index", "sample_index")
TURN_SORT_COLUMNS = ("row_index", "turn")  # for multi-turn chats
MAX_SORT_FILES = 500  # open at once


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    out: Path
    num_rows: int
    num_errors: int  # error rows among `num_rows`
    num_dropped: int
    num_shards: int
    missing: Sequence[str]  # sentences about missing rows and shards
    text_columns: Sequence[str]  # columns without a common type of values
    created_directory: Path | None  # directory of `out`, if it was created

    @property
    def lines(self) -> list[str]:
        errors = f", {self.num_errors:,} of them with an error" if self.num_errors else ""
        dropped = f"; {self.num_dropped:,} with an error omitted" if self.num_dropped else ""
        shards = f" of {self.num_shards} shards" if self.num_shards > 1 else ""
        size = format_bytes(self.out.stat().st_size)
        lines = [f"created directory {self.created_directory}"] if self.created_directory is not None else []
        lines += [f"{self.out}: {format_count(self.num_rows, 'row')}{shards}{errors}{dropped}, {size}"]
        lines += [f"missing: {sentence}" for sentence in self.missing]
        return lines + [
            f"column {name}: written as text, its values have different types" for name in self.text_columns
        ]


def export(config: ExportConfig) -> ExportResult:
    """Writes the exported file. Raises ConfigError, also for an incomplete run without `partial`, DamagedRunError, and
    OutputError. After an error, an older file is unchanged."""
    shards = require_one_run(find_runs(config.runs, "run"))
    out = resolve_output(config)
    _reject_run_files(out, shards)
    missing = check_complete(config.runs, shards, partial=config.partial, verb="exports")
    firsts = [run.parts[min(run.parts)] for run in shards if run.parts]
    if not firsts:
        raise ConfigError(f"{shards[0].location} has no finished rows yet")
    try:
        schema = merge_schemas([pq.read_schema(path) for path in firsts])
    except PARQUET_PROBLEMS as error:
        raise ConfigError(f"{firsts[0]} cannot be read ({error}): repeat the run's command to regenerate it") from error
    keeps_input = shards[0].semantic.get("dataset.keep_columns") is not False
    names = select_columns(schema, config.columns, has_input=keeps_input)
    types = JsonTypeInference(schema=pa.schema([schema.field(name) for name in names]))
    is_parquet, results = config.effective_format is ExportFormat.parquet, None
    if config.effective_format is ExportFormat.openai_batch:
        results = make_batch_writer(shards, schema, config.errors)
    elif config.effective_format is ExportFormat.fastchat:
        results = make_fastchat_writer(shards, schema, config.errors, out)
    order = TURN_SORT_COLUMNS if shards[0].num_turns > 1 else SORT_COLUMNS
    created_directory = None if out.absolute().parent.is_dir() else out.parent
    make_directory(out.absolute().parent)
    num_bytes, num_rows, num_errors = 0, 0, 0
    try:
        # An estimate of the input rows suffices: it only affects the distribution of rows to sort files.
        indices = (plan["row_index"].to_numpy() for run in shards for plan in run.plans())
        num_input_rows = max((int(rows.max()) + 1 for rows in indices if len(rows)), default=1)
        for path in (path for run in shards for path in run.parts.values()):
            with suppress(*PARQUET_PROBLEMS):  # reported when the part is read
                footer = pq.read_metadata(path)
                num_bytes += sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
        with RowSorter(out.absolute().parent, num_input_rows, -(-num_bytes // SORT_BYTES), order) as sorter:
            for part, row_indices in (item for run in shards for item in read_parts(run, partial=config.partial)):
                table = align_columns(part, row_indices, schema)
                is_ok = np.array([status == "ok" for status in table["status"].to_pylist()])
                num_errors += int((~is_ok).sum())
                if config.errors is not ErrorRows.keep and results is None:
                    table = table.filter(pa.array(is_ok if config.errors is ErrorRows.drop else ~is_ok))
                num_rows += table.num_rows
                if is_parquet:
                    types.update(table)
                sorter.add(table)
            tables = (table.select(names) for table in sorter.sorted_tables())
            write = WRITERS[config.effective_format] if results is None else results.write
            write = partial(write_csv, is_safe=True) if config.csv_safe else write
            written_schema = types.inferred_schema() if is_parquet else types.schema
            sweep_temps(out.parent, out.name)  # temporary files of killed exports
            publish_named(out, lambda file: write(tables, written_schema, file))
    except OSError as error:
        raise named_file_error(out, error) from error
    if results is not None:
        num_rows, num_errors = results.num_lines, results.num_errors
    return ExportResult(
        out=out,
        num_rows=num_rows,
        num_errors=0 if config.errors is ErrorRows.drop else num_errors,
        num_dropped=num_errors if config.errors is ErrorRows.drop else 0,
        num_shards=len({run.shard[0] for run in shards}),
        missing=missing,
        text_columns=types.text_columns() if is_parquet else [],
        created_directory=created_directory,
    )


def write_batch_files(directory: Path, *, partial: bool = False) -> list[str]:
    """Writes the results and errors of an OpenAI batch to two files in its run directory; returns summary lines.
    `partial`: also for an unfinished run."""
    run = RunDirectory(path=directory)
    lines: list[str] = []
    for out, errors in ((run.batch_output, ErrorRows.drop), (run.batch_errors, ErrorRows.only)):
        form = ExportFormat.openai_batch
        config = ExportConfig(
            run=str(directory), out=str(out), format=form, errors=errors, partial=partial, overwrite=True
        )
        lines += export(config).lines
    return lines


def resolve_output(config: ExportConfig) -> Path:
    """Returns the output path. Raises ConfigError if it is a directory, or, without `overwrite`, an existing file that
    no export wrote."""
    out = Path(config.out or "").expanduser()
    if out.is_dir():
        raise ConfigError(f"out={out} is a directory: name a file in it")
    if not config.overwrite and not is_replaceable(out):
        raise ConfigError(
            f"out={out} exists, and was not written by an export or was changed since: choose another out=, or replace "
            "it with overwrite=true"
        )
    return out


def _reject_run_files(out: Path, shards: Sequence[RunReader]) -> None:
    """Raises ConfigError if `out` is in a folder of parts, or is an input or another file of the run."""
    run_folders = {
        folder.resolve() for run in shards for folder in (run.directory.generations, run.directory.throughput)
    }
    if out.absolute().parent.resolve() in run_folders:
        raise ConfigError(f"out={out} is in a folder of parts, where readers would take it for a part")
    if not out.exists():
        return
    for run in shards:
        if (key := _matching_input(out, run)) is not None:
            raise ConfigError(
                f"out={out} is an input of {run.location} ({key}), which is never replaced: choose another"
            )
        results = (run.directory.batch_output.name, run.directory.batch_errors.name)
        if run.path.samefile(out.absolute().parent) and out.name not in results and not is_replaceable(out):
            raise ConfigError(f"out={out} is a file of the run, which is never replaced: choose another")


def _matching_input(out: Path, run: RunReader) -> str | None:
    """`key=value` of the run's setting that reads `out` or a directory containing it; else None. Relative paths are
    also compared by trailing components, since the run may have been started elsewhere."""
    for key, value in {**run.semantic, **run.operational}.items():
        if not key.endswith(("path", "tokenizer")) or not isinstance(value, str) or is_url(value):
            continue
        path, resolved = Path(value), out.resolve()
        with suppress(RuntimeError):  # unknown user
            path = path.expanduser()
        is_same_file = path.exists() and out.samefile(path)
        is_inside = path.is_dir() and resolved.is_relative_to(path.resolve()) and not is_replaceable(out)
        has_same_suffix = (
            not path.is_absolute() and path.name != "" and resolved.parts[-len(path.parts) :] == path.parts
        )
        if is_same_file or is_inside or has_same_suffix:
            return f"{key}={value}"
    return None


class RowSorter(Closing):
    """External sort of rows into input order, in bounded memory: distributes rows to files by row index, then sorts
    each file in memory. A context manager; its files in `folder` have no name, so a killed process leaves none."""

    def __init__(self, folder: Path, num_input_rows: int, num_files: int, order: Sequence[str] = SORT_COLUMNS):
        """`num_files`: with 1, rows stay in memory. `order`: sort columns, beginning with the row index."""
        self._order = order
        self._num_input_rows, self._num_files = max(1, num_input_rows), max(1, min(num_files, MAX_SORT_FILES))
        self._stack = ExitStack()
        self._tables: list[pa.Table] = []
        self._files: dict[int, BinaryIO] = {}
        self._writers: dict[int, pa.RecordBatchFileWriter] = {}
        self._folder = folder

    def add(self, table: pa.Table) -> None:
        if self._num_files == 1:
            self._tables.append(table)
            return
        row_indices = table["row_index"].to_numpy()
        files = np.minimum(row_indices * self._num_files // self._num_input_rows, self._num_files - 1)
        for number in map(int, np.unique(files)):
            if number not in self._writers:
                file = self._stack.enter_context(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115
                self._files[number], self._writers[number] = file, pa.ipc.new_file(file, table.schema)
            self._writers[number].write_table(table.filter(pa.array(files == number)))

    def sorted_tables(self) -> Iterator[pa.Table]:
        """Yields all rows as consecutive sorted tables. Raises DamagedRunError for a duplicate row."""
        if self._num_files == 1:
            yield from (_sort_tables(self._tables, self._order),) if self._tables else ()
            return
        for writer in self._writers.values():
            writer.close()
        for number in sorted(self._writers):
            with self._files.pop(number) as file:
                yield _sort_tables([pa.ipc.open_file(pa.PythonFile(file, mode="r")).read_all()], self._order)

    def close(self) -> None:
        self._stack.close()


def _sort_tables(tables: Iterable[pa.Table], order: Sequence[str]) -> pa.Table:
    table = pa.concat_tables(tables).sort_by([(name, "ascending") for name in order])
    is_repeated = [np.diff(table[name].to_numpy()) == 0 for name in order]
    duplicates = np.flatnonzero(np.logical_and(*is_repeated))
    if len(duplicates):
        row = {name: table[name][int(duplicates[0])].as_py() for name in ("row_index", "id")}
        raise DamagedRunError(f"row {row['row_index']}, id {row['id']!r}, is in two parts")
    return table
