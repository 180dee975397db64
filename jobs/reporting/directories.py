"""Directories with several runs: evaluations, and the batches of a server. `run=` names them as it names runs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from glob import glob
from pathlib import Path

from runtime.config.texts import is_url
from runtime.errors import ConfigError, DamagedRunError

from ..files.publishing import JsonValue, read_json
from ..record.run_dir import EVALUATION_NAME, RunDirectory
from ..record.run_reader import RunReader, find_runs, is_locked

RESULTS_NAME, BATCHES_NAME = "results.json", "batches"
BATCH_FILE = re.compile(r"batch_[0-9a-f]{24}\.json")
JOBS = ("generate", "encode")  # folders of a server's runs
STDERR = "_stderr"


@dataclass(frozen=True, kw_only=True)
class TaskMetric:
    """A result of a task or a group. `error`: its standard error, None if there is none."""

    task: str
    name: str
    value: float
    error: float | None


@dataclass(frozen=True, kw_only=True)
class EvaluationDirectory:
    """An evaluation, finished or not: a run for each kind of request, and the harness' results at the end."""

    path: Path

    @cached_property
    def runs(self) -> Sequence[RunReader]:
        """The runs so far, in order of their names."""
        names = [str(path.parent) for path in sorted(self.path.glob("*/run.json"))]
        return find_runs(names, "run") if names else []

    @cached_property
    def record(self) -> Mapping[str, JsonValue]:
        """Model and tasks; empty if the file is missing or damaged."""
        return _read_or_empty(self.path / EVALUATION_NAME)

    @property
    def model(self) -> str:
        return str(self.record.get("model", "unknown"))

    @property
    def tasks(self) -> list[str]:
        tasks = self.record.get("tasks")
        return [str(task) for task in tasks] if isinstance(tasks, list) else []

    @property
    def state(self) -> str:
        """`running`, `done` or `interrupted`."""
        if is_locked(RunDirectory(path=self.path).lock) or any(is_locked(run.directory.lock) for run in self.runs):
            return "running"
        return "done" if self._is_finished else "interrupted"

    @property
    def metrics(self) -> list[TaskMetric]:
        """The results of tasks and groups; empty before the end."""
        results = _read_or_empty(self.path / RESULTS_NAME) if self._is_finished else {}
        tables = [results.get(name) for name in ("results", "groups")]
        return [
            metric
            for task, values in {k: v for table in tables if isinstance(table, dict) for k, v in table.items()}.items()
            if isinstance(values, dict)
            for metric in _metrics(task, values)
        ]

    @property
    def _is_finished(self) -> bool:
        """True if there are results, and not those of an earlier evaluation of other tasks in this directory."""
        with suppress(OSError):
            results = (self.path / RESULTS_NAME).stat().st_mtime_ns
            return not self.record or results >= (self.path / EVALUATION_NAME).stat().st_mtime_ns
        return False


def _metrics(task: str, values: Mapping[str, JsonValue]) -> Iterator[TaskMetric]:
    """Yields the metrics of one task: keys are `name,filter`, with the standard error under `name_stderr,filter`."""
    for key, value in values.items():
        name, _, kind = key.partition(",")
        if isinstance(value, bool) or not isinstance(value, int | float) or not kind or name.endswith(STDERR):
            continue
        error, label = values.get(f"{name}{STDERR},{kind}"), name if kind == "none" else f"{name} ({kind})"
        yield TaskMetric(task=task, name=label, value=value, error=error if isinstance(error, int | float) else None)


@dataclass(frozen=True, kw_only=True)
class ServedBatch:
    """A batch of a server. `run`: None before its job has started."""

    id: str
    record: Mapping[str, JsonValue]
    run: RunReader | None

    @property
    def status(self) -> str:
        return str(self.record.get("status", "unknown"))

    @property
    def total(self) -> int | None:
        counts = self.record.get("request_counts")
        total = counts.get("total") if isinstance(counts, dict) else None
        return total if isinstance(total, int) else None

    @property
    def problem(self) -> str | None:
        """The message of a failed batch."""
        errors = self.record.get("errors")
        listed = errors.get("data") if isinstance(errors, dict) else None
        first = listed[0] if isinstance(listed, list) and listed else None
        return str(first.get("message")) if isinstance(first, dict) else None


@dataclass(frozen=True, kw_only=True)
class ServerDirectory:
    """The directory `<output_root>/serve` of a server, running or not."""

    path: Path

    @cached_property
    def batches(self) -> Sequence[ServedBatch]:
        """All batches with a readable record, oldest first."""
        files = [path for path in (self.path / BATCHES_NAME).iterdir() if BATCH_FILE.fullmatch(path.name)]
        records = {path.stem: _read_or_empty(path) for path in files}
        batches = [ServedBatch(id=id, record=record, run=self._run(id)) for id, record in records.items() if record]
        return sorted(batches, key=lambda batch: (str(batch.record.get("created_at")), batch.id))

    @property
    def runs(self) -> Sequence[RunReader]:
        return [batch.run for batch in self.batches if batch.run is not None]

    def _run(self, id: str) -> RunReader | None:
        paths = (self.path.absolute().parent / job / id for job in JOBS)
        path = next((path for path in paths if RunDirectory(path=path).manifest.is_file()), None)
        if path is None:
            return None
        relative = self.path.parent / path.parent.name / id
        return find_runs([str(relative)], "run")[0]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What names refer to."""

    runs: Sequence[RunReader] = field(default_factory=list)
    evaluations: Sequence[EvaluationDirectory] = field(default_factory=list)
    servers: Sequence[ServerDirectory] = field(default_factory=list)

    @property
    def all_runs(self) -> list[RunReader]:
        """The runs, and those within evaluations and servers, each once."""
        inner = [run for directory in (*self.evaluations, *self.servers) for run in directory.runs]
        return list({run.path.resolve(): run for run in (*self.runs, *inner)}.values())


def find_directories(names: Sequence[str], key: str) -> Found:
    """Resolves `names`, values of the setting `key`: what `find_runs` takes, evaluations, servers, and directories with
    runs in them. Raises ConfigError, DamagedRunError, and the errors of `find_runs`."""
    runs, evaluations, servers = dict[Path, RunReader](), list[EvaluationDirectory](), list[ServerDirectory]()
    for name in names:
        path = Path(name).expanduser()
        matches = [] if is_url(name) else [path] if path.exists() else [Path(m) for m in sorted(glob(str(path)))]  # noqa: PTH207
        own_evaluations = [EvaluationDirectory(path=match) for match in matches if _is_evaluation(match)]
        own_servers = [server for match in matches if (server := _server(match)) is not None]
        evaluations += own_evaluations
        servers += own_servers
        inside = [str(child.parent) for match in matches for child in sorted(match.glob("*/run.json"))]
        try:
            found = find_runs([name], key)
        except ConfigError:
            if len(matches) == 1 and inside and not own_evaluations:
                found = find_runs(inside, key)
            elif own_evaluations or own_servers:
                found = []
            else:
                raise
        runs |= {run.path.resolve(): run for run in found}
    return Found(runs=list(runs.values()), evaluations=evaluations, servers=servers)


def _is_evaluation(path: Path) -> bool:
    is_named = (path / EVALUATION_NAME).is_file() or (path / RESULTS_NAME).is_file()
    return is_named and not RunDirectory(path=path).manifest.is_file()


def _server(path: Path) -> ServerDirectory | None:
    """The server whose directory, or folder of batches, is `path`."""
    folder = path if path.name == BATCHES_NAME else path / BATCHES_NAME
    is_server = folder.is_dir() and any(BATCH_FILE.fullmatch(child.name) for child in folder.iterdir())
    return ServerDirectory(path=folder.parent) if is_server else None


def _read_or_empty(path: Path) -> Mapping[str, JsonValue]:
    with suppress(OSError, DamagedRunError):
        return read_json(path)
    return {}
