"""What a run has committed, read as anyone reads Parquet but with the parts' own checks."""

import pyarrow as pa

from jobs.files.publishing import PARQUET_PROBLEMS
from jobs.record.output_rows import GENERATION_SCHEMA
from jobs.record.part_files import parse_part, visible_files
from jobs.record.run_dir import RunDirectory
from runtime.errors import DamagedRunError


def read_generations(directory: RunDirectory) -> pa.Table:
    """All committed rows, by block, each block in plan order. Raises DamagedRunError on a part that is not whole."""
    tables = [GENERATION_SCHEMA.empty_table()]
    for path in visible_files(directory.generations):
        try:
            tables.append(parse_part(path.read_bytes()).replace_schema_metadata())
        except PARQUET_PROBLEMS as error:
            raise DamagedRunError(f"{path} is damaged: {error}. Start the run again to remake the block") from error
    return pa.concat_tables(tables[1:] or tables)
