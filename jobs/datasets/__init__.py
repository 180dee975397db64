"""The prompts of a run: from a file, the hub, the bundled sample or a benchmark's own rules to rows with ids.

config.py               what to read, validated
sources.py              `read_rows`: kind -> reader, then limit, repeat, duplicates
rows.py                 the row and what is done to a list of them: repeat, dedupe, shard, digest
records.py              one record of an input -> one row, or the reason why not
overrides.py            what one row asks otherwise than the run
files.py jsonl.py tables.py     files, strict JSON read tolerantly, Parquet / CSV / hub
helm.py helm_reasoning.py helm_summarization.py     HELM's scenarios as MoE-Lightning runs them
"""

from .config import BadRowPolicy, DatasetConfig, DatasetKind, DuplicatePolicy, ReasoningMode, ShardConfig
from .rows import Row, asked_bytes, input_digest, shard_rows, with_former_ids
from .sources import read_rows

__all__ = [
    "BadRowPolicy",
    "DatasetConfig",
    "DatasetKind",
    "DuplicatePolicy",
    "ReasoningMode",
    "Row",
    "ShardConfig",
    "asked_bytes",
    "input_digest",
    "read_rows",
    "shard_rows",
    "with_former_ids",
]
