"""Part files: list them, and read their tables with verification."""

import re
from pathlib import Path

import pyarrow as pa

from ..files.publishing import parse_parquet
from ..files.row_digest import require_intact

PART_NAME = re.compile(r"part-(\d{5,})\.parquet")


def parse_part(data: bytes) -> pa.Table:
    """Reads and verifies a table with its footer. Raises one of PARQUET_PROBLEMS."""
    table = parse_parquet(data)
    require_intact(table)
    return table


def visible_files(folder: Path) -> list[Path]:
    """Files in the folder without hidden ones, in block order. Raises OSError."""
    return sorted(
        (path for path in folder.iterdir() if not path.name.startswith(".")),
        key=lambda path: (len(path.name), path.name),
    )
