"""plan.parquet: the block, micro-batch and position of each request. Written once before generation, never changed."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import pyarrow as pa

from runtime.config.profiles import BackendTable
from runtime.errors import DamagedRunError, RunMismatchError
from runtime.measure.machine_cache import Host

from ..files.publishing import (
    PARQUET_PROBLEMS,
    UnexpectedFileError,
    canonical_json,
    parse_parquet,
    publish,
    read_regular_file,
    write_parquet,
)
from ..files.row_digest import is_signed, require_intact, sign

PlanStatus: TypeAlias = Literal["planned", "rejected"]
CHUNK_TOKENS = b"weightstream.prefill_chunk_tokens"  # footer key
BACKENDS = b"weightstream.linear_backends"  # footer key; the value has the host, too
RowSlot: TypeAlias = tuple[int, int, int]  # block, micro-batch, position
HostBackends: TypeAlias = tuple[Host, BackendTable]  # the chosen linear backends, and the host they were measured on

PLAN_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("row_index", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("block", pa.int32(), nullable=False),
        pa.field("micro_batch", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("num_prompt_tokens", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True)
class PlannedRequest:
    """A planned output row. Rejected rows have a slot (block, micro-batch, position), too. Rows with the same
    computation have the same slot."""

    row_id: str
    row_index: int
    sample_index: int
    block: int
    micro_batch: int
    position: int
    num_prompt_tokens: int
    status: PlanStatus = "planned"

    @property
    def key(self) -> tuple[str, int]:
        return self.row_id, self.sample_index

    @property
    def slot(self) -> RowSlot:
        return self.block, self.micro_batch, self.position


def plan_digest(requests: Sequence[PlannedRequest]) -> str:
    """SHA-256 of all fields of all requests, in order, in hexadecimal."""
    digest = hashlib.sha256()
    for request in requests:
        digest.update(canonical_json(vars(request)).encode() + b"\n")
    return digest.hexdigest()


def publish_plan(
    path: Path,
    requests: Sequence[PlannedRequest],
    *,
    chunk_tokens: int | None = None,
    backends: HostBackends | None = None,
) -> None:
    """Writes the plan to `path`. If the file exists, checks that it has the same plan. `chunk_tokens` (size of a
    prefill chunk) and `backends` are stored for resumed runs. Raises RunMismatchError if the plan in the file differs,
    DamagedRunError if the file is unreadable or was edited, and OutputError."""

    def write(file: BinaryIO) -> None:
        columns = {name: [getattr(request, name) for request in requests] for name in PLAN_SCHEMA.names}
        metadata = {} if chunk_tokens is None else {CHUNK_TOKENS: str(chunk_tokens).encode()}
        if backends is not None:
            host, table = backends
            metadata[BACKENDS] = json.dumps({"host": asdict(host), "table": table.to_plain()}).encode()
        write_parquet(sign(pa.table(columns, schema=PLAN_SCHEMA), metadata), file)

    if path.exists() or not publish(path, write, exclusive=True):
        _require_same_plan(path, read_plan(path), requests)


def read_plan(path: Path) -> list[PlannedRequest]:
    """Reads the plan. Raises the errors of `read_plan_table`."""
    return [PlannedRequest(**row) for row in read_plan_table(path).to_pylist()]


def read_plan_table(path: Path) -> pa.Table:
    """Reads the plan as a table of PLAN_SCHEMA. Raises DamagedRunError if it is not a plan or was changed, OSError if
    it cannot be read."""
    try:
        data, _ = read_regular_file(path)
    except UnexpectedFileError as error:
        raise DamagedRunError(f"{error}, not the plan of a run: remove it") from error
    try:
        table = parse_parquet(data)
        require_intact(table)
        if not is_signed(table):
            raise ValueError("it has no digest of its values, as if another program had saved it")
        return table.cast(PLAN_SCHEMA.with_metadata(table.schema.metadata))
    except PARQUET_PROBLEMS as error:
        raise DamagedRunError(
            f"{path} ({len(data)} bytes) was changed after it was written, or damaged: {error}. Restore it, or "
            f"remove it to have it computed again"
        ) from error


def read_chunk_tokens(path: Path) -> int | None:
    """The size of a prefill chunk stored with the plan, or None. Raises the errors of `read_plan_table`."""
    stored = _footer(path).get(CHUNK_TOKENS)
    return int(stored) if stored is not None else None


def read_backends(path: Path, host: Host) -> BackendTable | None:
    """The linear backends (implementations of matrix products) stored with the plan. None if they were chosen on
    another host. Raises the errors of `read_plan_table`."""
    stored = _footer(path).get(BACKENDS)
    values = json.loads(stored) if stored is not None else {}
    return BackendTable.from_plain(values["table"]) if values.get("host") == asdict(host) else None


def _footer(path: Path) -> Mapping[bytes, bytes]:
    return (read_plan_table(path).schema.metadata or {}) if path.exists() else {}


def _require_same_plan(path: Path, stored: Sequence[PlannedRequest], requests: Sequence[PlannedRequest]) -> None:
    if plan_digest(stored) == plan_digest(requests):
        return
    if len(stored) != len(requests):
        difference = f"{len(stored)} requests -> {len(requests)}"
    else:
        index, was, now = next((i, a, b) for i, (a, b) in enumerate(zip(stored, requests, strict=True)) if a != b)
        changed = [key for key, value in vars(was).items() if value != vars(now)[key]]
        difference = f"request {index}: " + ", ".join(
            f"{key} {vars(was)[key]!r} -> {vars(now)[key]!r}" for key in changed
        )
    raise RunMismatchError(
        f"{path} is the plan of another run ({difference}). "
        f"Nothing was written; restore the settings, or choose another directory with run="
    )
