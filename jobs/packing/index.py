"""The index of a packed store, read off its shards. It stands alone as what a reader of safetensors wants of us."""

import json
from collections.abc import Sequence
from pathlib import Path

from runtime.store.header import read_header


def index_of(directory: Path, shards: Sequence[str]) -> bytes:
    """The text of model.safetensors.index.json."""
    headers = {name: read_header(directory / name) for name in shards}
    weight_map = {tensor: name for name, header in headers.items() for tensor in header}
    total = sum(tensor.num_bytes for header in headers.values() for tensor in header.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n"
