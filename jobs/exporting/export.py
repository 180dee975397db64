"""The parts of a run's shards as one file: rows verified, put in order and published whole."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from runtime.config.texts import is_url
from runtime.errors import ConfigError
from runtime.units import MIB, format_bytes

from ..files.named import cannot_write, is_replaceable, publish_named
from ..files.publishing import PARQUET_PROBLEMS, make_directory, sweep_temps
from ..record.found import FoundRun, find_runs
from ..record.run_dir import RunDirectory
from .columns import JsonTypes, chosen, exported_schema, with_columns
from .config import FORMS_OF_OTHERS, ErrorRows, ExportConfig, ExportFormat
from .fastchat import Answers, Judgments, fastchat_results
from .formats import WRITERS, write_csv
from .openai_batch import BatchResults, batch_results
from .shards import Missing, missing, read_parts, require_one_run
from .sorting import ORDER, ORDER_OF_TURNS, Sorter

log = logging.getLogger(__name__)
BYTES_AT_ONCE = 64 * MIB  # of rows as parts hold them, that are sorted together; in memory a few times as much


@dataclass(frozen=True, kw_only=True)
class Exported:
    out: Path
    num_rows: int
    num_errors: int  # of these rows
    num_dropped: int
    num_shards: int
    missing: Missing
    as_text: Sequence[str]  # columns of values that have no type in common
    made: Path | None  # the directory of `out`, where it was not there


def export(config: ExportConfig) -> Exported:
    """Writes the file that `config` asks for. Raises ConfigError for what is missing and not to be left out,
    DamagedRunError, OutputError with an older file left as it was."""
    shards = require_one_run(find_runs(config.runs, "run"))
    out = require_free(config)
    _require_file(out, shards)
    lacking = missing(shards)
    if lacking.sentences and not config.partial:
        raise ConfigError(
            f"run={','.join(config.runs)} is not complete: {'; '.join(lacking.sentences)}. The run's own command goes "
            "on with it; partial=true exports what is there"
        )
    schema = exported_schema(_schemas(shards))
    kept = shards[0].semantic.get("dataset.keep_columns") is not False
    names = chosen(schema, config.columns, has_input=kept)
    types, counts = JsonTypes(schema=pa.schema([schema.field(name) for name in names])), _Counts()
    is_parquet, results = config.written_as is ExportFormat.parquet, _results(shards, schema, config, out)
    order = ORDER_OF_TURNS if shards[0].num_turns > 1 else ORDER
    made = None if out.absolute().parent.is_dir() else out.parent
    make_directory(out.absolute().parent)
    try:
        with Sorter(out.absolute().parent, _num_places(shards), _num_files(shards), order) as sorter:
            for table in _rows(shards, schema, config, counts):
                if is_parquet:
                    types.see(table)
                sorter.add(table)
            tables = (table.select(names) for table in sorter.sorted())
            write = WRITERS[config.written_as] if results is None else results.write
            write = partial(write_csv, is_safe=True) if config.csv_safe else write
            as_written = types.result() if is_parquet else types.schema
            sweep_temps(out.parent, out.name)  # what exports that were killed left half written
            publish_named(out, lambda file: write(tables, as_written, file))
    except OSError as error:
        raise cannot_write(out, error) from error
    num_rows = counts.num_rows if results is None else results.num_lines
    num_errors = counts.num_errors if results is None else results.num_errors
    return Exported(
        out=out,
        num_rows=num_rows,
        num_errors=0 if config.errors is ErrorRows.drop else num_errors,
        num_dropped=num_errors if config.errors is ErrorRows.drop else 0,
        num_shards=len({run.shard[0] for run in shards}),
        missing=lacking,
        as_text=types.as_text() if is_parquet else [],
        made=made,
    )


def _results(
    shards: Sequence[FoundRun], schema: pa.Schema, config: ExportConfig, out: Path
) -> BatchResults | Answers | Judgments | None:
    """What writes a form of others; None where rows are written as they are."""
    if config.written_as is ExportFormat.openai_batch:
        return batch_results(shards, schema, config.errors)
    if config.written_as is ExportFormat.fastchat:
        return fastchat_results(shards, schema, config.errors, out)
    return None


def write_batch_files(directory: Path, *, partial: bool = False) -> list[str]:
    """Writes the results of an OpenAI batch and, in a file of their own, its errors, beside the parts of its run.
    Returns what a person reads about them. `partial`: of a run that is not finished, what is there."""
    run = RunDirectory(path=directory)
    lines: list[str] = []
    for out, errors in ((run.batch_output, ErrorRows.drop), (run.batch_errors, ErrorRows.only)):
        form = ExportFormat.openai_batch
        asked = ExportConfig(
            run=str(directory), out=str(out), format=form, errors=errors, partial=partial, overwrite=True
        )
        lines += describe(export(asked))
    return lines


@dataclass(kw_only=True)
class _Counts:
    num_rows: int = 0
    num_errors: int = 0


def require_free(config: ExportConfig) -> Path:
    """The file to write. Raises ConfigError where one is there that no export wrote, unless it may be overwritten."""
    out = Path(config.out or "").expanduser()
    if out.is_dir():
        raise ConfigError(f"out={out} is a directory: name a file in it")
    if not config.overwrite and not is_replaceable(out):
        raise ConfigError(
            f"out={out} is there, and was not written by an export or was changed since: it stays as it is. Choose "
            "another out=, or replace it with overwrite=true"
        )
    return out


def _require_file(out: Path, shards: Sequence[FoundRun]) -> None:
    """What lies in a run's own folders is taken for a part of it, and what it was asked is never replaced."""
    own = {folder.resolve() for run in shards for folder in (run.directory.generations, run.directory.throughput)}
    if out.absolute().parent.resolve() in own:
        raise ConfigError(f"out={out} lies among the parts of the run, where readers would take it for one")
    if not out.exists():
        return
    for run in shards:
        if (key := _input_at(out, run)) is not None:
            raise ConfigError(f"out={out} is an input of {run.place} ({key}), which is never replaced: choose another")
        results = (run.directory.batch_output.name, run.directory.batch_errors.name)
        if run.path.samefile(out.absolute().parent) and out.name not in results and not is_replaceable(out):
            raise ConfigError(f"out={out} is a file of the run itself, which is never replaced: choose another")


def _input_at(out: Path, run: FoundRun) -> str | None:
    """`key=value` of the setting by which the run reads the file `out`, or others of its directory; None where none
    does. A path that is no longer there from here, as it was relative to another directory, is known by its end."""
    for key, value in {**run.semantic, **run.operational}.items():
        if not key.endswith(("path", "tokenizer")) or not isinstance(value, str) or is_url(value):
            continue
        named, there = Path(value), out.resolve()
        with suppress(RuntimeError):  # nobody's home
            named = named.expanduser()
        is_it = named.exists() and out.samefile(named)
        is_inside = named.is_dir() and there.is_relative_to(named.resolve()) and not is_replaceable(out)
        is_alike = not named.is_absolute() and named.name != "" and there.parts[-len(named.parts) :] == named.parts
        if is_it or is_inside or is_alike:
            return f"{key}={value}"
    return None


def _schemas(shards: Sequence[FoundRun]) -> list[pa.Schema]:
    firsts = [run.parts[min(run.parts)] for run in shards if run.parts]
    if not firsts:
        raise ConfigError(f"{shards[0].place}: no row is done yet")
    try:
        return [pq.read_schema(path) for path in firsts]
    except PARQUET_PROBLEMS as error:
        raise ConfigError(f"{firsts[0]} cannot be read ({error}): the run's own command makes it again") from error


def _num_places(shards: Sequence[FoundRun]) -> int:
    """One more than the last place in the input, or a guess at it: it only decides how rows are dealt out."""
    places = (plan["row_index"].to_numpy() for run in shards for plan in run.plans())
    return max((int(each.max()) + 1 for each in places if len(each)), default=1)


def _num_files(shards: Sequence[FoundRun]) -> int:
    num_bytes = 0
    for path in (path for run in shards for path in run.parts.values()):
        with suppress(*PARQUET_PROBLEMS):  # said when it is read
            footer = pq.read_metadata(path)
            num_bytes += sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
    return -(-num_bytes // BYTES_AT_ONCE)


def _rows(shards: Sequence[FoundRun], schema: pa.Schema, config: ExportConfig, counts: _Counts) -> Iterator[pa.Table]:
    for run in shards:
        for part, places in read_parts(run, partial=config.partial):
            table = with_columns(part, places, schema)
            is_ok = np.array([status == "ok" for status in table["status"].to_pylist()])
            counts.num_errors += int((~is_ok).sum())
            kept = table
            if config.errors is not ErrorRows.keep and config.written_as not in FORMS_OF_OTHERS:
                kept = table.filter(pa.array(is_ok if config.errors is ErrorRows.drop else ~is_ok))
            counts.num_rows += kept.num_rows
            yield kept


def describe(exported: Exported) -> list[str]:
    """What a person reads at the end."""
    errors = f", {exported.num_errors:,} of them with an error" if exported.num_errors else ""
    dropped = f"; {exported.num_dropped:,} with an error left out" if exported.num_dropped else ""
    shards = f" of {exported.num_shards} shards" if exported.num_shards > 1 else ""
    size = format_bytes(exported.out.stat().st_size)
    lines = [f"{exported.made} was not there: made"] if exported.made is not None else []
    lines += [f"{exported.out}: {_rows_text(exported.num_rows)}{shards}{errors}{dropped}, {size}"]
    lines += [f"not there: {sentence}" for sentence in exported.missing.sentences]
    lines += [f"column {name}: its values have no one type, so it is text" for name in exported.as_text]
    return lines


def _rows_text(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
