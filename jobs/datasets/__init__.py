"""The prompts of a run: files, the hub, the bundled sample or a benchmark's own rules become rows with ids. Here
belongs what all kinds of input share; a new kind is a module in `kinds/` (docs/project/add-a-dataset.md).
"""

from .config import DatasetConfig, DatasetKind, read_rows
from .fields import BadRowPolicy, DuplicatePolicy, ReasoningMode, ShardConfig, Turns
from .rows import Row, input_digest, row_digest_bytes, shard_rows

__all__ = [
    "BadRowPolicy",
    "DatasetConfig",
    "DatasetKind",
    "DuplicatePolicy",
    "ReasoningMode",
    "Row",
    "ShardConfig",
    "Turns",
    "input_digest",
    "read_rows",
    "row_digest_bytes",
    "shard_rows",
]
