"""A run from rows to parts: fix the plan, generate the blocks that are not committed yet, commit each, sum up."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from runtime.api import Runtime
from runtime.batching.balance import Block
from runtime.config import Admission, PolicyKind
from runtime.errors import RunMismatchError
from runtime.plan.listing import schedule_text
from runtime.plan.planner import RunPlan
from runtime.trace import Trace

from ..config.mistakes import mistakes_logged
from ..config.settings import GenerateConfig, run_name
from ..datasets import Row, read_rows, shard_rows, with_former_ids
from ..files.publishing import PRIVATE_FOLDER_MODE, files_made_private, publish, write_all
from ..pictures.trace_file import tracing
from .chat import require_template
from .feedback import Feedback
from .identity import manifest_of
from .input_digests import InputDigests, digest_input, first_changed, keep_rows
from .manifest import FORMAT_WITHOUT_FACTS, FORMAT_WITHOUT_SOURCES, RunManifest
from .open_run import Surroundings, generate_blocks
from .output_rows import generation_schema, infer_column_schema
from .parts import PartStore
from .plan_file import PlannedRequest, fix_plan, read_plan
from .requests import Asked, ask, rejected_rows, seat, unseat
from .run_dir import RunDirectory, RunState, format_begun_with, open_run
from .running import remove_committed
from .success import is_finished
from .summary import MemoryUse, Summary, summarize, write_summary

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


def run_directory(config: GenerateConfig) -> Path:
    return Path(config.output_root) / "generate" / run_name(config)


def generate(config: GenerateConfig, should_stop: Callable[[], bool]) -> Outcome:
    """Runs, or goes on with, the job that `config` describes. Raises the errors of runtime.errors."""
    privacy = files_made_private() if config.output_private else nullcontext()
    with privacy, _opened(config, should_stop) as run:
        return run.outcome_if_finished() or run.finish()


@contextmanager
def _opened(config: GenerateConfig, should_stop: Callable[[], bool]) -> Iterator["_Run"]:
    """Reads the data set, and begins the run's directory or opens it again; holds its lock."""
    trace = Trace() if config.trace else None
    runtime = Runtime(config.runtime, should_stop=should_stop, trace=trace)
    require_template(runtime.model.tokenizer, config.dataset)
    count_tokens = (lambda text: len(runtime.tokenize([text])[0])) if runtime.model.tokenizer is not None else None
    all_rows = read_rows(config.dataset, count_tokens=count_tokens)
    begun_with = format_begun_with(run_directory(config))
    fixed = generation_schema(has_logprobs=config.sampling.logprobs > 0, has_source=begun_with > FORMAT_WITHOUT_SOURCES)
    columns = infer_column_schema([row.columns for row in all_rows], fixed)  # of the whole data set: shards share it
    rows = shard_rows(all_rows, config.shard)
    require_template(runtime.model.tokenizer, config.dataset, rows)
    if begun_with == FORMAT_WITHOUT_FACTS:
        rows = with_former_ids(rows)
    digests = digest_input(rows, columns)
    with (
        _open(run_directory(config), manifest_of(config, runtime, digests), digests, rows) as state,
        mistakes_logged(state.directory.log),
    ):
        if config.output_private:
            state.directory.path.chmod(PRIVATE_FOLDER_MODE)  # of an earlier start it may be open
        if state.manifest.facts:
            keep_rows(state.directory.row_digests, digests)
        store = partial(PartStore, directory=state.directory, manifest=state.manifest, columns=columns, fixed=fixed)
        yield _Run(state, runtime, rows, lambda plan: store(plan=plan), config)


def _open(path: Path, manifest: RunManifest, digests: InputDigests, rows: Sequence[Row]) -> RunState:
    """`open_run`; where the run is another's for its input, the error names the first row."""
    try:
        return open_run(path, manifest)
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
        state: RunState,
        runtime: Runtime,
        rows: Sequence[Row],
        store_of: Callable[[list[PlannedRequest]], PartStore],
        config: GenerateConfig,
    ):
        self._state, self._runtime, self._rows, self._config = state, runtime, rows, config
        self._store_of = store_of

    def outcome_if_finished(self) -> Outcome | None:
        """What a run came to whose every part is there; None where something is left to do. Raises DamagedRunError."""
        plan = _known_plan(self._state) if is_finished(self._state.directory) else None
        return _outcome(self._store_of(plan), None, self._runtime, was_finished=True) if plan is not None else None

    def finish(self) -> Outcome:
        """Generates what is left, commits it and sums the run up. Where the first block shows that another way is
        faster, the session ends, and the run goes on as one that is resumed would."""
        asked = ask(self._runtime, self._rows)
        if not asked.requests:
            return self._finished(asked, self._seated(asked, ()), None)
        feedback = self._feedback(asked)
        while True:
            fixed = _known_plan(self._state)
            with self._runtime.confirmed_session(
                asked.requests,
                rates=feedback.rates if feedback is not None else None,
                blocks=unseat(fixed, asked) if fixed is not None else None,
                known=feedback.policy if feedback is not None else None,
            ) as (plan, session):
                store = self._seated(asked, plan.blocks)
                for blocks, way in self._stretches(plan, store, feedback):
                    if (way.policy, way.kv) != (plan.policy, plan.kv):
                        log.info("policy: from now on %s", way.searched)
                        break
                    with self._surroundings(asked, store, way) as around:
                        generate_blocks(session, blocks, around)
                else:
                    return self._finished(asked, store, plan)

    def _feedback(self, asked: Asked) -> Feedback | None:
        """What the run learns from its first block, where its policy may be a search's."""
        policy = self._config.policy
        if policy.kind is PolicyKind.fixed or policy.pin is not None or policy.admission is not Admission.wave:
            return None
        feedback = Feedback(path=self._state.directory.rates, runtime=self._runtime, requests=asked.requests)
        feedback.restore()
        return feedback

    def _seated(self, asked: Asked, blocks: Sequence[Block]) -> PartStore:
        """The store of the plan's parts; writes the plan down, or checks it against what is written."""
        planned = seat(asked, blocks)
        store = self._store_of(planned)
        if not self._state.directory.plan.exists():
            store.require_seats()
        fix_plan(self._state.directory.plan, planned, may_lack_digest=self._state.manifest.is_old)
        return store

    def _stretches(
        self, plan: RunPlan, store: PartStore, feedback: Feedback | None
    ) -> Iterator[tuple[list[Block], RunPlan]]:
        """The blocks that are left, those together that go by one plan, and that plan: where the run learns from its
        first block, that one first. Each stretch is asked for when the one before it is committed."""
        done = store.committed()
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
        yield left, plan

    @contextmanager
    def _surroundings(self, asked: Asked, store: PartStore, plan: RunPlan) -> Iterator[Surroundings]:
        with tracing(self._state.directory.trace, self._runtime.trace) as write_trace:
            yield Surroundings(
                asked=asked,
                store=store,
                admission=self._config.policy.admission,
                checkpoint_seconds=self._config.checkpoint_seconds,
                after_pass=write_trace,
                prediction=plan.prediction,
            )

    def _finished(self, asked: Asked, store: PartStore, plan: RunPlan | None) -> Outcome:
        num_blocks = len(plan.blocks) if plan is not None else 0
        if asked.rejected and num_blocks not in store.committed():
            store.commit(num_blocks, rejected_rows(asked), [])
        outcome = _outcome(store, plan, self._runtime, was_finished=False)
        store.finish()
        return outcome


def _outcome(store: PartStore, plan: RunPlan | None, runtime: Runtime, *, was_finished: bool) -> Outcome:
    counts = dict.fromkeys(("ok", "error", "skipped"), 0)
    for part in store.committed().values():
        for status, count in part.rows.items():
            counts[status] += count
    summary = summarize(
        store.passes(),
        rows=counts,
        planned=_planned_memory(plan, runtime) if plan is not None else None,
        plan=runtime.facts(plan) if plan is not None else None,
    )
    if not was_finished:
        write_summary(store.directory.summary, summary)
    return Outcome(directory=store.directory.path, summary=summary, was_finished=was_finished)


def _planned_memory(plan: RunPlan, runtime: Runtime) -> MemoryUse:
    totals = {ledger.memory: ledger.total_bytes for ledger in plan.placement.ledgers}
    return MemoryUse(host_bytes=totals["host"] + runtime.baseline_bytes, device_bytes=totals.get("device", 0))
