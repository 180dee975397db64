"""The input of a run, held in memory or read in windows. Each window has a plan of its own."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from runtime.cache_root import cache_root
from runtime.config.settings import Parallelism
from runtime.errors import CheckpointError, DamagedRunError, DatasetError, require
from runtime.store.file_digests import digest_files

from ..config.settings import RunSettings, ScoreConfig
from ..datasets import Row, shard_rows
from ..datasets.fields import WINDOW_ROWS, ShardConfig
from ..datasets.templates import few_shot_config
from ..datasets.windows import RowWindows, Survey, has_more_than, make_survey, windowed_input
from ..files.publishing import JsonValue, json_digest, read_json, write_json
from ..record.input_digests import InputDigests, digest_input, digest_input_files, write_row_digests
from ..record.output_rows import column_schema, infer_column_schema
from ..record.run_dir import RunDirectory, run_directory_error

log = logging.getLogger(__name__)
WINDOW_KEY = "dataset.window_rows"  # in run.json only if the run reads its input in windows


@dataclass(frozen=True, kw_only=True)
class InputWindow:
    """A window of a run's input. `read` returns the window's rows that this shard owns; raises DatasetError."""

    number: int
    count: int
    read: Callable[[], Sequence[Row]]

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def plan_path(self, directory: RunDirectory) -> Path:
        return directory.plan if self.count == 1 else directory.window_plan(self.number)


class RunInput(Protocol):
    """Interface of a run's input. `identity`: added to the run's identity, besides settings and digests."""

    @property
    def windows(self) -> Sequence[InputWindow]: ...

    @property
    def identity(self) -> Mapping[str, JsonValue]: ...

    def columns(self, fixed_schema: pa.Schema) -> pa.Schema:
        """Schema of the passed-through columns, the same for all shards."""
        ...

    def all_rows(self) -> Iterable[Row]:
        """The rows of all shards, for checks before the run begins."""
        ...

    def preview_rows(self) -> Sequence[Row]:
        """Rows of this shard for checks before the run begins: all or some of them."""
        ...

    def digests(self, columns: pa.Schema) -> InputDigests: ...

    def save_digests(self, directory: RunDirectory, digests: InputDigests) -> Path:
        """Saves digests, or the survey of windows, for resumed runs; returns the file. Raises OutputError."""
        ...


class InMemoryRows:
    """Input held in memory."""

    def __init__(self, rows: Sequence[Row], shard: ShardConfig):
        self._all, self._rows = rows, shard_rows(rows, shard)
        self.identity: Mapping[str, JsonValue] = {}
        self.windows = [InputWindow(number=0, count=1, read=lambda: self._rows)]

    def columns(self, fixed_schema: pa.Schema) -> pa.Schema:
        return infer_column_schema([row.columns for row in self._all], fixed_schema)

    def all_rows(self) -> Sequence[Row]:
        return self._all

    def preview_rows(self) -> Sequence[Row]:
        return self._rows

    def digests(self, columns: pa.Schema) -> InputDigests:
        return digest_input(self._rows, columns)

    def save_digests(self, directory: RunDirectory, digests: InputDigests) -> Path:
        write_row_digests(directory.row_digests, digests)
        return directory.row_digests


@dataclass(frozen=True, kw_only=True)
class WindowedRows:
    """Rows read window by window. `files`: SHA-256 of each input file by name, in order. `settings`: the other values
    that select the rows. `stamps`: size and mtime of each file."""

    rows: RowWindows
    files: Mapping[str, str]
    settings: Mapping[str, JsonValue]
    stamps: Mapping[Path, tuple[int, int]]
    window_rows: int
    is_resumed: bool
    _read_ahead: list[Sequence[Row]] = field(default_factory=list)

    @property
    def windows(self) -> Sequence[InputWindow]:
        count = len(self.rows)
        return [InputWindow(number=i, count=count, read=lambda number=i: self._read(number)) for i in range(count)]

    @property
    def identity(self) -> Mapping[str, JsonValue]:
        return {WINDOW_KEY: self.window_rows}

    def columns(self, fixed_schema: pa.Schema) -> pa.Schema:
        return column_schema(self.rows.survey.kinds, fixed_schema)

    def all_rows(self) -> Iterator[Row]:
        return self.rows.all_rows()

    def preview_rows(self) -> Sequence[Row]:
        """The first window, kept until it is read again; empty for a resumed run."""
        if self.is_resumed:
            return ()
        self._read_ahead.append(self._read(0))
        return self._read_ahead[0]

    def digests(self, columns: pa.Schema) -> InputDigests:
        input_digests = digest_input_files(self.files, self.settings, columns)
        return replace(input_digests, facts={**input_digests.facts, "input rows": self.rows.survey.num_rows})

    def save_digests(self, directory: RunDirectory, digests: InputDigests) -> Path:
        if not directory.survey.exists():
            value: dict[str, JsonValue] = {"of": _survey_key(self.files, self.settings), **self.rows.survey.to_plain()}
            write_json(directory.survey, value | {"digest": json_digest(value)}, exclusive=True)
        return directory.survey

    def _read(self, number: int) -> Sequence[Row]:
        if number == 0 and self._read_ahead:
            return self._read_ahead.pop()
        changed = [path for path, stamp in self.stamps.items() if _file_stamp(path) != stamp]
        if changed:
            raise DatasetError(f"{changed[0]} was changed during the run; nothing read after the change was used")
        return self.rows.read(number)


def open_windowed_rows(
    config: RunSettings,
    directory: Path,
    should_stop: Callable[[], bool],
    remote_manifest: Mapping[str, JsonValue] | None = None,
) -> WindowedRows | None:
    """The input of a run in windows; None to hold all rows in memory. `remote_manifest`: run.json of the
    run's copy. Raises DatasetError, Interrupted."""
    dataset, windowed = config.dataset, windowed_input(config.dataset)
    window_rows = _resolve_window_rows(config, directory, remote_manifest) if windowed is not None else None
    if windowed is None or window_rows is None:
        return None
    rows_per_window = max(1, window_rows // config.sampling.n)
    if not has_more_than(dataset, rows_per_window * config.shard.count):
        return None
    examples = windowed.source.files(few_shot_config(dataset)) if dataset.few_shot_path is not None else []
    paths = [*windowed.source.files(dataset), *examples]
    stamps = {path: _file_stamp(path) for path in paths}  # before the digests: a change while digesting is noticed
    files = _digest_files(paths, config.offload.cache_dir, should_stop)
    run = RunDirectory(path=directory)
    settings: dict[str, JsonValue] = {
        **{f"dataset.{key}": getattr(dataset, key) for key in ("limit", "max_row_bytes", "id_field", "keep_columns")},
        **{f"dataset.{key}": getattr(dataset, key).value for key in ("dedupe", "on_bad_row")},
        "dataset.json_field": dataset.json_field,
    }
    survey = _load_survey(run.survey, _survey_key(files, settings))
    if survey is None:
        parent = next(folder for folder in directory.absolute().parents if folder.is_dir())
        try:
            survey = make_survey(dataset, windowed, parent, should_stop)
        except OSError as error:  # from the temporary file of ids; unreadable input is a DatasetError
            raise run_directory_error(run, error) from error
    return WindowedRows(
        rows=RowWindows(config=dataset, survey=survey, shard=config.shard, rows_per_window=rows_per_window),
        files=files,
        settings=settings,
        stamps=stamps,
        window_rows=window_rows,
        is_resumed=remote_manifest is not None or run.manifest.exists(),
    )


def _resolve_window_rows(
    config: RunSettings, directory: Path, remote_manifest: Mapping[str, JsonValue] | None
) -> int | None:
    """Output rows per window; None to hold all rows in memory. A resumed run uses its recorded value unless one is
    set. Raises ConfigError if the recorded run has windows and `devices` does not support them."""
    requested, run = config.dataset.window_rows, RunDirectory(path=directory)
    needs_all_rows = config.dataset.repeat > 1 or config.dataset.has_turns or config.devices.way is not Parallelism.one
    needs_all_rows |= isinstance(config, ScoreConfig) and config.score.rolling
    if requested is None and (remote_manifest is not None or run.manifest.exists()):
        recorded, mode = None, config.devices.way
        with suppress(OSError, DamagedRunError):  # reported later by `open_run`
            settings = (remote_manifest or read_json(run.manifest)).get("semantic")
            recorded = settings.get(WINDOW_KEY) if isinstance(settings, dict) else None
        require(
            recorded is None or mode is Parallelism.one,
            f"devices={mode.value} does not support windows, but the run was started with {WINDOW_KEY}={recorded}: "
            "resume it with devices=one, or choose another directory with run=",
        )
        return recorded if isinstance(recorded, int) else None
    return None if needs_all_rows else requested or WINDOW_ROWS


def _file_stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    return status.st_size, status.st_mtime_ns


def _digest_files(paths: Sequence[Path], cache_dir: str | None, should_stop: Callable[[], bool]) -> Mapping[str, str]:
    """SHA-256 of each file, by name, or by path if names repeat."""
    names = [path.name for path in paths]
    keys = names if len(set(names)) == len(names) else [str(path) for path in paths]
    try:
        digests = digest_files([*map(str, paths)], cache_root(cache_dir), should_stop, setting="dataset.path")
    except CheckpointError as error:
        raise DatasetError(str(error)) from error
    return {key: digests[str(path)] for key, path in zip(keys, paths, strict=True)}


def _survey_key(files: Mapping[str, str], settings: Mapping[str, JsonValue]) -> str:
    return json_digest([[*files.items()], {**settings}])


def _load_survey(path: Path, key: str) -> Survey | None:
    """The saved survey; None if it is missing, damaged or of another input."""
    try:
        values = read_json(path)
        digest = values.pop("digest", None)
        if digest == json_digest(values) and values.pop("of") == key:
            return Survey.from_plain(values)
    except FileNotFoundError:
        return None
    except (OSError, DamagedRunError, KeyError, TypeError, ValueError) as error:
        log.warning("%s cannot be used (%s): scanning the rows again", path, error)
        return None
    log.warning("%s belongs to another input or was edited: scanning the rows again", path)
    return None
