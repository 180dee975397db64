"""Reads the prompts of a run from files, Hugging Face datasets, bundled samples and benchmark inputs.

- kind: a type of input (`dataset.kind`), such as `csv`; each is defined in a module of `kinds/`
- record: one item of an input, such as a line of JSON, or the error why it cannot be read
- row: a prompt with an id, made from a record
- error row: a row with an error instead of a prompt; it has a row in the output, too
- window: the rows of a large input that are in memory at the same time

To add a kind, see docs/project/add-a-dataset.md.
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
