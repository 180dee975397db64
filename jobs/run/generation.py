"""A run from rows to parts: fix the plan, generate the blocks that are not committed yet, commit each, sum up."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from runtime.api import Runtime
from runtime.batching.balance import Block
from runtime.config import Admission, PolicyKind
from runtime.errors import RunMismatchError
from runtime.plan.cost.predict import Prediction
from runtime.plan.listing import schedule_text
from runtime.plan.planner import RunPlan
from runtime.session import Session
from runtime.trace import Trace

from ..config.mistakes import mistakes_logged
from ..config.settings import GenerateConfig, run_name
from ..datasets import Row, read_rows, shard_rows, with_former_ids
from ..files.publishing import PRIVATE_FOLDER_MODE, files_made_private, publish, write_all
from ..report.trace_file import tracing
from .chat import require_template
from .continuous import generate_continuously
from .feedback import Feedback
from .identity import manifest_of
from .input_digests import InputDigests, digest_input, first_changed, keep_rows
from .manifest import RunManifest
from .open_run import Surroundings
from .output_rows import generation_schema, infer_column_schema
from .parts import PartStore
from .plan_file import PlannedRequest, fix_plan, read_plan
from .requests import Asked, ask, rejected_rows, seat, unseat
from .run_dir import RunDirectory, RunState, is_begun_by_older_version, open_run
from .running import remove_committed
from .success import is_finished
from .summary import MemoryUse, Summary, summarize, write_summary
from .waves import generate_waves

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
    with files_made_private() if config.output_private else nullcontext():
        return _generate(config, should_stop)


def _generate(config: GenerateConfig, should_stop: Callable[[], bool]) -> Outcome:
    trace = Trace() if config.trace else None
    runtime = Runtime(config.runtime, should_stop=should_stop, trace=trace)
    require_template(runtime.model.tokenizer, config.dataset)
    count_tokens = (lambda text: len(runtime.tokenize([text])[0])) if runtime.model.tokenizer is not None else None
    all_rows = read_rows(config.dataset, count_tokens=count_tokens)
    fixed = generation_schema(has_logprobs=config.sampling.logprobs > 0)
    columns = infer_column_schema([row.columns for row in all_rows], fixed)  # of the whole data set: shards share it
    rows = shard_rows(all_rows, config.shard)
    require_template(runtime.model.tokenizer, config.dataset, rows)
    if is_begun_by_older_version(run_directory(config)):
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

        def store_for(plan: list[PlannedRequest]) -> PartStore:
            return PartStore(
                directory=state.directory, manifest=state.manifest, plan=plan, columns=columns, fixed=fixed
            )

        plan = _known_plan(state) if is_finished(state.directory) else None
        if plan is not None:
            return _outcome(store_for(plan), None, runtime, was_finished=True)
        return _Run(state, runtime, ask(runtime, rows), store_for, config, trace).finish()


def _open(path: Path, manifest: RunManifest, digests: InputDigests, rows: Sequence[Row]) -> RunState:
    """`open_run`; where the run is another's for its input, the error names the first row."""
    try:
        return open_run(path, manifest)
    except RunMismatchError as error:
        changed = first_changed(RunDirectory(path=path).row_digests, digests, rows)
        raise RunMismatchError(f"{error}\n{changed}") if changed is not None else error from error


def _known_plan(state: RunState) -> list[PlannedRequest] | None:
    """None: there is none, and it is to be computed, again if the run has begun. Raises DamagedRunError."""
    if not state.directory.plan.exists():
        return None
    return read_plan(state.directory.plan, may_lack_digest=state.manifest.is_old)


class _Run:
    """One start of a run that has blocks left."""

    def __init__(
        self,
        state: RunState,
        runtime: Runtime,
        asked: Asked,
        store_for: Callable[[list[PlannedRequest]], PartStore],
        config: GenerateConfig,
        trace: Trace | None,
    ):
        self._state, self._runtime, self._asked, self._store_for = state, runtime, asked, store_for
        self._config, self._trace = config, trace
        policy, rates = config.policy, state.directory.rates
        may_learn = policy.kind is PolicyKind.hrm and policy.pin is None and policy.admission is Admission.wave
        self._feedback = Feedback(path=rates, runtime=runtime, requests=asked.requests) if may_learn else None

    def finish(self) -> Outcome:
        """Where the first block shows that another way is faster, the session ends, and the run goes on as one that is
        resumed would."""
        if not self._asked.requests:
            return self._finished(self._opened(()), None)
        if self._feedback is not None:
            self._feedback.restore()
        while True:
            fixed = _known_plan(self._state)
            known = unseat(fixed, self._asked) if fixed is not None else None
            policy = self._feedback.policy if self._feedback is not None else None
            with self._runtime.confirmed_session(self._asked.requests, blocks=known, known=policy) as (plan, session):
                store = self._opened(plan.blocks)
                if self._generate_left(plan, session, store):
                    return self._finished(store, plan)

    def _opened(self, blocks: Sequence[Block]) -> PartStore:
        planned = seat(self._asked, blocks)
        store = self._store_for(planned)
        if not self._state.directory.plan.exists():
            store.require_seats()
        fix_plan(self._state.directory.plan, planned, may_lack_digest=self._state.manifest.is_old)
        return store

    def _generate_left(self, plan: RunPlan, session: Session, store: PartStore) -> bool:
        """False: blocks are left that had better go another way."""
        done, feedback = store.committed(), self._feedback
        if self._state.is_resumed:
            log.info("going on: %d of %d blocks are committed", len(done), len(store.blocks))
        text = schedule_text(plan)
        publish(self._state.directory.schedule, lambda file: write_all(file, text.encode()), exclusive=False)
        remove_committed(self._state.directory, done)
        left = [block for block in plan.blocks if block.index not in done]
        first = plan.blocks[0]
        if feedback is not None and first in left:
            feedback.record(plan)
            self._generate([first], session, store, plan.prediction)
            left.remove(first)
        if feedback is not None and feedback.is_due and left:
            better = feedback.learn(plan, store.passes([first.index]))
            if (better.policy, better.kv) != (plan.policy, plan.kv):
                log.info("policy=hrm: from now on %s", better.searched)
                return False
            plan = better
        self._generate(left, session, store, plan.prediction)
        return True

    def _finished(self, store: PartStore, plan: RunPlan | None) -> Outcome:
        num_blocks = len(plan.blocks) if plan is not None else 0
        if self._asked.rejected and num_blocks not in store.committed():
            store.commit(num_blocks, rejected_rows(self._asked), [])
        outcome = _outcome(store, plan, self._runtime, was_finished=False)
        store.finish()
        return outcome

    def _generate(self, blocks: list[Block], session: Session, store: PartStore, prediction: Prediction | None) -> None:
        is_wave = self._config.policy.admission is Admission.wave
        with tracing(self._state.directory.trace, self._trace) as write_trace:
            around = Surroundings(
                asked=self._asked,
                store=store,
                checkpoint_seconds=self._config.checkpoint_seconds,
                after_pass=write_trace,
                prediction=prediction,
            )
            generate = generate_waves if is_wave else generate_continuously
            generate(session, blocks, around)


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
