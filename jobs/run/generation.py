"""A run from rows to parts: fix the plan, generate the blocks that are not committed yet, commit each, sum up."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from runtime.api import Runtime
from runtime.batching.balance import Block
from runtime.config import Admission, PolicyKind, RuntimeConfig
from runtime.engine.records import PassRecord
from runtime.errors import RunMismatchError
from runtime.plan.listing import schedule_text
from runtime.plan.placement.defaults import chunk_tokens
from runtime.plan.planner import RunPlan
from runtime.ranks.ranks import Ranks
from runtime.session import Session, ignore
from runtime.stream.device import ComputeDevice
from runtime.trace import Span, Trace

from ..config.mistakes import mistakes_logged
from ..config.settings import EncodeConfig, GenerateConfig, run_directory
from ..datasets import Row, read_rows, shard_rows, with_former_ids
from ..files.publishing import PRIVATE_FOLDER_MODE, JsonValue, files_made_private, publish, write_all
from ..pictures.trace_file import tracing
from .chat import require_template
from .feedback import Feedback
from .identity import manifest_of
from .input_digests import InputDigests, digest_input, first_changed, keep_rows
from .local_workers import shared_weights
from .manifest import FORMAT_WITHOUT_FACTS, FORMAT_WITHOUT_SOURCES, RunManifest
from .open_run import Surroundings, generate_blocks
from .output_rows import generation_schema, infer_column_schema
from .parts import PartStore
from .passes import Start
from .plan_file import PlannedRequest, chunk_tokens_of, fix_plan, read_plan
from .predicted_spans import PredictedSpans
from .progress import Progress
from .requests import Asked, MakeRequests, Read, ask, completions_of, rejected_rows, seat, unseat
from .run_dir import RunDirectory, RunState, format_begun_with, open_run
from .running import remove_committed
from .stored_run import RunCopy, copy_of
from .success import is_finished
from .summary import MemoryUse, Summary, summarize, write_summary
from .workers import Worker

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
    def __call__(self, *, has_source: bool, has_logprobs: bool, has_beams: bool) -> pa.Schema: ...


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
    columns of a request with an encoding."""

    directory: Path
    columns: Columns
    requests: MakeRequests
    rows: Callable[[GenerateConfig, Runtime | None], list[Row]] = dataset_rows
    totals: Callable[[Path, Sequence[Row]], Mapping[str, JsonValue] | None] = lambda *_: None
    identity: Mapping[str, JsonValue] = field(default_factory=dict)
    check: Callable[[Runtime], None] = lambda _: None
    read: Callable[[Runtime], Read] = lambda _: lambda _: {}


def generation(config: GenerateConfig) -> Task:
    """A completion of each prompt."""
    columns = partial(generation_schema, has_reasoning=config.sampling.reasoning is not None)
    return Task(directory=run_directory(config), columns=columns, requests=completions_of)


def generate(
    config: GenerateConfig, should_stop: Callable[[], bool], start: Start | None = None, ranks: Ranks | None = None
) -> Outcome:
    """`perform`, for completions."""
    return perform(generation(config), config, should_stop, start, ranks)


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
    """The model of a run, all rows of its data set, and those of this shard. `begun_with`: the format that the run's
    directory, or its copy, was begun with."""

    runtime: Runtime
    all_rows: Sequence[Row]
    rows: Sequence[Row]
    copy: RunCopy
    begun_with: int


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
    read_first = task.rows(config, None) if config.dataset.window_tokens is None else None
    if runtime is None:
        asked = _asked_by_rows(config, read_first or [])
        runtime = Runtime(asked, should_stop=should_stop, trace=trace, ranks=ranks, device=device)
    task.check(runtime)
    require_template(runtime.model.tokenizer, config.dataset)
    all_rows = task.rows(config, runtime) if read_first is None else read_first
    copy = copy_of(config, task.directory, should_stop)
    begun_with = format_begun_with(task.directory, copy.begun)
    rows = shard_rows(all_rows, config.shard)
    require_template(runtime.model.tokenizer, config.dataset, rows)
    if begun_with == FORMAT_WITHOUT_FACTS:
        rows = with_former_ids(rows)
    return Prepared(runtime=runtime, all_rows=all_rows, rows=rows, copy=copy, begun_with=begun_with)


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
    runtime, rows, copy, sampling = ready.runtime, ready.rows, ready.copy, ready.runtime.config.sampling
    fixed = task.columns(
        has_source=ready.begun_with > FORMAT_WITHOUT_SOURCES,
        has_logprobs=sampling.logprobs > 0,
        has_beams=(sampling.num_beams or 1) > 1,
    )
    columns = infer_column_schema([row.columns for row in ready.all_rows], fixed)  # shards share it
    digests = digest_input(rows, columns)
    manifest = manifest_of(config, runtime, digests)
    manifest = replace(manifest, semantic={**manifest.semantic, **task.identity})
    with (
        _open(task.directory, manifest, digests, rows, is_shared=config.is_elastic, begun=copy.begun) as state,
        mistakes_logged(state.directory.log),
        _worker(config, state, should_stop) as worker,
    ):
        if config.output_private:
            state.directory.path.chmod(PRIVATE_FOLDER_MODE)  # of an earlier start it may be open
        copy.take_up()
        if state.manifest.facts:
            keep_rows(state.directory.row_digests, digests)
            copy.keep(state.directory.row_digests)
        store = partial(PartStore, directory=state.directory, manifest=state.manifest, columns=columns, fixed=fixed)
        store = partial(store, is_shared=config.is_elastic, copy=copy)
        yield _Run(task, state, runtime, rows, lambda plan: store(plan=plan), config, start, worker)


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
    rows: Sequence[Row],
    *,
    is_shared: bool,
    begun: Mapping[str, JsonValue] | None,
) -> RunState:
    """`open_run`; where the run is another's for its input, the error names the first row."""
    try:
        return open_run(path, manifest, is_shared=is_shared, begun=begun)
    except RunMismatchError as error:
        changed = first_changed(RunDirectory(path=path).row_digests, digests, rows)
        raise RunMismatchError(f"{error}\n{changed}") if changed is not None else error from error


def _known_plan(state: RunState) -> list[PlannedRequest] | None:
    """The plan that the run has fixed; None where there is none, and it is to be computed. Raises DamagedRunError."""
    if not state.directory.plan.exists():
        return None
    return read_plan(state.directory.plan, may_lack_digest=state.manifest.is_old)


class _Run:
    """One start of a run. `store_of` makes the store of its parts from the plan's seats."""

    def __init__(
        self,
        task: Task,
        state: RunState,
        runtime: Runtime,
        rows: Sequence[Row],
        store_of: Callable[[list[PlannedRequest]], PartStore],
        config: GenerateConfig,
        start: Start,
        worker: Worker | None,
    ):
        self._task, self._state, self._runtime, self._rows, self._config = task, state, runtime, rows, config
        self._store_of, self._start, self._worker = store_of, start, worker

    def outcome_if_finished(self) -> Outcome | None:
        """What a run came to whose every part is there; None where something is left to do. Raises DamagedRunError."""
        plan = _known_plan(self._state) if is_finished(self._state.directory) else None
        if plan is None:
            return None
        store = self._store_of(plan)
        outcome = self._outcome(store, None, was_finished=True)
        store.copy.end(is_new=False)
        return outcome

    def finish(self) -> Outcome:
        """Generates what is left, commits it and sums the run up. Where the first block shows that another way is
        faster, the session ends, and the run goes on as one that is resumed would."""
        asked = ask(self._runtime, self._rows, self._task.requests)
        asked = replace(asked, read=self._task.read(self._runtime))
        is_planner = self._worker is not None and self._worker.may_plan()
        if (begun := _known_plan(self._state)) is not None:
            asked = asked.seated(begun)
        if not asked.requests:
            return self._finished(asked, self._seated(asked, (), None), None)
        feedback = self._feedback(asked)
        while True:
            fixed = _known_plan(self._state)
            with self._runtime.confirmed_session(
                asked.computed,
                rates=feedback.rates if feedback is not None else None,
                blocks=unseat(fixed, asked) if fixed is not None else None,
                known=(known := feedback.policy if feedback is not None else None),
                chunk_tokens=chunk_tokens_of(self._state.directory.plan) if known is None else None,
            ) as (plan, session):
                store = self._seated(asked, plan.blocks, chunk_tokens(plan.policy))
                if self._worker is not None and is_planner:
                    self._worker.has_planned()
                    is_planner = False
                if self._is_generated(session, plan, store, asked, feedback):
                    return self._finished(asked, store, plan, session.opening_seconds)

    def _is_generated(
        self, session: Session, plan: RunPlan, store: PartStore, asked: Asked, feedback: Feedback | None
    ) -> bool:
        """Generates what is left as `plan` says. False where the first block has shown that another way is faster."""
        is_wave = self._config.policy.admission is Admission.wave
        with (
            Progress(asked.computed, plan.blocks, is_wave=is_wave) as progress,
            tracing(self._state.directory.trace, self._runtime.trace) as write_trace,
        ):
            for blocks, way in self._stretches(plan, store, feedback, progress):
                if (way.policy, way.kv) != (plan.policy, plan.kv):
                    log.info("policy: from now on %s", way.searched)
                    return False
                around = Surroundings(
                    asked=asked,
                    store=store,
                    admission=self._config.policy.admission,
                    checkpoint_seconds=self._config.checkpoint_seconds,
                    progress=progress,
                    start=self._start,
                    after_pass=self._tracer(way, asked, write_trace),
                    prediction=way.prediction,
                )
                generate_blocks(session, blocks, around)
        return True

    def _tracer(
        self, plan: RunPlan, asked: Asked, write: Callable[[Sequence[Span]], None]
    ) -> Callable[[PassRecord], None]:
        """What writes the spans of a pass that has just ended, and beside them those that the plan predicts of it."""
        if self._runtime.trace is None:
            return ignore
        predicted = PredictedSpans.of(self._runtime.model.shape, plan, [request.size for request in asked.computed])
        return lambda record: write(predicted.beginning(record.phase, time.monotonic() - record.seconds))

    def _feedback(self, asked: Asked) -> Feedback | None:
        """What the run learns from its first block, where its policy may be a search's and one machine does it all."""
        policy = self._config.policy
        if (
            self._worker is not None
            or self._runtime.ranks is not None
            or policy.kind is PolicyKind.fixed
            or policy.pin is not None
            or policy.admission is not Admission.wave
        ):
            return None
        feedback = Feedback(path=self._state.directory.rates, runtime=self._runtime, requests=asked.computed)
        feedback.restore()
        return feedback

    def _seated(self, asked: Asked, blocks: Sequence[Block], chunk_tokens: int | None) -> PartStore:
        """The store of the plan's parts; writes the plan down, or checks it against what is written."""
        planned = seat(asked, blocks)
        store = self._store_of(planned)
        if not self._state.directory.plan.exists():
            store.require_seats()
        is_old = self._state.manifest.is_old
        fix_plan(self._state.directory.plan, planned, chunk_tokens=chunk_tokens, may_lack_digest=is_old)
        store.copy.keep(self._state.directory.plan)
        return store

    def _stretches(
        self, plan: RunPlan, store: PartStore, feedback: Feedback | None, progress: Progress
    ) -> Iterator[tuple[list[Block], RunPlan]]:
        """The blocks that are left, those together that go by one plan, and that plan: where the run learns from its
        first block, that one first. Each stretch is asked for when the one before it is committed."""
        done = store.committed()
        progress.expect(plan.prediction, done)
        if self._state.is_resumed:
            log.info("going on: %d of %d blocks are committed", len(done), len(store.blocks))
        text = schedule_text(plan)
        publish(self._state.directory.schedule, lambda file: write_all(file, text.encode()), exclusive=False)
        remove_committed(self._state.directory, done)
        left, first = [block for block in plan.blocks if block.index not in done], plan.blocks[0]
        if plan.searched is None:
            feedback = None
        if feedback is not None and first in left:
            feedback.record(plan)
            yield [first], plan
            left.remove(first)
        if feedback is not None and feedback.is_due and left:
            plan = feedback.learn(plan, store.passes([first.index]))
            progress.expect(plan.prediction, {*done, first.index})
        if self._worker is None:
            yield left, plan
            return
        for block, done_by_all in self._worker.blocks(left):
            progress.expect(plan.prediction, done_by_all)
            yield [block], plan

    def _finished(
        self, asked: Asked, store: PartStore, plan: RunPlan | None, weights_seconds: float | None = None
    ) -> Outcome:
        if self._worker is not None and not self._worker.may_end():
            return replace(self._outcome(store, plan, was_finished=True), was_finished=False)  # another wrote it down
        num_blocks = len(plan.blocks) if plan is not None else 0
        if asked.rejected and num_blocks not in store.committed():
            store.commit(num_blocks, rejected_rows(asked), [])
        outcome = self._outcome(store, plan, was_finished=False, weights_seconds=weights_seconds)
        facts = outcome.summary.plan
        store.finish(None if facts is None else facts.numbers)
        store.copy.end(is_new=True)
        return outcome

    def _outcome(
        self, store: PartStore, plan: RunPlan | None, *, was_finished: bool, weights_seconds: float | None = None
    ) -> Outcome:
        counts = dict.fromkeys(("ok", "error", "skipped"), 0)
        for part in store.committed().values():
            for status, count in part.rows.items():
                counts[status] += count
        summary = summarize(
            store.passes(),
            rows=counts,
            planned=_planned_memory(plan, self._runtime) if plan is not None else None,
            plan=self._runtime.facts(plan) if plan is not None else None,
            weights_seconds=weights_seconds,
            ledgers=plan.placement.ledgers if plan is not None else (),
        )
        summary = replace(summary, totals=self._task.totals(store.directory.path, self._rows))
        if not was_finished:
            write_summary(store.directory.summary, summary)
        return Outcome(directory=store.directory.path, summary=summary, was_finished=was_finished)


def _planned_memory(plan: RunPlan, runtime: Runtime) -> MemoryUse:
    totals = {ledger.memory: ledger.total_bytes for ledger in plan.placement.ledgers}
    return MemoryUse(host_bytes=totals["host"] + runtime.baseline_bytes, device_bytes=totals.get("device", 0))
