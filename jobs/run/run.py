"""A run from rows to parts: plans, generates and commits its windows in order, then writes the summary."""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from runtime.errors import RunMismatchError
from runtime.library.api import Runtime
from runtime.ranks.ranks import Ranks
from runtime.stream.device import ComputeDevice
from runtime.trace import Trace

from ..config.error_log import log_errors
from ..config.logs import run_log
from ..config.settings import EncodeConfig, RunSettings, ScoreConfig
from ..datasets import Row
from ..datasets.config import require_usable
from ..datasets.files import CACHE_DIR
from ..files.publishing import PRIVATE_FOLDER_MODE, JsonValue, private_umask
from ..record.input_digests import describe_first_change
from ..record.parts import PartInfo, PartStore
from ..record.passes import PassRow, Start, without_stages
from ..record.run_dir import RunDirectory, open_run
from ..record.stored_run import open_copy
from ..record.success import is_finished
from ..record.summary import MemoryUse, Outcome, summarize, write_summary
from ..tracking.feed import RunFeed
from ..workers.elastic import Worker
from ..workers.local import shared_weights
from .context import RunContext
from .identity import make_manifest
from .input import InMemoryRows, RunInput, open_windowed_rows
from .requests import require_template
from .summary_table import format_table
from .tasks.task import Task, dataset_rows
from .window import WindowRun

log = logging.getLogger(__name__)


def run_task(
    task: Task,
    config: RunSettings,
    should_stop: Callable[[], bool],
    start: Start | None = None,
    ranks: Ranks | None = None,
    runtime: Runtime | None = None,
    feed: RunFeed | None = None,
) -> Outcome:
    """Runs or resumes a task. `start`: start of the process; None is now. `ranks`: set on rank 0 of several.
    `runtime`: an open one with these settings; it stays open. `feed`: gets the curves; the caller closes it. Raises the
    errors of runtime.errors."""
    privacy = private_umask() if config.output_private else nullcontext()
    with privacy, shared_weights() as shared:
        device = ComputeDevice(config.machine.device, shared)
        feed = feed or RunFeed()
        with Run.open(task, config, should_stop, start or Start(), ranks, device, runtime, feed) as run:
            if (outcome := run.outcome_if_finished()) is not None:
                return outcome  # and the run's files are as they were
            with run_log(RunDirectory(path=task.directory).log):
                return run.finish()


def open_model(
    task: Task,
    config: RunSettings,
    should_stop: Callable[[], bool],
    remote_manifest: Mapping[str, JsonValue] | None,
    *,
    ranks: Ranks | None = None,
    device: ComputeDevice | None = None,
    runtime: Runtime | None = None,
) -> tuple[Runtime, RunInput]:
    """Reads the data set and opens the model, unless `runtime` is given; writes nothing. Rows that need no tokenizer
    are read before the model is downloaded. `remote_manifest`: run.json of the run's copy."""
    CACHE_DIR.set(config.offload.cache_dir)
    is_dataset, rows = task.rows is dataset_rows, None
    if is_dataset:  # remains None if all rows are to be held in memory
        rows = open_windowed_rows(config, task.directory, should_stop, remote_manifest)
    if rows is None and config.dataset.window_tokens is None:
        rows = InMemoryRows(task.rows(config, None), config.shard)
    if rows is not None and is_dataset:
        require_usable_row(task, config, rows.all_rows())
    if runtime is None:
        # The engine computes the largest number of log-probabilities that any row asks for.
        in_memory_rows = rows.all_rows() if isinstance(rows, InMemoryRows) else ()
        num_logprobs = max(config.sampling.logprobs, *(row.overrides.logprobs or 0 for row in in_memory_rows), 0)
        runtime = Runtime(
            replace(config.runtime, sampling=replace(config.sampling, logprobs=num_logprobs)),
            should_stop=should_stop,
            trace=Trace() if config.trace and (ranks is None or not ranks.rank) else None,
            ranks=ranks,
            device=device,
            encodes=isinstance(config, EncodeConfig),
        )
    task.check(runtime)
    require_template(runtime.model.tokenizer, config.dataset)
    if rows is None:  # dataset.window_tokens needs the tokenizer
        rows = InMemoryRows(task.rows(config, runtime), config.shard)
        if is_dataset:
            require_usable_row(task, config, rows.all_rows())
    require_template(runtime.model.tokenizer, config.dataset, rows.preview_rows())
    return runtime, rows


def require_usable_row(task: Task, config: RunSettings, rows: Iterable[Row]) -> None:
    """Raises DatasetError if no row can be used; reads up to the first usable one. Generate and encode jobs with OpenAI
    batches are exempt: each bad line gets an error."""
    if not config.is_batch or isinstance(config, ScoreConfig):
        require_usable(config.dataset, rows, task.problem)


class Run:
    """A run opened by this process: executes its windows in order and writes the summary."""

    def __init__(self, context: RunContext):
        self._context, self._directory = context, context.state.directory
        # Parts and passes of completed windows: a few bytes per row.
        self._parts: dict[int, PartInfo] = {}
        self._passes: list[PassRow] = []

    @staticmethod
    @contextmanager
    def open(
        task: Task,
        config: RunSettings,
        should_stop: Callable[[], bool],
        start: Start,
        ranks: Ranks | None,
        device: ComputeDevice,
        runtime: Runtime | None,
        feed: RunFeed,
    ) -> Iterator["Run"]:
        """Creates or reopens the run's directory, with its rows and model; holds its lock, log and worker
        registration."""
        copy = open_copy(config, task.directory, should_stop)
        runtime, rows = open_model(
            task, config, should_stop, copy.stored_manifest, ranks=ranks, device=device, runtime=runtime
        )
        fixed_schema = task.columns(runtime.config.sampling)
        columns = rows.columns(fixed_schema)
        digests = rows.digests(columns)
        manifest = make_manifest(config, runtime, digests)
        manifest = replace(manifest, semantic={**manifest.semantic, **rows.identity, **task.identity})
        try:
            state = open_run(
                task.directory, manifest, is_shared=config.is_elastic, remote_manifest=copy.stored_manifest
            )
        except RunMismatchError as error:
            stored = RunDirectory(path=task.directory).row_digests
            if (changed := describe_first_change(stored, digests, rows.preview_rows())) is None:
                raise
            raise RunMismatchError(f"{error}\n{changed}") from error
        directory, lease_seconds = state.directory, config.lease_seconds
        with (
            state,
            log_errors(directory.log),
            Worker(directory, lease_seconds, should_stop) if config.is_elastic else nullcontext() as worker,
        ):
            if config.output_private:
                directory.path.chmod(PRIVATE_FOLDER_MODE)  # it may have been created without output_private
            copy.attach()
            copy.upload_missing(rows.save_digests(directory, digests))
            feed.open(is_shared=worker is not None)
            yield Run(
                RunContext(
                    task=task,
                    runtime=runtime,
                    state=state,
                    copy=copy,
                    worker=worker,
                    start=start,
                    columns=columns,
                    fixed_schema=fixed_schema,
                    windows=rows.windows,
                    checkpoint_seconds=config.checkpoint_seconds,
                    feed=feed,
                )
            )

    def outcome_if_finished(self) -> Outcome | None:
        """The outcome of a complete run; None if work remains. Raises DamagedRunError."""
        if not is_finished(self._directory):
            return None
        plans = [self._context.stored_plan(window) for window in self._context.windows]
        stores = [self._context.open_store(plan) for plan in plans if plan is not None]
        if len(stores) < len(plans):
            return None
        for store in stores[:-1]:
            self._add_window(store)
        outcome = self._make_outcome(stores[-1], was_finished=True)
        self._context.copy.finish(is_new=False)
        return outcome

    def finish(self) -> Outcome:
        """Generates the remaining windows and writes the summary. Plans the last window even if it is complete, because
        the summary contains its plan."""
        context, first_block = self._context, 0
        for window in context.windows[:-1]:
            store, first_block = WindowRun(context, window, first_block).generate()
            self._add_window(store)
            gc.collect()  # an engine is a reference cycle that holds the weights
        last = WindowRun(context, context.windows[-1], first_block)
        store, _ = last.generate()
        if context.worker is not None and not context.worker.acquire_summary():
            # Another worker has written the summary: `was_finished` keeps this one from writing it again.
            return replace(self._make_outcome(store, last, was_finished=True), was_finished=False)
        outcome = self._make_outcome(store, last, was_finished=False)
        plan = outcome.summary.plan
        store.publish_success(None if plan is None else plan.numbers, self._parts)  # after the summary
        context.copy.finish(is_new=True)
        return outcome

    def _add_window(self, store: PartStore) -> None:
        self._parts |= store.committed_parts()
        self._passes += map(without_stages, store.read_passes())

    def _make_outcome(self, store: PartStore, last: WindowRun | None = None, *, was_finished: bool) -> Outcome:
        context, counts = self._context, dict.fromkeys(("ok", "error", "skipped"), 0)
        for part in (*self._parts.values(), *store.committed_parts().values()):
            for status, count in part.rows.items():
                counts[status] += count
        runtime, plan = context.runtime, last.plan if last is not None else None
        ledgers = {ledger.memory: ledger.total_bytes for ledger in plan.placement.ledgers} if plan is not None else {}
        summary = summarize(
            [*self._passes, *store.read_passes()],
            rows=counts,
            planned=MemoryUse(
                host_bytes=ledgers["host"] + runtime.baseline_bytes, device_bytes=ledgers.get("device", 0)
            )
            if ledgers
            else None,
            plan=runtime.resolved_settings(plan) if plan is not None else None,
            weights_seconds=last.weights_seconds if last is not None else None,
            ledgers=plan.placement.ledgers if plan is not None else (),
            totals=context.task.totals(self._directory.path, context.windows[0].read),
        )
        if not was_finished:
            write_summary(self._directory.summary, summary)
            log.debug("summary:\n%s", format_table(summary))
        return Outcome(directory=self._directory.path, summary=summary, was_finished=was_finished)
