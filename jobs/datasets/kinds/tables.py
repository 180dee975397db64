"""Reads Parquet, CSV and Hugging Face Hub datasets.

Files are read with pyarrow, not with `datasets`, whose cache is keyed by path and modification time. If a file is
replaced by another one with the same time (`rsync -a`, `cp -p`, `tar`), `datasets` would give the old rows. Datasets of
the Hub are read with `datasets`, whose cache is then keyed by revision.
"""

import base64
import codecs
import csv
import io
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, time
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from runtime.errors import DatasetError
from runtime.units import MIB

from ..fields import DatasetFields
from ..files import (
    CHUNK_BYTES,
    list_files,
    open_bytes,
    other_kind_hint,
    strip_compression_suffix,
    translate_read_errors,
    with_compressed_suffixes,
)
from ..records import Fields, Json, Record, check_columns, configured_fields, num_text_bytes, too_long_record
from ..row_rules import CHAT_KEYS, MAX_RANGE_ROWS, NumberedFile, RowRange, RowSource, SeekPoint, prompt_kind

NUM_ROWS_PER_BATCH, BATCH_BYTES = 1024, 64 * MIB
_MAX_CSV_BLOCK_BYTES = 2**31 - 1
_FIRST_CSV_ROW = 2  # pyarrow's number of the first row below the header


def read_parquet(config: DatasetFields) -> Iterator[Record]:
    """Yields the records of a Parquet file, or of the files of a directory, sorted by name. Verifies page checksums."""
    for path in _parquet_files(config):
        yield from _parquet_records(config, path, SeekPoint(file=0, row=0))


def _parquet_files(config: DatasetFields) -> list[Path]:
    return list_files(config.path or "", (".parquet",))


def _parquet_records(config: DatasetFields, path: Path, start: SeekPoint) -> Iterator[Record]:
    """Yields the records of one file from `start` on. Does not read row groups before it."""
    with _translate_arrow_errors(path, "parquet"), pq.ParquetFile(path, page_checksum_verification=True) as file:
        rows = _parquet_rows(config, file, path, start.row, NUM_ROWS_PER_BATCH)
        yield from _make_records(rows, path.name, config.max_row_bytes, start.row)


def _parquet_rows(
    config: DatasetFields, file: pq.ParquetFile, path: Path, first: int, max_batch_rows: int
) -> Iterator[dict[str, object]]:
    """Yields rows from row `first` on, as Arrow values by column."""
    names = file.schema_arrow.names
    check_columns(names, config, str(path))
    columns = None if config.keep_columns else _configured_columns(config, names)
    groups, skipped = list(range(file.num_row_groups)), 0
    while groups and skipped + file.metadata.row_group(groups[0]).num_rows <= first:
        skipped += file.metadata.row_group(groups.pop(0)).num_rows
    batch_rows = _rows_per_batch(file, max_batch_rows)
    batches = file.iter_batches(batch_rows, row_groups=groups, columns=columns, use_threads=False)
    return islice(_iter_rows(batches), first - skipped, None)


def _count_parquet(config: DatasetFields, path: Path, max_rows: int) -> int:
    with _translate_arrow_errors(path, "parquet"):
        return pq.read_metadata(path).num_rows


def _scan_parquet(config: DatasetFields, numbered: NumberedFile) -> Iterator[RowRange]:
    number, path = numbered
    with _translate_arrow_errors(path, "parquet"), pq.ParquetFile(path, page_checksum_verification=True) as file:
        rows = _parquet_rows(config, file, path, 0, MAX_RANGE_ROWS)
        first, batch_rows = 0, _rows_per_batch(file, MAX_RANGE_ROWS)
        while batch := list(islice(rows, batch_rows)):
            fields = [_to_fields(row) if num_text_bytes(row) <= config.max_row_bytes else None for row in batch]
            yield RowRange(start=SeekPoint(file=number, row=first), rows=fields)
            first += len(batch)


def read_csv(config: DatasetFields) -> Iterator[Record]:
    """Yields the records of a CSV file with a header line, or of the files of a directory, sorted by name. Every value
    is text: `007` stays `007`. A row with too few or too many fields, or with invalid UTF-8, becomes a bad record."""
    for path in list_files(config.path or "", with_compressed_suffixes(".csv", ".tsv")):
        with _translate_arrow_errors(path, "csv"):
            yield from _read_csv_file(path, config)


def read_hub(config: DatasetFields) -> Iterator[Record]:
    """Yields the records of a Hub id or a local directory, with `datasets.load_dataset`. Raises DatasetError."""
    import datasets  # slow to import, and needed by this kind only
    from datasets.exceptions import DatasetsError

    location = f"dataset.path={config.path}"
    try:
        loaded = datasets.load_dataset(
            config.path or "", name=config.hub_config, split=config.hub_split, revision=config.hub_revision
        )
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DatasetError(
            f"cannot load {location} (dataset.hub_config={config.hub_config}, dataset.hub_split={config.hub_split}, "
            f"dataset.hub_revision={config.hub_revision}): {type(error).__name__}: {reason}"
        ) from error
    assert isinstance(loaded, datasets.Dataset)
    check_columns(loaded.column_names, config, location)
    if not config.keep_columns:
        loaded = loaded.select_columns(_configured_columns(config, loaded.column_names))
    # In the arrow format, images and audio are not decoded.
    batches = loaded.with_format("arrow").iter(batch_size=NUM_ROWS_PER_BATCH)
    yield from _make_records(_iter_rows(batches), Path(config.path or "").name, config.max_row_bytes)


KINDS = {
    "parquet": prompt_kind(
        read_parquet,
        CHAT_KEYS,
        source=RowSource(files=_parquet_files, count=_count_parquet, scan=_scan_parquet, read_records=_parquet_records),
    ),
    "csv": prompt_kind(read_csv, frozenset({"csv_delimiter"})),
    "hub": prompt_kind(
        read_hub,
        CHAT_KEYS | {"hub_config", "hub_split", "hub_revision"},
        needs="dataset.path=<hub id or local directory>",
    ),
}


def to_json_value(value: object) -> Json:
    """Converts an Arrow value to a JSON value: NaN and infinity to null, bytes to base64, dates to ISO 8601, decimals
    to text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _configured_columns(config: DatasetFields, names: Collection[str]) -> list[str]:
    """The columns that have the fields which the settings name."""
    named = (name for _, name in configured_fields(config))
    return list(dict.fromkeys(name if name in names else name.partition(".")[0] for name in named))


def _rows_per_batch(file: pq.ParquetFile, max_rows: int) -> int:
    """The number of rows in a batch, at most `max_rows`. It is lower for long rows, so that a batch has at most
    `BATCH_BYTES`."""
    metadata = file.metadata
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    row_bytes = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    return max(1, min(max_rows, BATCH_BYTES // max(1, row_bytes)))


def _iter_rows(batches: Iterable[pa.Table]) -> Iterator[dict[str, object]]:
    for batch in batches:
        yield from batch.to_pylist()


def _make_records(
    rows: Iterator[dict[str, object]], source: str, max_row_bytes: int, first: int = 0
) -> Iterator[Record]:
    for number, row in enumerate(rows, start=first):
        name, location, num_bytes = f"{source}:{number}", f"{source}, row {number}", num_text_bytes(row)
        if num_bytes > max_row_bytes:
            yield too_long_record(name, location, num_bytes, max_row_bytes)
            continue
        yield Record(name=name, location=location, fields=_to_fields(row))


def _to_fields(row: Mapping[str, object]) -> Fields:
    return {key: to_json_value(value) for key, value in row.items()}


def _read_csv_file(path: Path, config: DatasetFields) -> Iterator[Record]:
    errors: dict[int, str] = {}  # by pyarrow's row number

    def record_error(row: pa_csv.InvalidRow) -> str:
        errors[row.number] = f"{row.actual_columns} fields, but the header has {row.expected_columns}"
        return "skip"

    content = _csv_content(path)
    delimiter = config.csv_delimiter
    is_tsv = delimiter == DatasetFields.csv_delimiter and strip_compression_suffix(path.name).endswith(".tsv")
    if is_tsv and b"\t" in content.lstrip().partition(b"\n")[0]:  # in the header
        delimiter = "\t"
    parse_options = pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=record_error)
    lines = (line.decode("utf-8") for line in io.BytesIO(content.removeprefix(codecs.BOM_UTF8)))
    names = next((names for names in csv.reader(lines, delimiter=delimiter) if names), list[str]())
    is_text = True
    try:
        codecs.decode(content, "utf-8")
    except UnicodeDecodeError:
        is_text = False
        # pyarrow fails when it reports a bad row with invalid UTF-8. As Latin-1, any bytes are valid text.
        content = content.removeprefix(codecs.BOM_UTF8).decode("latin-1").encode("utf-8")
    try:
        check_columns(names, config, str(path))
    except DatasetError as error:
        raise DatasetError(f"{error}{other_kind_hint(path, 'csv')}") from error
    # One block, because a quoted value may be of any size. One thread, because pyarrow numbers bad rows only then.
    read_options = pa_csv.ReadOptions(use_threads=False, block_size=min(len(content) + 1, _MAX_CSV_BLOCK_BYTES))
    columns = names if is_text else [name.encode("utf-8").decode("latin-1") for name in names]
    convert_options = pa_csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.binary()), strings_can_be_null=False)
    table = pa_csv.read_csv(pa.BufferReader(content), read_options, parse_options, convert_options)
    cells = (row for batch in table.to_batches(NUM_ROWS_PER_BATCH) for row in batch.to_pylist())
    for number in range(table.num_rows + len(errors)):
        name, location = f"{path.name}:{number}", f"{path.name}, row {number}"
        reason = errors.get(number + _FIRST_CSV_ROW)
        row = {} if reason else next(cells)
        if num_text_bytes(row) > config.max_row_bytes:
            yield too_long_record(name, location, num_text_bytes(row), config.max_row_bytes)
            continue
        try:
            decoded = (cell.decode("utf-8") for cell in row.values())
            texts = [text if is_text else text.encode("latin-1").decode("utf-8") for text in decoded]
            fields: Fields | None = None if reason else dict(zip(names, texts, strict=True))
        except UnicodeDecodeError as error:
            fields, reason = None, f"not UTF-8: byte 0x{error.object[error.start]:02x}"
        yield Record(name=name, location=location, fields=fields, error=f"{location}: {reason}" if reason else None)


def _csv_content(path: Path) -> bytes:
    content = bytearray()
    with open_bytes(path) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            content += chunk
            if len(content) >= _MAX_CSV_BLOCK_BYTES:
                raise DatasetError(f"{path}: CSV files must be below {_MAX_CSV_BLOCK_BYTES:,} bytes: split it")
    return bytes(content)


@contextmanager
def _translate_arrow_errors(path: Path, kind: str) -> Iterator[None]:
    try:
        with translate_read_errors(path):
            yield
    except (UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"cannot read {path}: {error}{other_kind_hint(path, kind)}") from error
    except DatasetError as error:
        if not isinstance(error.__cause__, pa.ArrowInvalid):
            raise
        raise DatasetError(f"{error}{other_kind_hint(path, kind)}") from error
