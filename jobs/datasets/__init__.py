"""Reads the prompts of a run: files, Hugging Face datasets, bundled samples and benchmark inputs become rows with ids.
Code shared by all kinds of input lives here; each kind is a module in `kinds/` (docs/project/add-a-dataset.md).
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
