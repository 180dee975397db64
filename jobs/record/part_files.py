"""Part files: listing them, and reading their tables with verification."""

import re
from pathlib import Path

import pyarrow as pa

from ..files.publishing import parse_parquet
from ..files.row_digest import require_intact

PART_NAME = re.compile(r"part-(\d{5,})\.parquet")


def parse_part(data: bytes) -> pa.Table:
    """The whole table with its footer, verified. Raises one of PARQUET_PROBLEMS."""
    table = parse_parquet(data)
    require_intact(table)
    return table


def visible_files(folder: Path) -> list[Path]:
    """Files in the folder that readers see (not hidden), in block order. Raises OSError."""
    return sorted(
        (path for path in folder.iterdir() if not path.name.startswith(".")),
        key=lambda path: (len(path.name), path.name),
    )
