"""Parts as files: which a reader sees, and their tables, read whole and found as they were written."""

import re
from pathlib import Path

import pyarrow as pa

from ..files.publishing import parse_parquet
from ..files.row_digest import require_intact

PART_NAME = re.compile(r"part-(\d{5,})\.parquet")


def parse_part(data: bytes) -> pa.Table:
    """The whole table, with its footer. Raises one of PARQUET_PROBLEMS."""
    table = parse_parquet(data)
    require_intact(table)
    return table


def visible_files(folder: Path) -> list[Path]:
    """What a reader of the folder sees, in the order of blocks. Raises OSError."""
    return sorted(
        (path for path in folder.iterdir() if not path.name.startswith(".")),
        key=lambda path: (len(path.name), path.name),
    )
