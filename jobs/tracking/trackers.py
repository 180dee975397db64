"""One adapter for each tracker: TensorBoard, Weights & Biases, MLflow. Their packages are extras.

They get settings, versions, curves and sums; never a prompt of the data set, or a completion.
"""

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, TypeAlias

from runtime.errors import DamagedRunError

from ..files.publishing import JsonValue, read_json, write_json
from ..record.run_dir import RunDirectory

Values: TypeAlias = Mapping[str, float]  # of a point, by name of the curve
PROJECT = "weightstream"  # of W&B, and experiment of MLflow, unless the tracker's own variable names another
MAX_PARAMETERS, MAX_METRICS, MAX_PARAMETER_CHARS = 100, 1000, 6000  # of a request to MLflow
NO_NAME = re.compile(r"[^\w.\-/ ]")  # characters that MLflow refuses in names
COLUMNS = ("run", "phase", "tokens/s", "predicted tokens/s", "seconds", "predicted seconds", "disk", "link", "compute")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as trackers see it. `directory`: of the run, the chat or the evaluation. `worker`: None unless several
    processes share the run; each is then tracked by itself. `id`: the same on each start. `started_at`: of the run, in
    Unix seconds."""

    directory: Path
    id: str
    started_at: float
    worker: str | None = None

    @staticmethod
    def open(directory: Path, *, worker: str | None, started_at: float) -> "TrackedRun":
        """The run in `directory`, with an id that its first start draws. Raises OutputError, DamagedRunError."""
        path = RunDirectory(path=directory).tracking
        if not path.exists():
            write_json(path, {"id": secrets.token_hex(6), "started_at": started_at}, exclusive=True)
        stored = read_json(path)
        first, suffix = stored.get("started_at"), f"-{worker}" if worker is not None else ""
        return TrackedRun(
            directory=directory,
            id=f"{stored.get('id')}{suffix}",
            started_at=min(first, started_at) if isinstance(first, float) else started_at,
            worker=worker,
        )

    @property
    def job(self) -> str:
        return self.directory.absolute().parent.name

    @property
    def group(self) -> str:
        return self.directory.absolute().name

    @property
    def name(self) -> str:
        return self.group if self.worker is None else f"{self.group}/{self.worker}"

    def step(self, at: float) -> int:
        """Whole seconds since the start of the run: grows also over restarts."""
        return max(0, int(at - self.started_at))

    def settings(self) -> dict[str, JsonValue]:
        """Settings and library versions, by dotted key; those of the first run in an evaluation or chat."""
        for run in self._runs():
            manifest = _read_values(run.manifest)
            groups = {"": ("operational", "semantic"), "versions.": ("versions",)}
            return {
                f"{prefix}{key}": value
                for prefix, names in groups.items()
                for name in names
                if isinstance(values := manifest.get(name), Mapping)
                for key, value in values.items()
            }
        return {}

    def results(self) -> dict[str, float]:
        """The numbers of summary.json and, of an evaluation, results.json."""
        found: dict[str, float] = {}
        for run in self._runs():
            found |= dict(_numbers(_read_values(run.summary), f"summary/{self._prefix(run)}"))
        results = _read_values(self.directory / "results.json").get("results")
        return found | dict(_numbers(results, "results/"))

    def phases(self) -> list[list[str | float | None]]:
        """A row of COLUMNS for prefill and decode of each summary."""
        return [
            [
                self._prefix(run).strip("/") or self.group,
                phase,
                _number_at(summary, "measured", rate),
                _number_at(summary, "predicted", rate),
                _number_at(summary, "measured_times", phase, "seconds"),
                _number_at(summary, "predicted_times", phase, "seconds"),
                *(_number_at(summary, "utilisation", phase, name) for name in ("disk", "link", "compute")),
            ]
            for run in self._runs()
            if (summary := _read_values(run.summary))
            for phase, rate in (("prefill", "prefill"), ("decode", "decode_useful"))
        ]

    def _runs(self) -> Iterator[RunDirectory]:
        """The run, or the runs of an evaluation or a chat."""
        for folder in (self.directory, *sorted(path.parent for path in self.directory.glob("*/run.json"))):
            if (run := RunDirectory(path=folder)).manifest.is_file():
                yield run

    def _prefix(self, run: RunDirectory) -> str:
        return "" if run.path == self.directory else f"{run.path.name}/"


def _read_values(path: Path) -> Mapping[str, JsonValue]:
    with suppress(OSError, DamagedRunError):
        return read_json(path)
    return {}


def _numbers(value: JsonValue, name: str) -> Iterator[tuple[str, float]]:
    """The finite numbers in nested objects, by the path of their keys."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}{'' if name.endswith('/') else '.'}{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield NO_NAME.sub("_", name), float(value)


def _number_at(value: JsonValue, *keys: str) -> float | None:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def cell(value: object) -> str:
        text = f"{value:,.4g}" if isinstance(value, float) else "" if value is None else str(value)
        return text.replace("|", r"\|").replace("\n", " ")

    lines = [head, ["---"] * len(head), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class RunTracker(Protocol):
    """A run that is open in a tracker. All methods raise exceptions of the tracker's package. `location`: where a user
    finds it, or empty."""

    location: str

    def log(self, values: Values, at: float) -> None:
        """Adds a point to the curves, at second `at` of the Unix clock."""
        ...

    def finish(self, status: str, exit_code: int | None) -> None:
        """Sends results and ends the run; `exit_code`: None after a kill."""
        ...


class TensorBoardRun:
    """Event files in `<run>/tensorboard`, by TensorBoard's own writer: neither TensorFlow nor torch is needed."""

    def __init__(self, run: TrackedRun):
        self._run, protocol = run, "tensorboard.compat.proto"
        self._event = import_module(f"{protocol}.event_pb2").Event
        self._protocol = import_module(f"{protocol}.summary_pb2")
        self._tensors = import_module(f"{protocol}.tensor_pb2")
        self._shapes = import_module(f"{protocol}.tensor_shape_pb2")
        self._string = import_module(f"{protocol}.types_pb2").DT_STRING
        self._plugin = import_module("tensorboard.plugins.text.plugin_data_pb2")
        folder = run.directory / "tensorboard"
        self.location = str(folder if run.worker is None else folder / run.worker)
        self._writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(self.location)
        rows = [[key, _as_text(value)] for key, value in sorted(run.settings().items())]
        self._add([self._text_value("settings", _markdown(("setting", "value"), rows))], time.time())

    def log(self, values: Values, at: float) -> None:
        self._add([self._protocol.Summary.Value(tag=name, simple_value=value) for name, value in values.items()], at)
        self._writer.flush()

    def finish(self, status: str, exit_code: int | None) -> None:
        now, results = time.time(), self._run.results()
        end = [["status", status], ["exit code", exit_code]]
        self._add([self._text_value("end", _markdown(("", ""), end))], now)
        if results:
            self.log(results, now)
            self._add([self._text_value("phases", _markdown(COLUMNS, self._run.phases()))], now)
        self._writer.close()

    def _text_value(self, tag: str, text: str) -> object:
        content = self._plugin.TextPluginData(version=0).SerializeToString()
        metadata = self._protocol.SummaryMetadata
        shape = self._shapes.TensorShapeProto
        return self._protocol.Summary.Value(
            tag=tag,
            metadata=metadata(plugin_data=metadata.PluginData(plugin_name="text", content=content)),
            tensor=self._tensors.TensorProto(
                dtype=self._string,
                string_val=[text.encode()],
                tensor_shape=shape(dim=[shape.Dim(size=1)]),
            ),
        )

    def _add(self, values: Sequence[object], at: float) -> None:
        summary = self._protocol.Summary(value=values)
        self._writer.add_event(self._event(wall_time=at, step=self._run.step(at), summary=summary))


class WandbRun:
    """A run of Weights & Biases. Its variables apply: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, WANDB_API_KEY,
    WANDB_DIR (else the run's directory)."""

    def __init__(self, run: TrackedRun):
        wandb = import_module("wandb")
        self._run, self._table = run, wandb.Table
        self._wandb = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.name,
            group=run.group if run.worker is not None else None,
            job_type=run.job,
            dir=os.environ.get("WANDB_DIR", str(run.directory)),
            config=run.settings(),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )
        self.location = self._wandb.url or f"{self._wandb.dir.removesuffix('/files')} (wandb sync uploads it)"

    def log(self, values: Values, at: float) -> None:
        self._wandb.log(dict(values), step=self._run.step(at))

    def finish(self, status: str, exit_code: int | None) -> None:
        self._wandb.summary.update({"status": status, "exit_code": exit_code, **self._run.results()})
        if phases := self._run.phases():
            self._wandb.log({"phases": self._table(columns=list(COLUMNS), data=phases)})
        self._wandb.finish(exit_code=0 if exit_code == 3 else 1 if exit_code is None else exit_code)


class MLflowRun:
    """A run of MLflow. Its variables apply, such as MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME. Without the first
    it is MLflow's own default, or ./mlruns with mlflow-skinny, which has no database."""

    def __init__(self, run: TrackedRun):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a directory is refused without it
        entities, client = import_module("mlflow.entities"), import_module("mlflow.tracking").MlflowClient
        uri = None if "MLFLOW_TRACKING_URI" in os.environ or find_spec("sqlalchemy") is not None else "./mlruns"
        self._run, self._metric, self._client = run, entities.Metric, client(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        # Names of tags with a dot need backquotes.
        found = self._client.search_runs([experiment_id], f"tags.`weightstream.id` = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {"weightstream.id": run.id, "weightstream.job": run.job, "weightstream.run": run.group}
            self._id = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
            # A parameter cannot change later: settings of a second start are not recorded.
            parameters = [
                entities.Param(NO_NAME.sub("_", key), _as_text(value)[:MAX_PARAMETER_CHARS])
                for key, value in run.settings().items()
            ]
            for begin in range(0, len(parameters), MAX_PARAMETERS):
                self._client.log_batch(self._id, params=parameters[begin : begin + MAX_PARAMETERS])
        self.location = f"run {self._id} of experiment {name} in {self._client.tracking_uri}"

    def log(self, values: Values, at: float) -> None:
        step = self._run.step(at)
        metrics = [self._metric(name, value, int(at * 1000), step) for name, value in values.items()]
        for begin in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + MAX_METRICS])

    def finish(self, status: str, exit_code: int | None) -> None:
        self.log(self._run.results(), time.time())
        if phases := self._run.phases():
            self._client.log_text(self._id, _markdown(COLUMNS, phases), "phases.md")
        self._client.set_tag(self._id, "weightstream.status", status)
        self._client.set_tag(self._id, "weightstream.exit_code", exit_code)
        ends = {"finished": "FINISHED", "errors": "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self._id, status=ends.get(status, "KILLED"))


def _as_text(value: JsonValue) -> str:
    return value if isinstance(value, str) else "null" if value is None else str(value)


# By the name of the tracker, of its package and of the extra.
TRACKERS: Mapping[str, Callable[[TrackedRun], RunTracker]] = {
    "tensorboard": TensorBoardRun,
    "wandb": WandbRun,
    "mlflow": MLflowRun,
}
