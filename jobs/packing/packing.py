"""Packs a model shard by shard (a shard is one safetensors file). After a kill, the same command continues with the
next shard."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from runtime.errors import BudgetError, CheckpointError, OutputError
from runtime.formats.kinds.rounded import Rounding, relative_rms_error
from runtime.formats.module_tensors import RELATIVE_ERROR
from runtime.out_of_memory import first_line, is_out_of_memory
from runtime.plan.shape.shapes import Stripes
from runtime.store.checkpoint import INDEX, SINGLE
from runtime.store.file_digests import read_packing_record, read_record
from runtime.store.header import read_header
from runtime.store.mirrors import warn_of_shared_disk
from runtime.store.read_errors import read_error, with_retries
from runtime.store.striped_store import find_stripes
from runtime.store.stripes import stripe_paths
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
MAX_NAMES = 6  # of unused files, in the printed result


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The result of packing. `num_kept`: shards that an earlier start has packed. `num_deleted`: deleted shards of the
    original. `unused_files`: files and folders of the original that no run reads. `stripe_bytes`: if the store is
    divided, bytes of the shards in each directory."""

    out: Path
    tensors: Sequence[PackedTensor]
    num_shards: int
    num_kept: int
    num_deleted: int
    unused_files: Sequence[str]
    stripe_bytes: Mapping[Path, int]

    @property
    def lines(self) -> list[str]:
        """The result as printed, line by line."""
        raw = [packed for packed in self.tensors if packed.raw_reason is not None]
        before, after = (sum(getattr(p, key) for p in self.tensors) for key in ("num_bytes", "packed_bytes"))
        reasons = dict[str, list[PackedTensor]]()
        for packed in raw:
            reasons.setdefault(str(packed.raw_reason), []).append(packed)
        kept = f", {self.num_kept} packed before" if self.num_kept else ""
        deleted = f", {self.num_deleted} of the original deleted" if self.num_deleted else ""
        rounded = [packed for packed in self.tensors if packed.squares is not None]
        num_lossless = len(self.tensors) - len(raw) - len(rounded)
        lines = [
            f"{self.out}: {format_count(self.num_shards, 'shard')}{kept}{deleted}",
            f"bytes      {before:,} before, {after:,} after: {after / max(1, before):.3f}",
            f"tensors    {f'{len(rounded):,} rounded, ' * bool(rounded)}{num_lossless:,} packed without loss, "
            f"{len(raw):,} unchanged",
        ]
        if self.stripe_bytes:
            parts = ", ".join(f"{num_bytes:,} bytes in {path}" for path, num_bytes in self.stripe_bytes.items())
            lines.append(f"stripes    {parts}")
        if rounded:
            worst = max(rounded, key=lambda packed: compute_relative_error([packed]) or 0)
            lines.append(
                f"error      {compute_relative_error(rounded) or 0:.3%} relative RMS error of the weights; "
                f"{compute_relative_error([worst]) or 0:.3%} at most, in {worst.name}"
            )
        for reason, same in sorted(reasons.items()):
            lines.append(f"  {len(same):,} ({sum(p.num_bytes for p in same):,} bytes): {reason}, e.g. {same[0].name}")
        if self.unused_files:
            names, more = self.unused_files[:MAX_NAMES], len(self.unused_files) - MAX_NAMES
            lines.append(f"not copied {', '.join(names)}{f' and {more} more' * (more > 0)}: no run reads them")
        return lines


def pack(config: PackConfig, progress: Callable[[int, int], None]) -> Packing:
    """Packs the model of `config`. Calls `progress` with the bytes that are done and in total. Raises ConfigError,
    CheckpointError and OutputError; shards that are already packed stay valid."""
    directories = config.directories
    source = open_source(Path(config.model.path or "").expanduser(), directories, replace=config.replace)
    is_lossless = config.format is Format.lossless
    rounding = None if is_lossless else Rounding(config.format.value, config.group_size)
    if rounding is None:
        paths = [source.directory / name for name in source.shards if (source.directory / name).exists()]
        dtypes = {tensor.dtype for path in paths for tensor in read_header(path).values() if len(tensor.shape) > 1}
        if paths and "BF16" not in dtypes:
            raise CheckpointError(
                f"model.path={source.directory}: format=lossless needs bfloat16 matrices, these are "
                f"{', '.join(sorted(dtypes))}"
            )
    elif config.replace:
        text = "replace=true deletes the weights of %s; format=%s keeps only rounded ones, which cannot be packed again"
        log.warning(text, source.directory, config.format.value)
    with ExitStack() as locks:
        for out in directories:
            make_directory(out)
            try:
                locks.callback(RunLock(out / LOCK).release)  # only one process may write a store
            except OSError as error:
                raise OutputError(f"cannot write {out / LOCK}: {error.strerror or error}; set another out") from error
            sweep_temps(out, is_only_writer=True)
        if len(directories) > 1:
            warn_of_shared_disk("out", directories)
        return _Packer(source, directories, config, rounding, progress).run()


class _Packer:
    """Packs the shards of `source` into `directories`: the first has all other files too."""

    def __init__(
        self,
        source: PackSource,
        directories: Sequence[Path],
        config: PackConfig,
        rounding: Rounding | None,
        progress: Callable[[int, int], None],
    ):
        self._source, self._directories, self._config, self._progress = source, directories, config, progress
        self._out, self._is_striped = directories[0], len(directories) > 1
        self._rounding, self._format_stamp = rounding, "" if rounding is None else f", {rounding}"
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
        stripes = {name: self._find_stripes(name) for name in self._source.shards}
        if self._is_striped or self._source.shards != [SINGLE]:
            _publish(self._out / INDEX, format_index(self._directories, stripes))
        extra: dict[str, object] = {}
        if self._rounding is not None:
            extra = {"format": str(self._rounding), RELATIVE_ERROR: compute_relative_error(tensors)}
        # Last, because config.json makes the directory a model.
        _publish(self._out / CONFIG, packed_config(self._source, extra))
        return Packing(
            out=self._out,
            tensors=tensors,
            num_shards=len(self._source.shards),
            num_kept=self._num_kept,
            num_deleted=self._num_deleted,
            unused_files=self._source.unused_files,
            stripe_bytes={
                directory: sum(Path(each.files[number]).stat().st_size for each in stripes.values() if each)
                for number, directory in enumerate(self._directories if self._is_striped else ())
            },
        )

    def _pack_shard(self, name: str) -> list[PackedTensor]:
        original, target = self._source.directory / name, self._out / name
        tensors = self._source.tensors(name) if original.exists() else {}
        is_verified, original_bytes = False, {tensor.name: tensor.num_bytes for tensor in tensors.values()}
        if self._is_packed(original, name):
            stripes = self._find_stripes(name)
            self._require_same(original, target, tensors, stripes)
            self._num_kept += 1
            self._advance(original.stat().st_size if original.exists() else 0)
            packed = read_packed_sizes(target, original_bytes, stripes)
        else:
            done, is_verified = self._done, self._config.verify
            packed = pack_shard(
                original,
                target,
                self._stamp(original),
                directories=self._directories,
                tensors=tensors,
                rounding=self._rounding,
                verify=is_verified,
                progress=self._advance,
            )
            self._advance(done + original.stat().st_size - self._done)  # other bytes, such as the header
        if self._config.replace and original.exists():
            if not is_verified:
                compare(tensors, target, str(target), self._rounding, self._find_stripes(name))
            original.unlink()  # only here: the packed form is on disk and was compared with it
            sync_directory(original.parent)
            self._num_deleted += 1
        return packed

    def _find_stripes(self, name: str) -> Stripes | None:
        """The stripes of a packed shard; None in a single directory. Raises CheckpointError."""
        return find_stripes(self._directories, name) if self._is_striped else None

    def _is_packed(self, original: Path, name: str) -> bool:
        """True if an earlier start has packed the shard. Raises CheckpointError if a directory has it for other
        directories, or a stripe from another file."""
        paths = stripe_paths(self._directories, name)
        stem = name.removesuffix(".safetensors")
        for directory, path in zip(self._directories, paths, strict=True):
            for other in [directory / name, *directory.glob(f"{escape(stem)}.stripe-*-of-*.safetensors")]:
                if other != path and other.exists():
                    raise CheckpointError(
                        f"{other}: packed into other directories, or in another order: remove it, or set out to "
                        f"{'other directories' if self._is_striped else 'another directory'}"
                    )
        existing = [path for path in paths if path.exists()]
        for path in existing if self._is_striped and original.exists() else ():
            if read_record(path)[0].get("source") != self._stamp(original):
                raise self._other_source_error(path, original)
        # A kill between two renames leaves some of the stripes: they are written again.
        return len(existing) == len(paths) or (bool(existing) and not original.exists())

    def _other_source_error(self, target: Path, original: Path) -> CheckpointError:
        return CheckpointError(
            f"{target}: packed from another file than {original}, from an older version of it, or in another "
            "format: remove it, or set out to another directory"
        )

    def _require_same(self, original: Path, target: Path, tensors: Collection[str], stripes: Stripes | None) -> None:
        """Raises CheckpointError if `target` was packed from another file or in another format. `tensors`: the names
        that the index has now."""
        record, _ = read_packing_record(target, stripes)
        packed = record.get("tensors")
        is_same = record.get("source") == self._stamp(original) if original.exists() else True
        if not is_same or (original.exists() and isinstance(packed, Mapping) and packed.keys() != set(tensors)):
            raise self._other_source_error(target, original)
        if not str(record.get("source")).endswith(self._format_stamp):
            raise CheckpointError(f"{target}: packed in another format: set out to another directory")

    def _stamp(self, original: Path) -> str:
        """A text that identifies the original file and the format; it is stored in the packed shard."""
        return fingerprint_file(original) + self._format_stamp

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._progress(self._done, self._total)


def _publish(path: Path, data: bytes) -> None:
    with atomic_write(path, len(data)) as file:
        file.write(data)


def _copy(source: Path, target: Path) -> None:
    """Copies a file in pieces. The target appears when it is complete."""
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
    """Converts an out-of-memory error to BudgetError with the name of the file."""
    try:
        yield
    except Exception as error:  # torch, numpy and the system raise different ones
        if not any(cause is not None and is_out_of_memory(cause) for cause in (error, error.__cause__)):
            raise
        size = f" ({format_bytes(path.stat().st_size)})" if path.exists() else ""
        raise BudgetError(
            f"{path}{size}: out of memory ({first_line(error)}): raise the limit of the process (ulimit -v), container "
            "or job, and start the same command again to resume after the last packed shard"
        ) from error


def compute_relative_error(tensors: Sequence[PackedTensor]) -> float | None:
    """The relative RMS error of the rounded tensors; None if there are none."""
    return relative_rms_error(packed.squares for packed in tensors if packed.squares is not None)
