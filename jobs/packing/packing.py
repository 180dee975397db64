"""Packs a model shard by shard. Published shards stay, so the same command resumes after a kill."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import BudgetError, CheckpointError, OutputError
from runtime.formats.kinds.rounded import Rounding, relative_rms_error
from runtime.formats.module_tensors import RELATIVE_ERROR
from runtime.out_of_memory import first_line, is_out_of_memory
from runtime.store.checkpoint import INDEX, SINGLE
from runtime.store.file_digests import read_packing_record
from runtime.store.header import read_header
from runtime.store.read_errors import read_error, with_retries
from runtime.store.writer import atomic_write, sync_directory
from runtime.units import format_bytes, format_count

from ..files.locks import RunLock
from ..files.publishing import make_directory, sweep_temps
from .config import Format, PackConfig
from .shard import PackedTensor, compare, pack_shard, read_packed_sizes
from .source import CONFIG, PackSource, fingerprint_file, format_index, open_source, packed_config

log = logging.getLogger(__name__)
LOCK = ".pack.lock"
COPY_BYTES = 4 << 20
MOST_NAMES = 6  # of files left out, in a line


@dataclass(frozen=True, kw_only=True)
class Packing:
    """`num_kept`: shards packed by earlier starts. `num_deleted`: deleted shards of the original. `unused_files`:
    files and folders of the original that no run reads."""

    out: Path
    tensors: Sequence[PackedTensor]
    num_shards: int
    num_kept: int
    num_deleted: int
    unused_files: Sequence[str]

    @property
    def lines(self) -> list[str]:
        """The closing table, line by line."""
        raw = [packed for packed in self.tensors if packed.raw_reason is not None]
        before, after = (sum(getattr(p, key) for p in self.tensors) for key in ("num_bytes", "packed_bytes"))
        reasons = dict[str, list[PackedTensor]]()
        for packed in raw:
            reasons.setdefault(str(packed.raw_reason), []).append(packed)
        kept = f", {self.num_kept} of them packed before" if self.num_kept else ""
        gone = f", {self.num_deleted} of the original deleted" if self.num_deleted else ""
        rounded = [packed for packed in self.tensors if packed.squares is not None]
        num_lossless = len(self.tensors) - len(raw) - len(rounded)
        lines = [
            f"{self.out}: {format_count(self.num_shards, 'shard')}{kept}{gone}",
            f"bytes      {before:,} before, {after:,} after: {after / max(1, before):.3f}",
            f"tensors    {f'{len(rounded):,} rounded, ' * bool(rounded)}{num_lossless:,} packed without loss, "
            f"{len(raw):,} as they were",
        ]
        if rounded:
            worst = max(rounded, key=lambda packed: compute_relative_error([packed]) or 0)
            lines.append(
                f"error      {compute_relative_error(rounded) or 0:.3%} of the weights' root mean square; "
                f"{compute_relative_error([worst]) or 0:.3%} at most, of {worst.name}"
            )
        for why, found in sorted(reasons.items()):
            lines.append(f"  {len(found):,} ({sum(p.num_bytes for p in found):,} bytes): {why}, e.g. {found[0].name}")
        if self.unused_files:
            names, more = self.unused_files[:MOST_NAMES], len(self.unused_files) - MOST_NAMES
            lines.append(f"left out   {', '.join(names)}{f' and {more} more' * (more > 0)}: no run reads them")
        return lines


def pack(config: PackConfig, progress: Callable[[int, int], None]) -> Packing:
    """Packs the model of `config`. Calls `progress` with bytes done and bytes of all. Raises ConfigError,
    CheckpointError, OutputError; shards published before stay valid."""
    out = Path(config.out or "").expanduser()
    source = open_source(Path(config.model.path or "").expanduser(), out, replace=config.replace)
    is_lossless = config.format is Format.lossless
    rounding = None if is_lossless else Rounding(config.format.value, config.group_size)
    if rounding is None:
        there = [source.directory / name for name in source.shards if (source.directory / name).exists()]
        dtypes = {tensor.dtype for path in there for tensor in read_header(path).values() if len(tensor.shape) > 1}
        if there and "BF16" not in dtypes:
            raise CheckpointError(
                f"model.path={source.directory}: none of its matrices are bfloat16 ({', '.join(sorted(dtypes))}): "
                "format=lossless packs bfloat16 alone"
            )
    elif config.replace:
        log.warning(
            "replace=true deletes the weights of %s, and format=%s keeps rounded ones: nothing can be packed otherwise "
            "from them later",
            source.directory,
            config.format.value,
        )
    make_directory(out)
    try:
        lock = RunLock(out / LOCK)  # one process at a time writes a store
    except OSError as error:
        raise OutputError(f"{out / LOCK} cannot be written: {error.strerror or error}; choose another out=") from error
    try:
        sweep_temps(out, is_only_writer=True)
        return _Packer(source, out, config, rounding, progress).run()
    finally:
        lock.release()


class _Packer:
    def __init__(
        self,
        source: PackSource,
        out: Path,
        config: PackConfig,
        rounding: Rounding | None,
        progress: Callable[[int, int], None],
    ):
        self._source, self._out, self._config, self._progress = source, out, config, progress
        self._rounding, self._stamped = rounding, "" if rounding is None else f", {rounding}"
        sizes = [path.stat().st_size for name in source.shards if (path := source.directory / name).exists()]
        self._total, self._done, self._num_kept, self._num_deleted = sum(sizes), 0, 0, 0

    def run(self) -> Packing:
        tensors = list[PackedTensor]()
        for name in self._source.shards:
            with _name_file_on_out_of_memory(self._source.directory / name):
                tensors += self._pack_shard(name)
        for path in self._source.files_to_copy:
            with _name_file_on_out_of_memory(path):
                _copy(path, self._out / path.relative_to(self._source.directory))
        if self._source.shards != [SINGLE]:
            _publish(self._out / INDEX, format_index(self._out, self._source.shards))
        about = (
            {}
            if self._rounding is None
            else {"format": str(self._rounding), RELATIVE_ERROR: compute_relative_error(tensors)}
        )
        _publish(self._out / CONFIG, packed_config(self._source, about))  # last: now it is a model
        return Packing(
            out=self._out,
            tensors=tensors,
            num_shards=len(self._source.shards),
            num_kept=self._num_kept,
            num_deleted=self._num_deleted,
            unused_files=self._source.unused_files,
        )

    def _pack_shard(self, name: str) -> list[PackedTensor]:
        original, target = self._source.directory / name, self._out / name
        tensors = self._source.tensors(name) if original.exists() else {}
        is_verified, before = False, {tensor.name: tensor.num_bytes for tensor in tensors.values()}
        if target.exists():
            self._require_same(original, target, tensors)
            self._num_kept += 1
            self._advance(original.stat().st_size if original.exists() else 0)
            found = read_packed_sizes(target, before)
        else:
            begun, is_verified = self._done, self._config.verify
            found = pack_shard(
                original,
                target,
                self._stamp(original),
                tensors=tensors,
                rounding=self._rounding,
                verify=is_verified,
                progress=self._advance,
            )
            self._advance(begun + original.stat().st_size - self._done)
        if self._config.replace and original.exists():
            if not is_verified:
                compare(tensors, target, str(target), self._rounding)
            original.unlink()  # its packed form is on the disk and was compared with it just now
            sync_directory(original.parent)
            self._num_deleted += 1
        return found

    def _require_same(self, original: Path, target: Path, tensors: Collection[str]) -> None:
        """Raises CheckpointError if `target` was packed from another file or in another format. `tensors`: those read
        from the original, which a changed index can alter."""
        record, _ = read_packing_record(target)
        found = record.get("tensors")
        is_same = record.get("source") == self._stamp(original) if original.exists() else True
        if not is_same or (original.exists() and isinstance(found, Mapping) and found.keys() != set(tensors)):
            raise CheckpointError(
                f"{target}: packed of another file than {original}, or that was changed since, or in another format: "
                "remove it, or choose another directory with out="
            )
        if not str(record.get("source")).endswith(self._stamped):
            raise CheckpointError(f"{target}: packed in another format: choose another directory with out=")

    def _stamp(self, original: Path) -> str:
        return fingerprint_file(original) + self._stamped

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._progress(self._done, self._total)


def _publish(path: Path, data: bytes) -> None:
    with atomic_write(path, len(data)) as file:
        file.write(data)


def _copy(source: Path, target: Path) -> None:
    """Copies a file in pieces and renames it into place once it is complete."""
    make_directory(target.parent)
    sweep_temps(target.parent, is_only_writer=True)
    buffer = memoryview(bytearray(COPY_BYTES))
    try:
        file, size = source.open("rb", buffering=0), source.stat().st_size
    except OSError as error:
        raise read_error(source, "opening it", error) from error
    with file, atomic_write(target, size) as out:
        while count := with_retries(lambda: file.readinto(buffer), str(source), "copying it", time.sleep):
            out.write(buffer[:count])


@contextmanager
def _name_file_on_out_of_memory(path: Path) -> Iterator[None]:
    """Names the file that was being packed when memory ran out. Raises BudgetError."""
    try:
        yield
    except Exception as error:  # torch, numpy and the system each have their own
        if not any(each is not None and is_out_of_memory(each) for each in (error, error.__cause__)):
            raise
        size = f" ({format_bytes(path.stat().st_size)})" if path.exists() else ""
        raise BudgetError(
            f"{path}{size}: this process was given no more memory ({first_line(error)}): "
            "raise what limits it (ulimit -v, a container's or a job's memory); the same command goes on behind the "
            "shards that are packed"
        ) from error


def compute_relative_error(tensors: Sequence[PackedTensor]) -> float | None:
    """The relative RMS error of the rounded tensors; None if there are none."""
    return relative_rms_error(packed.squares for packed in tensors if packed.squares is not None)
