"""Part files, which have the rows of a block: lists, reads and verifies them."""

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
    """The files in `folder` that are not hidden, sorted by block. Raises OSError."""
    return sorted(
        (path for path in folder.iterdir() if not path.name.startswith(".")),
        key=lambda path: (len(path.name), path.name),  # block numbers may have more than five digits
    )
