"""A run from rows to parts: fix the plan, generate the blocks that are not committed yet, commit each, sum up."""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from runtime.config.settings import RuntimeConfig
from runtime.errors import DatasetError, RunMismatchError
from runtime.library.api import Runtime
from runtime.plan.planner import RunPlan
from runtime.ranks.ranks import Ranks
from runtime.stream.device import ComputeDevice
from runtime.trace import Trace
from runtime.units import counted

from ..config.mistakes import mistakes_logged
from ..config.settings import EncodeConfig, GenerateConfig, ScoreConfig, run_directory
from ..datasets import Row, read_rows
from ..datasets.config import looks_otherwise
from ..datasets.files import COPIES
from ..files.publishing import PRIVATE_FOLDER_MODE, JsonValue, files_made_private
from ..record.input_digests import InputDigests, first_changed
from ..record.manifest import RunManifest
from ..record.output_rows import generation_schema
from ..record.parts import PartStore
from ..record.passes import Start
from ..record.run_dir import RunDirectory, RunState, open_run
from ..record.stored_run import RunCopy, copy_of
from ..record.success import is_finished
from ..record.summary import MemoryUse, Summary, summarize, write_summary
from ..workers.elastic import Worker
from ..workers.local import shared_weights
from .chat import require_template
from .identity import manifest_of
from .requests import MakeRequests, Read, completions_of
from .run_input import HeldRows, RunInput, Window, rows_in_windows
from .window_run import Around, Earlier, WindowOutcome, WindowRun

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`summary` covers the whole run, `was_finished` says that there was nothing left to do."""

    directory: Path
    summary: Summary
    was_finished: bool

    @property
    def exit_code(self) -> int:
        return 3 if self.summary.rows["error"] else 0


class Columns(Protocol):
    def __call__(self, *, has_logprobs: bool, has_beams: bool) -> pa.Schema: ...


def dataset_rows(config: GenerateConfig, runtime: Runtime | None) -> list[Row]:
    """The rows of the data set; `runtime` counts tokens where it has a tokenizer."""
    log.info("reading %s", config.dataset.place)
    encodes = isinstance(config, EncodeConfig)
    if runtime is None or runtime.model.tokenizer is None:
        return read_rows(config.dataset, encodes=encodes)
    return read_rows(config.dataset, count_tokens=lambda text: len(runtime.tokenize([text])[0]), encodes=encodes)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a run does with its rows; all else of a run is the same for every task. `columns`: those of
    `GenerationRow.values` that every output row has, whatever it brought along, as `generation_schema` makes them.
    `rows` are asked for without a runtime first, unless the settings need one to tell them. `totals`: what the parts in
    a directory come to beside what every run's summary says, of these input rows. `identity`: what makes the run this
    run beside its settings. `check` raises ConfigError where the model cannot do the task. `read`: makes what reads the
    columns of a request with an encoding. `problem`: why nothing can be asked of a row, whatever the model."""

    directory: Path
    columns: Columns
    requests: MakeRequests
    rows: Callable[[GenerateConfig, Runtime | None], list[Row]] = dataset_rows
    totals: Callable[[Path, Callable[[], Sequence[Row]]], Mapping[str, JsonValue] | None] = lambda *_: None
    identity: Mapping[str, JsonValue] = field(default_factory=dict)
    check: Callable[[Runtime], None] = lambda _: None
    read: Callable[[Runtime], Read] = lambda _: lambda _: {}
    problem: Callable[[Row], str | None] = lambda row: row.error


def generation(config: GenerateConfig) -> Task:
    """A completion of each prompt."""
    columns = partial(generation_schema, has_reasoning=config.sampling.reasoning is not None)
    return Task(directory=run_directory(config), columns=columns, requests=completions_of)


def generate(config: GenerateConfig, should_stop: Callable[[], bool], start: Start | None = None) -> Outcome:
    """`perform`, for completions."""
    return perform(generation(config), config, should_stop, start)


def perform(
    task: Task,
    config: GenerateConfig,
    should_stop: Callable[[], bool],
    start: Start | None = None,
    ranks: Ranks | None = None,
    runtime: Runtime | None = None,
) -> Outcome:
    """Runs, or goes on with, the job that `config` describes. `start`: of the process; None is now. `ranks`: of which
    this one is the first. `runtime`: one of these settings that is there already; it is left open. Raises the errors of
    runtime.errors."""
    privacy = files_made_private() if config.output_private else nullcontext()
    with privacy, shared_weights() as shared:
        device = ComputeDevice(config.machine.device, shared)
        with _opened(task, config, should_stop, start or Start(), ranks, device, runtime) as run:
            return run.outcome_if_finished() or run.finish()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The model of a run, and its rows."""

    runtime: Runtime
    asked: RunInput
    copy: RunCopy


def prepared(
    task: Task,
    config: GenerateConfig,
    should_stop: Callable[[], bool],
    trace: Trace | None = None,
    ranks: Ranks | None = None,
    device: ComputeDevice | None = None,
    runtime: Runtime | None = None,
) -> Prepared:
    """Reads the data set and opens the model, on `device` or the one that the settings name, unless it is there as
    `runtime`, and writes nothing. Rows that need no tokenizer come before the model, which may have to be asked for far
    away."""
    COPIES.set(config.offload.cache_dir)
    asked: RunInput | None = None
    copy, is_read = copy_of(config, task.directory, should_stop), task.rows is dataset_rows
    if is_read:
        asked = rows_in_windows(config, task.directory, should_stop, copy.begun)
    if asked is None and config.dataset.window_tokens is None:
        asked = HeldRows(task.rows(config, None), config)
    if asked is not None and is_read:
        require_usable(task, config, asked.every_row())
    if runtime is None:
        settings = _asked_by_rows(config, asked.every_row() if isinstance(asked, HeldRows) else [])
        runtime = Runtime(
            settings,
            should_stop=should_stop,
            trace=trace,
            ranks=ranks,
            device=device,
            encodes=isinstance(config, EncodeConfig),
        )
    task.check(runtime)
    require_template(runtime.model.tokenizer, config.dataset)
    if asked is None:
        asked = HeldRows(task.rows(config, runtime), config)
        if is_read:
            require_usable(task, config, asked.every_row())
    require_template(runtime.model.tokenizer, config.dataset, asked.first_rows())
    return Prepared(runtime=runtime, asked=asked, copy=copy)


def require_usable(task: Task, config: GenerateConfig, rows: Iterable[Row]) -> None:
    """Raises DatasetError where nothing can be asked of any of these rows: of one for most inputs no more is read. A
    batch is answered all the same, with an error for each of its lines."""
    if config.is_batch and not isinstance(config, ScoreConfig):
        return
    num_rows, first = 0, ""
    for row in rows:
        problem = task.problem(row)
        if problem is None:
            return
        num_rows, first = num_rows + 1, first or problem
    raise DatasetError(
        f"none of {counted(num_rows, 'row')} of {config.dataset.place} can be used; the first: {first}"
        f"{looks_otherwise(config.dataset)}"
    )


@contextmanager
def _opened(
    task: Task,
    config: GenerateConfig,
    should_stop: Callable[[], bool],
    start: Start,
    ranks: Ranks | None,
    device: ComputeDevice,
    runtime: Runtime | None,
) -> Iterator["_Run"]:
    """Begins the run's directory or opens it again, with its rows and its model; holds its lock."""
    ready = prepared(task, config, should_stop, Trace() if config.trace else None, ranks, device, runtime)
    runtime, asked, copy, sampling = ready.runtime, ready.asked, ready.copy, ready.runtime.config.sampling
    fixed = task.columns(
        has_logprobs=sampling.logprobs > 0,
        has_beams=(sampling.num_beams or 1) > 1,
    )
    columns = asked.columns(fixed)
    digests = asked.digests(columns)
    manifest = manifest_of(config, runtime, digests)
    manifest = replace(manifest, semantic={**manifest.semantic, **asked.identity, **task.identity})
    with (
        _open(task.directory, manifest, digests, asked, is_shared=config.is_elastic, begun=copy.begun) as state,
        mistakes_logged(state.directory.log),
        _worker(config, state, should_stop) as worker,
    ):
        if config.output_private:
            state.directory.path.chmod(PRIVATE_FOLDER_MODE)  # of an earlier start it may be open
        copy.take_up()
        if state.manifest.facts:
            copy.keep(asked.keep(state.directory, digests))
        store = partial(PartStore, directory=state.directory, manifest=state.manifest, columns=columns, fixed=fixed)
        store = partial(store, is_shared=config.is_elastic, is_window=len(asked.windows) > 1, copy=copy)
        around = Around(
            state=state,
            runtime=runtime,
            config=config,
            start=start,
            worker=worker,
            requests=task.requests,
            read=task.read(runtime),
            store_of=lambda planned: store(plan=planned),
        )
        yield _Run(task, around, asked.windows)


def _worker(
    config: GenerateConfig, state: RunState, should_stop: Callable[[], bool]
) -> AbstractContextManager[Worker | None]:
    """This process among the run's workers; None where it is the only one."""
    return Worker(state.directory, config.lease_seconds, should_stop) if config.is_elastic else nullcontext()


def _asked_by_rows(config: GenerateConfig, rows: Sequence[Row]) -> RuntimeConfig:
    """The run's settings, with as many log-probabilities of each token as any row of the whole input asks for."""
    most = max((row.overrides.logprobs or 0 for row in rows), default=0)
    sampling = replace(config.sampling, logprobs=max(config.sampling.logprobs, most))
    return replace(config.runtime, sampling=sampling)


def _open(
    path: Path,
    manifest: RunManifest,
    digests: InputDigests,
    asked: RunInput,
    *,
    is_shared: bool,
    begun: Mapping[str, JsonValue] | None,
) -> RunState:
    """`open_run`; where the run is another's for its input, the error names the first row."""
    try:
        return open_run(path, manifest, is_shared=is_shared, begun=begun)
    except RunMismatchError as error:
        changed = first_changed(RunDirectory(path=path).row_digests, digests, asked.first_rows())
        raise RunMismatchError(f"{error}\n{changed}") if changed is not None else error from error


class _Run:
    """One start of a run: its windows one after another, and what they come to together."""

    def __init__(self, task: Task, around: Around, windows: Sequence[Window]):
        self._task, self._around, self._windows = task, around, windows
        self._directory = around.state.directory
        self._earlier = Earlier()  # what the windows before the last have come to

    def outcome_if_finished(self) -> Outcome | None:
        """What a run came to whose every part is there; None where something is left to do. Raises DamagedRunError."""
        if not is_finished(self._directory):
            return None
        found = [self._around.store_of_known(window) for window in self._windows]
        stores = [store for store in found if store is not None]
        if len(stores) < len(found):
            return None
        for store in stores[:-1]:
            self._earlier.add(store)
        outcome = self._outcome(WindowOutcome(store=stores[-1]), was_finished=True)
        stores[-1].copy.end(is_new=False)
        return outcome

    def finish(self) -> Outcome:
        """Generates what is left, window by window, commits it and sums the run up. Windows of which nothing is left
        are passed over by their plans and parts; the last is planned anyway, as the summary tells of a plan."""
        first_block, last = 0, None
        for window in self._windows:
            last = WindowRun(self._around, window, first_block).finish()
            first_block = last.next_block
            if not window.is_last:
                self._earlier.add(last.store)
                last = None  # and with it the rows
                gc.collect()  # an engine refers to itself
        assert last is not None, "a run has a window"
        worker = self._around.worker
        if worker is not None and not worker.may_end():
            return replace(self._outcome(last, was_finished=True), was_finished=False)  # another wrote it down
        outcome = self._outcome(last, was_finished=False)
        facts = outcome.summary.plan
        last.store.finish(None if facts is None else facts.numbers, self._earlier.parts)
        last.store.copy.end(is_new=True)
        return outcome

    def _outcome(self, last: WindowOutcome, *, was_finished: bool) -> Outcome:
        plan, runtime, counts = last.plan, self._around.runtime, dict.fromkeys(("ok", "error", "skipped"), 0)
        for part in (*self._earlier.parts.values(), *last.store.committed().values()):
            for status, count in part.rows.items():
                counts[status] += count
        summary = summarize(
            [*self._earlier.passes, *last.store.passes()],
            rows=counts,
            planned=_planned_memory(plan, runtime) if plan is not None else None,
            plan=runtime.facts(plan) if plan is not None else None,
            weights_seconds=last.weights_seconds,
            ledgers=plan.placement.ledgers if plan is not None else (),
        )
        summary = replace(summary, totals=self._task.totals(self._directory.path, self._windows[0].read))
        if not was_finished:
            write_summary(self._directory.summary, summary)
        return Outcome(directory=self._directory.path, summary=summary, was_finished=was_finished)


def _planned_memory(plan: RunPlan, runtime: Runtime) -> MemoryUse:
    totals = {ledger.memory: ledger.total_bytes for ledger in plan.placement.ledgers}
    return MemoryUse(host_bytes=totals["host"] + runtime.baseline_bytes, device_bytes=totals.get("device", 0))
