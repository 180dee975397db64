"""Execution of one window of a run (most runs have one): plans it, generates its blocks and commits them. Blocks are
numbered across all windows; those of a new plan begin at 0 and are renumbered."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from runtime.batching.balance import Block
from runtime.config.settings import Admission, PolicyKind
from runtime.engine.records import PassRecord, Phase
from runtime.engine.session import Session, ignore_pass
from runtime.errors import DamagedRunError
from runtime.plan.cost.simulator import SimulatedPass
from runtime.plan.placement.defaults import chunk_tokens
from runtime.plan.placement.memory import SequenceSize
from runtime.plan.planner import RunPlan
from runtime.plan.shape.model import ModelShape
from runtime.plan.timeline import make_timeline, schedule_text

from ..files.publishing import publish, write_all
from ..pictures.trace_file import tracing
from ..record.parts import PartInfo, PartStore
from ..record.plan_file import PlannedRequest, publish_plan, read_backends, read_chunk_tokens
from ..record.run_checkpoint import remove_checkpoints
from .block_loop import OpenBlocks
from .context import RunContext
from .feedback import Feedback
from .input import InputWindow
from .progress import Progress
from .requests import RequestBatch, blocks_from_plan, make_batch, plan_rows, rejected_rows


@dataclass(frozen=True, kw_only=True)
class PredictedSpans:
    """A simulated pass of each phase, which represents all passes of the phase."""

    passes: Mapping[Phase, SimulatedPass]

    @staticmethod
    def from_plan(shape: ModelShape, plan: RunPlan, sizes: Sequence[SequenceSize]) -> "PredictedSpans":
        """The first prefill pass of the first block, and a later decode pass; with continuous admission, a pass from
        the middle of the run. Empty if the plan was made without rates."""
        if plan.rates is None or not plan.blocks:
            return PredictedSpans(passes={})
        timeline = make_timeline(shape, plan, sizes, plan.rates)
        first, last = timeline.passes[0], timeline.passes[-1]
        if timeline.names[0] == "mixed pass":
            return PredictedSpans(passes=dict.fromkeys(Phase, last))
        decode = {Phase.decode: last} if len(timeline.passes) > 1 else {}
        return PredictedSpans(passes={Phase.prefill: first, **decode})


log = logging.getLogger(__name__)


class WindowRun:
    """Execution of a window in this process; its blocks are numbered from `first_block`. `plan`: None if all requests
    are rejected. `weights_seconds`: time to open the session."""

    def __init__(self, context: RunContext, window: InputWindow, first_block: int):
        self._context, self._window, self._first_block = context, window, first_block
        self._plan_path = window.plan_path(context.state.directory)
        self.plan: RunPlan | None = None
        self.weights_seconds: float | None = None

    def generate(self) -> tuple[PartStore, int]:
        """Generates and commits the remaining blocks. Returns the store with all parts, and the first block of the next
        window."""
        context, count, number = self._context, self._window.count, self._window.number + 1
        stored_plan = self._read_plan() if not self._window.is_last else None
        store = context.open_store(stored_plan) if stored_plan is not None else None
        if store is not None and not store.blocks.keys() - (done := store.committed_parts()).keys():
            log.info("window %d of %d is committed", number, count)  # its rows are not read
            self._expect_rows(store, done)
            context.feed.end_window()
            return store, self._next_block(store)
        if count > 1:
            log.info("window %d of %d: reading its rows", number, count)
        batch = make_batch(context.runtime, self._window.read(), context.task.requests)
        batch = replace(batch, read_columns=context.task.make_reader(context.runtime))
        is_planner = context.worker is not None and context.worker.acquire_plan(self._plan_path)
        if (stored_plan := self._read_plan()) is not None:
            batch = batch.with_plan_slots(stored_plan)
        if batch.requests:
            store = self._generate_requests(batch, is_planner=is_planner)
        else:
            store = self._open_store(batch, (), None, is_planner=is_planner)
        rejected_block = self._first_block + (len(self.plan.blocks) if self.plan is not None else 0)
        if batch.rejected:
            done = store.committed_parts()
            if not batch.requests:
                self._expect_rows(store, done)
            if rejected_block not in done:
                store.commit(rejected_block, rejected_rows(batch), [])
                for _ in batch.rejected:
                    context.feed.finish_row("error")
        context.feed.end_window()
        return store, self._next_block(store)

    def _expect_rows(self, store: PartStore, done: Mapping[int, PartInfo]) -> None:
        num_errors = sum(part.rows.get("error", 0) for part in done.values())
        self._context.feed.expect(len(store.plan), sum(part.num_rows for part in done.values()), num_errors)

    def _next_block(self, store: PartStore) -> int:
        # A shard may have no rows, and so no blocks, in the last window.
        return 1 + max(store.blocks, default=self._first_block - 1)

    def _read_plan(self) -> list[PlannedRequest] | None:
        planned = self._context.stored_plan(self._window)
        first_block = min((request.block for request in planned or ()), default=self._first_block)
        if first_block != self._first_block:
            raise DamagedRunError(
                f"{self._plan_path} begins with block {first_block}, but the plans before it end with "
                f"{self._first_block - 1}: restore the original file, or choose another directory with run="
            )
        return planned

    def _generate_requests(self, batch: RequestBatch, *, is_planner: bool) -> PartStore:
        """Generates the remaining requests. If the first block shows that another policy is faster, the session is
        closed and the window resumes with that policy."""
        context, runtime = self._context, self._context.runtime
        feedback, is_wave = self._make_feedback(batch), runtime.config.policy.admission is Admission.wave
        # A resumed run keeps the linear backends of this window, or of the one before: others round differently.
        plans = (self._plan_path, context.state.directory.window_plan(self._window.number - 1))
        while True:
            stored_backends = (read_backends(path, runtime.host) for path in plans)
            stored_plan = self._read_plan()
            policy = feedback.policy if feedback is not None else None
            with runtime.open_with_backoff(
                batch.computed,
                rates=feedback.rates if feedback is not None else None,
                blocks=None
                if stored_plan is None
                else _renumber(blocks_from_plan(stored_plan, batch), -self._first_block),
                known=policy,
                routing=feedback.routing if feedback is not None else None,
                chunk_tokens=read_chunk_tokens(self._plan_path) if policy is None else None,
                backends=next((table for table in stored_backends if table is not None), None),
            ) as (plan, session):
                plan = replace(plan, blocks=_renumber(plan.blocks, self._first_block))
                store = self._open_store(batch, plan.blocks, plan, is_planner=is_planner)
                is_planner = False
                trace = context.state.directory.trace
                with (
                    Progress(batch.computed, plan.blocks, is_wave=is_wave) as progress,
                    tracing(trace, runtime.trace, is_worker=context.worker is not None) as write_trace,
                ):
                    for blocks, group_plan in self._block_groups(plan, session, store, feedback, progress):
                        if _followed(group_plan) != _followed(plan):
                            log.debug("policy: switching to %s", group_plan.searched_policy)
                            break
                        after_pass = self._make_trace_writer(group_plan, batch, write_trace)
                        for group in [[block] for block in blocks] if is_wave else [blocks]:
                            OpenBlocks(
                                session=session,
                                blocks=group,
                                batch=batch,
                                store=store,
                                is_wave=is_wave,
                                checkpoint_seconds=context.checkpoint_seconds,
                                progress=progress,
                                start=context.start,
                                after_pass=after_pass,
                                prediction=group_plan.prediction,
                                feed=context.feed,
                            ).generate()
                    else:
                        self.plan, self.weights_seconds = plan, session.opening_seconds
                        return store

    def _make_trace_writer(
        self, plan: RunPlan, batch: RequestBatch, write: Callable[[SimulatedPass | None], None]
    ) -> Callable[[PassRecord], None]:
        """Returns a callback that adds a finished pass, and the one predicted for it, to the trace."""
        if self._context.runtime.trace is None:
            return ignore_pass
        shape, sizes = self._context.runtime.model.shape, [request.size for request in batch.computed]
        predicted = PredictedSpans.from_plan(shape, plan, sizes)
        return lambda record: write(predicted.passes.get(record.phase))

    def _make_feedback(self, batch: RequestBatch) -> Feedback | None:
        """The feedback of a searched policy in waves; None for other policies, workers and ranks."""
        context, runtime = self._context, self._context.runtime
        policy = runtime.config.policy
        if (
            context.worker is not None
            or runtime.ranks is not None
            or policy.kind is PolicyKind.fixed
            or policy.pin is not None
            or policy.admission is not Admission.wave
        ):
            return None
        feedback = Feedback(path=context.state.directory.rates, runtime=runtime, requests=batch.computed)
        feedback.restore()
        return feedback

    def _open_store(
        self, batch: RequestBatch, blocks: Sequence[Block], plan: RunPlan | None, *, is_planner: bool
    ) -> PartStore:
        """Publishes the plan, or checks it against the existing one; returns the store of its parts."""
        context, planned = self._context, plan_rows(batch, blocks, self._first_block)
        store = context.open_store(planned)
        if not self._plan_path.exists():
            store.require_same_plan()  # before publishing: parts may exist although the plan was lost
        publish_plan(
            self._plan_path,
            planned,
            chunk_tokens=None if plan is None else chunk_tokens(plan.policy),
            backends=None if plan is None or plan.backends is None else (context.runtime.host, plan.backends),
        )
        context.copy.upload_missing(self._plan_path)
        if context.worker is not None and is_planner:
            context.worker.release_plan()
        return store

    def _block_groups(
        self, plan: RunPlan, session: Session, store: PartStore, feedback: Feedback | None, progress: Progress
    ) -> Iterator[tuple[list[Block], RunPlan]]:
        """Yields the remaining blocks in groups that share a plan, with that plan; the first block alone if there is
        `feedback`. The caller commits a group before it takes the next one."""
        done = store.committed_parts()
        progress.expect(plan.prediction, done)
        self._expect_rows(store, done)
        if self._context.state.is_resumed:
            log.info("resuming: %d of %d blocks are committed", len(done), len(store.blocks))
        directory, text = self._context.state.directory, schedule_text(plan).encode()
        publish(directory.schedule, lambda file: write_all(file, text), exclusive=False)
        remove_checkpoints(directory, done)
        remaining, first = [block for block in plan.blocks if block.index not in done], plan.blocks[0]
        if plan.searched_policy is None:
            feedback = None
        if feedback is not None and first in remaining:
            feedback.record(plan)
            yield [first], plan
            remaining.remove(first)
        if feedback is not None and feedback.is_pending and remaining:
            plan = feedback.revise_plan(plan, store.read_passes([first.index]), session.routing)
            progress.expect(plan.prediction, {*done, first.index})
        if self._context.worker is None:
            yield remaining, plan
            return
        for block, done_by_all in self._context.worker.lease_blocks(remaining):
            progress.expect(plan.prediction, done_by_all)
            in_window = done_by_all & store.blocks.keys()  # workers may have ended blocks of other windows
            self._context.feed.expect(len(store.plan), sum(len(store.blocks[index]) for index in in_window))
            yield [block], plan


def _followed(plan: RunPlan) -> tuple[object, ...]:
    """What a session follows of a plan, apart from its blocks: another one needs another session."""
    return plan.policy, plan.kv, plan.placement.paged


def _renumber(blocks: Sequence[Block], offset: int) -> tuple[Block, ...]:
    return tuple(replace(block, index=block.index + offset) for block in blocks) if offset else tuple(blocks)
