"""Digest over all values of a table. Parquet's checksums cover pages only: a flipped bit in a header or footer could
change rows unnoticed."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from .publishing import json_digest

DIGEST_KEY = b"weightstream.values"  # in the metadata of a signed table
Hashers = defaultdict[str, "hashlib._Hash"]


def sign(table: pa.Table, metadata: Mapping[bytes, bytes]) -> pa.Table:
    """Returns the table with this metadata and a digest of metadata and values."""
    signed = table.replace_schema_metadata(metadata)
    return signed.replace_schema_metadata({**metadata, DIGEST_KEY: values_digest(signed).encode()})


def is_signed(table: pa.Table) -> bool:
    """True if the table carries a digest."""
    return DIGEST_KEY in (table.schema.metadata or {})


def require_intact(table: pa.Table) -> None:
    """Raises ValueError if a signed table differs from what was written."""
    if is_signed(table) and table.schema.metadata[DIGEST_KEY] != values_digest(table).encode():
        raise ValueError("its rows were changed after they were written: their digest differs")


def values_digest(table: pa.Table) -> str:
    """SHA-256 in hex over metadata, column names and values, independent of chunking."""
    hashers: Hashers = defaultdict(hashlib.sha256)
    for number, column in enumerate(table.columns):
        for chunk in column.chunks:
            _update(hashers, str(number), chunk)
    metadata = {key.hex(): value.hex() for key, value in (table.schema.metadata or {}).items() if key != DIGEST_KEY}
    values = {name: hasher.hexdigest() for name, hasher in hashers.items()}
    return json_digest({"metadata": metadata, "names": table.schema.names, "values": values, "rows": table.num_rows})


def _update(hashers: Hashers, name: str, array: pa.Array) -> None:
    """Values under nulls are masked: their memory is undefined."""
    hashers[f"{name}.null"].update(_bytes(array.is_null()))
    if pa.types.is_list(array.type):
        hashers[f"{name}.length"].update(_bytes(pc.fill_null(pc.call_function("list_value_length", [array]), 0)))
        _update(hashers, f"{name}.item", array.flatten())
    elif pa.types.is_string(array.type) or pa.types.is_binary(array.type):
        full = pc.fill_null(array, b"" if pa.types.is_binary(array.type) else "")
        hashers[f"{name}.length"].update(_bytes(pc.call_function("binary_length", [full])))
        for value in full.cast(pa.binary()):
            hashers[name].update(value.as_py())
    else:
        hashers[name].update(_bytes(pc.fill_null(array, pa.scalar(0).cast(array.type))))


def _bytes(array: pa.Array) -> bytes:
    return array.to_numpy(zero_copy_only=False).tobytes()
