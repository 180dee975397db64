"""Parts: the files with the rows of one block.

A block has two parts. The generations part has its output rows, and marks the block as done. It is written once. Its
bytes depend only on the plan and the tokens: it has no time, host or process. The throughput part has statistics.
"""

import errno
import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from runtime.errors import DamagedRunError, OutputError

from ..files.publishing import (
    PARQUET_PROBLEMS,
    JsonValue,
    canonical_json,
    json_digest,
    move_to_quarantine,
    output_error,
    publish,
    read_regular_file,
    sweep_temps,
    write_parquet,
)
from ..files.row_digest import is_signed, sign
from .manifest import RunManifest
from .output_rows import GENERATION_SCHEMA, GenerationRow
from .part_files import PART_NAME, parse_part, visible_files
from .passes import LATER_COLUMNS, THROUGHPUT_SCHEMA, PassRow, Status
from .plan_file import PlannedRequest
from .run_dir import RunDirectory
from .stored_run import RunCopy
from .success import log_regenerated_parts, recorded_parts, write_success

LOG = logging.getLogger(__name__)
NUM_STOPS = b"weightstream.num_stops"  # in the footer, if the block was interrupted


@dataclass(frozen=True, kw_only=True)
class PartInfo:
    """A generations part that is written and verified. `rows`: number of rows by status."""

    block: int
    rows: Mapping[Status, int]
    sha256: str

    @property
    def num_rows(self) -> int:
        return sum(self.rows.values())


@dataclass(frozen=True, kw_only=True)
class PartStore:
    """Writes and verifies the parts of a run. The caller holds the run's lock.

    - `columns`: schema of the columns that are copied from the input
    - `fixed_schema`: schema of the other columns
    - `is_shared`: other workers may write parts of this run at the same time
    - `copy`: the run's copy in an object store; a block is done when the copy has its part, too
    - `is_window`: `plan` is that of one window, and there may be parts of other windows
    """

    directory: RunDirectory
    manifest: RunManifest
    plan: Sequence[PlannedRequest]
    columns: pa.Schema
    fixed_schema: pa.Schema = GENERATION_SCHEMA
    is_shared: bool = False
    copy: RunCopy = field(default_factory=RunCopy)
    is_window: bool = False

    @cached_property
    def blocks(self) -> Mapping[int, Sequence[PlannedRequest]]:
        """The planned requests of each block, in the order of its rows."""
        blocks: dict[int, list[PlannedRequest]] = {}
        for request in self.plan:
            blocks.setdefault(request.block, []).append(request)
        return blocks

    def commit(
        self,
        block: int,
        generations: Sequence[GenerationRow],
        throughput: Sequence[PassRow],
        *,
        num_stops: int = 0,
    ) -> bool:
        """Writes the parts of a block. Returns False, and writes nothing, if the block has a generations part already.

        `generations`: a row for each planned request, in any order. `num_stops`: how often the block was interrupted.
        It is stored in the footer, because log-probabilities may then differ from other runs. Raises OutputError, and
        the block is not done, or the errors of `RunCopy`, and the block is done locally.
        """
        if self.directory.generations_part(block).exists():
            LOG.info("block %d was already committed: discarding the second result", block)
            return False
        planned, rows = self.blocks[block], {row.key: row for row in generations}
        assert len(rows) == len(generations) == len(planned), f"block {block}: rows and planned requests differ"
        values = [rows[request.key].values(request, self.columns) for request in planned]
        table = pa.Table.from_pylist(values, schema=self._schema)
        operational = canonical_json({**self.manifest.operational, "versions": self.manifest.versions})
        throughput_rows = [{"block": block, **vars(row), "operational": operational} for row in throughput]
        passes = pa.Table.from_pylist(throughput_rows, schema=THROUGHPUT_SCHEMA)
        if num_stops:
            table = table.replace_schema_metadata({NUM_STOPS: str(num_stops).encode()})
        paths = self.directory.throughput_part(block), self.directory.generations_part(block)
        # The throughput part is first: the generations part marks the block as done.
        self._publish(paths[0], passes, block, exclusive=False)
        if not self._publish(paths[1], table, block, exclusive=True):
            return False
        self.copy.upload_part(*paths)
        return True

    def committed_parts(self) -> dict[int, PartInfo]:
        """Reads and verifies all parts, and returns them by block. Parts that are damaged, or differ from
        `_SUCCESS.json`, are moved to `quarantine/`. Removes temporary files of killed processes. Uploads parts that the
        copy lacks. Raises OutputError if a file cannot be read or moved, and the errors of `RunCopy`."""
        try:
            run = self.directory
            for folder in (run.path, run.generations, run.throughput, run.leases):
                sweep_temps(folder, is_only_writer=not self.is_shared)
            recorded = recorded_parts(self.directory) or {}
            generation_checks = {
                path: self._check_part(path, recorded) for path in self._window_files(self.directory.generations)
            }
            throughput_checks = {
                path: self._check_file(path, THROUGHPUT_SCHEMA)
                for path in self._window_files(self.directory.throughput)
            }
            for path, result in (*generation_checks.items(), *throughput_checks.items()):
                if isinstance(result, Exception):
                    move_to_quarantine(path, self.directory.quarantine, str(result))
            parts = {part.block: part for part in generation_checks.values() if isinstance(part, PartInfo)}
            if len(parts) < len(self.blocks) and self.directory.success.exists():
                move_to_quarantine(self.directory.success, self.directory.quarantine, "it lists missing parts")
        except OSError as error:
            raise output_error(self.directory.path, error) from error
        self.copy.upload_missing(
            *map(self.directory.throughput_part, parts), *map(self.directory.generations_part, parts)
        )
        return dict(sorted(parts.items()))

    def require_same_plan(self) -> None:
        """Raises DamagedRunError if `plan`, which was computed again, does not fit the existing parts. Moves no files:
        with other memory limits, the plan may fit."""
        mismatched: list[str] = []
        for path in self._window_files(self.directory.generations):
            try:
                footer = parse_part(read_regular_file(path)[0]).schema.metadata or {}
            except PARQUET_PROBLEMS:  # `committed_parts` handles damaged parts
                continue
            block = self._block_by_name.get(path.name)
            if footer.get(b"weightstream.config") != self.manifest.digest.encode():  # a part of another run
                continue
            if block is None or any(footer.get(key) != value for key, value in self._footer(block).items()):
                mismatched.append(path.name)
        if mismatched:
            raise DamagedRunError(
                f"{self.directory.plan} is missing, and the recomputed plan does not fit {len(mismatched)} existing "
                f"parts ({mismatched[0]}): restore the file, set offload.host_memory_gib and offload.device_memory_gib "
                f"as at the run's start, or choose another directory with run="
            )

    def read_passes(self, blocks: Iterable[int] | None = None) -> list[PassRow]:
        """The passes of those `blocks` that are done; None: all blocks. Skips damaged throughput parts with a
        warning."""
        rows: list[PassRow] = []
        for block in sorted(self.blocks if blocks is None else blocks):
            path = self.directory.throughput_part(block)
            if not self.directory.generations_part(block).exists():
                continue
            try:
                table = self._parse_table(read_regular_file(path)[0], block, THROUGHPUT_SCHEMA)
            except PARQUET_PROBLEMS as error:
                LOG.warning("the summary does not include block %d: %s: %s", block, path, error)
                continue
            rows += [PassRow(**row) for row in table.drop_columns(["block", "operational"]).to_pylist()]
        return rows

    def _window_files(self, folder: Path) -> list[Path]:
        """The files in `folder`, without parts of other windows. Raises OSError."""
        paths = visible_files(folder)
        if not self.is_window:
            return paths
        return [path for path in paths if path.name in self._block_by_name or not PART_NAME.fullmatch(path.name)]

    def publish_success(
        self, numbers: Mapping[str, JsonValue] | None = None, earlier_parts: Mapping[int, PartInfo] | None = None
    ) -> None:
        """Writes `_SUCCESS.json`, which marks the run as finished. `numbers`: as in `write_success`. `earlier_parts`:
        the parts of earlier windows. Raises OutputError if the part of a planned block is missing."""
        window_parts = self.committed_parts()
        missing = sorted(set(self.blocks) - set(window_parts))
        if missing:
            raise OutputError(
                f"{self.directory.generations}: {len(missing)} of {len(self.blocks)} blocks are missing (first: "
                f"{missing[0]}). Run the same command again to generate them"
            )
        parts = {self._part_name(block): part for block, part in {**(earlier_parts or {}), **window_parts}.items()}
        try:
            for path in visible_files(self.directory.generations) if self.is_window else []:
                if path.name not in parts:
                    move_to_quarantine(path, self.directory.quarantine, "no block of any plan has this file name")
        except OSError as error:
            raise output_error(self.directory.path, error) from error
        rows: Counter[Status] = Counter()
        for part in parts.values():
            rows.update(part.rows)
        log_regenerated_parts(self.directory, {name: part.sha256 for name, part in parts.items()})
        listed: list[dict[str, JsonValue]] = [
            {"file": name, "block": part.block, "num_rows": part.num_rows, "sha256": part.sha256}
            for name, part in parts.items()
        ]
        write_success(self.directory, self.manifest.digest, {**rows}, listed, numbers)

    def _part_name(self, block: int) -> str:
        return self.directory.generations_part(block).name

    @cached_property
    def _schema(self) -> pa.Schema:
        return pa.unify_schemas([self.fixed_schema, self.columns])

    @cached_property
    def _block_by_name(self) -> Mapping[str, int]:
        return {self._part_name(block): block for block in self.blocks}

    def _footer(self, block: int) -> dict[bytes, bytes]:
        """The metadata that identifies the part of a block."""
        keys = [list(request.key) for request in self.blocks[block]]
        owner = {"run": self.manifest.name, "config": self.manifest.digest}
        values = {**owner, "block": str(block), "rows": json_digest(keys)}
        return {f"weightstream.{key}".encode(): value.encode() for key, value in values.items()}

    def _publish(self, path: Path, table: pa.Table, block: int, *, exclusive: bool) -> bool:
        """Writes a part, and reads it again before it gets its name. Returns False if `exclusive` and it exists."""
        signed = sign(table, {**(table.schema.metadata or {}), **self._footer(block)})

        def check(temp: Path) -> None:
            try:
                self._parse_table(temp.read_bytes(), block, table.schema)
            except (pa.ArrowException, ValueError) as error:
                raise OSError(errno.EIO, f"verification after writing failed: {error}") from error

        return publish(
            path,
            lambda file: write_parquet(signed, file),
            exclusive=exclusive,
            check=check,
            expected_bytes=table.nbytes,
        )

    def _parse_table(self, data: bytes, block: int, schema: pa.Schema) -> pa.Table:
        """Parses a part of this run and block. Raises one of PARQUET_PROBLEMS."""
        table = parse_part(data)
        footer = table.schema.metadata or {}
        wrong = [key.decode() for key, value in self._footer(block).items() if footer.get(key) != value]
        if wrong:
            raise ValueError(f"it belongs to another run or block: {', '.join(wrong)} differ")
        if not is_signed(table):
            raise ValueError("it has no digest of its rows")
        may_lack = LATER_COLUMNS if schema.equals(THROUGHPUT_SCHEMA) else ()  # earlier versions did not have them
        missing = {name for name in may_lack if name not in table.schema.names}
        if not table.schema.equals(pa.schema([field for field in schema if field.name not in missing])):
            names = sorted({str(field) for field in table.schema} ^ {str(field) for field in schema})
            raise ValueError(f"its columns differ from the run's: {', '.join(names) or 'their order'}")
        if schema.equals(self._schema):
            keys = list(zip(table["id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))
            if keys != [request.key for request in self.blocks[block]]:
                raise ValueError("its rows differ from the plan")
        return table

    def _check_file(
        self, path: Path, schema: pa.Schema, recorded: str | None = None
    ) -> tuple[int, pa.Table, str] | Exception:
        """Returns block, table and SHA-256 of a part, or the reason why it cannot be used. `recorded`: its SHA-256 in
        `_SUCCESS.json`. Raises OSError if the disk fails."""
        if path.is_symlink():
            return ValueError("it is a symbolic link")
        data = path.read_bytes() if path.is_file() else b""
        sha256 = hashlib.sha256(data).hexdigest()
        if recorded not in (None, sha256):
            return ValueError(f"its SHA-256 differs from {self.directory.success.name}")
        block = self._block_by_name.get(path.name)
        if block is None:
            return ValueError("no block of the plan has this file name")  # for example a copy of a part
        try:
            return block, self._parse_table(data, block, schema), sha256
        except PARQUET_PROBLEMS as error:
            return error

    def _check_part(self, path: Path, recorded: Mapping[str, str]) -> PartInfo | Exception:
        checked = self._check_file(path, self._schema, recorded.get(path.name))
        if isinstance(checked, Exception):
            return checked
        block, table, sha256 = checked
        return PartInfo(block=block, rows=Counter(table["status"].to_pylist()), sha256=sha256)
