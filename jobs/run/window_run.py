"""One window of a run, which for most is all of it: its plan fixed, its blocks generated and committed.

Blocks are numbered through all windows; a plan's own, before it is fixed, begin at 0.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from runtime.batching.balance import Block
from runtime.config.profiles import BackendTable
from runtime.config.settings import Admission, PolicyKind
from runtime.engine.records import PassRecord
from runtime.engine.session import Session, ignore
from runtime.errors import DamagedRunError
from runtime.library.api import Runtime
from runtime.plan.placement.defaults import chunk_tokens
from runtime.plan.planner import RunPlan
from runtime.plan.timeline import schedule_text
from runtime.trace import Span

from ..config.settings import GenerateConfig
from ..files.publishing import publish, write_all
from ..pictures.trace_file import tracing
from ..record.parts import PartInfo, PartStore
from ..record.passes import PassRow, Start, without_stages
from ..record.plan_file import PlannedRequest, backends_of, chunk_tokens_of, fix_plan, read_plan
from ..record.run_dir import RunState
from ..record.running import remove_committed
from ..workers.elastic import Worker
from .feedback import Feedback
from .open_run import Surroundings, generate_blocks
from .predicted_spans import PredictedSpans
from .progress import Progress
from .requests import Asked, MakeRequests, Read, ask, rejected_rows, seat, unseat
from .run_input import Window

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Around:
    """What the windows of one start have in common. `store_of` makes the store of a window's parts from its plan."""

    state: RunState
    runtime: Runtime
    config: GenerateConfig
    start: Start
    worker: Worker | None
    requests: MakeRequests
    read: Read
    store_of: Callable[[list[PlannedRequest]], PartStore]

    def known_plan(self, window: Window) -> list[PlannedRequest] | None:
        """The plan that is fixed; None where there is none, and it is to be computed. Raises DamagedRunError."""
        path = window.plan_in(self.state.directory)
        return read_plan(path) if path.exists() else None

    def store_of_known(self, window: Window) -> PartStore | None:
        """The store of a window's parts, where its plan is fixed."""
        planned = self.known_plan(window)
        return self.store_of(planned) if planned is not None else None


@dataclass(frozen=True, kw_only=True)
class WindowOutcome:
    """The parts of a window, all of which are there. `plan` is None where nothing was computed, or was to be;
    `next_block` is the first one of the next window."""

    store: PartStore
    next_block: int = 0
    plan: RunPlan | None = None
    weights_seconds: float | None = None


@dataclass(kw_only=True)
class Earlier:
    """What the windows have come to that are done: a few bytes for each of their rows, as a pass serves many."""

    parts: dict[int, PartInfo] = field(default_factory=dict)
    passes: list[PassRow] = field(default_factory=list)

    def add(self, store: PartStore) -> None:
        self.parts |= store.committed()
        self.passes += map(without_stages, store.passes())


class WindowRun:
    """One start of a window, whose blocks are numbered from `first_block` on."""

    def __init__(self, around: Around, window: Window, first_block: int):
        self._around, self._window, self._first_block = around, window, first_block
        self._state, self._runtime, self._config = around.state, around.runtime, around.config
        self._worker, self._plan_path = around.worker, window.plan_in(around.state.directory)

    def finish(self) -> WindowOutcome:
        """Generates what is left and commits it. Where the first block shows that another way is faster, the session
        ends, and the window goes on as one that is resumed would."""
        done = self._outcome_if_done()
        if done is not None:
            return done
        asked = ask(self._runtime, self._window.read(), self._around.requests)
        asked = replace(asked, read=self._around.read)
        is_planner = self._worker is not None and self._worker.may_plan(self._plan_path)
        if (begun := self._known_plan()) is not None:
            asked = asked.seated(begun)
        if not asked.requests:
            store = self._seated(asked, (), None)
            self._has_planned(is_planner=is_planner)
            return self._finished(asked, store, None)
        feedback = self._feedback(asked)
        while True:
            fixed = self._known_plan()
            with self._runtime.confirmed_session(
                asked.computed,
                rates=feedback.rates if feedback is not None else None,
                blocks=_shifted(unseat(fixed, asked), -self._first_block) if fixed is not None else None,
                known=(known := feedback.policy if feedback is not None else None),
                chunk_tokens=chunk_tokens_of(self._plan_path) if known is None else None,
                backends=self._known_backends(),
            ) as (plan, session):
                plan = replace(plan, blocks=_shifted(plan.blocks, self._first_block))
                store = self._seated(asked, plan.blocks, plan)
                self._has_planned(is_planner=is_planner)
                is_planner = False
                if self._is_generated(session, plan, store, asked, feedback):
                    return self._finished(asked, store, plan, session.opening_seconds)

    def _has_planned(self, *, is_planner: bool) -> None:
        if self._worker is not None and is_planner:
            self._worker.has_planned()

    def _outcome_if_done(self) -> WindowOutcome | None:
        """What a window came to that is committed and not the last; no row of it is read. Raises DamagedRunError."""
        count, number = self._window.count, self._window.number + 1
        planned = self._known_plan() if not self._window.is_last else None
        store = self._around.store_of(planned) if planned is not None else None
        if store is not None and not store.blocks.keys() - store.committed().keys():
            log.info("window %d of %d is committed", number, count)
            return WindowOutcome(store=store, next_block=self._next_block(store))
        if count > 1:
            log.info("window %d of %d: reading its rows", number, count)
        return None

    def _known_plan(self) -> list[PlannedRequest] | None:
        planned = self._around.known_plan(self._window)
        begins = min((each.block for each in planned or ()), default=self._first_block)
        if begins != self._first_block:
            raise DamagedRunError(
                f"{self._plan_path} begins with block {begins}, where the plans before it end with "
                f"{self._first_block - 1}: put back the one that was there, or choose another directory with run="
            )
        return planned

    def _known_backends(self) -> BackendTable | None:
        """The linear backends that the run was begun with on this host: those of this window, or of the one before."""
        before = self._state.directory.window_plan(self._window.number - 1)
        found = (backends_of(path, self._runtime.host) for path in (self._plan_path, before))
        return next((table for table in found if table is not None), None)

    def _is_generated(
        self, session: Session, plan: RunPlan, store: PartStore, asked: Asked, feedback: Feedback | None
    ) -> bool:
        """Generates what is left as `plan` says. False where the first block has shown that another way is faster."""
        is_wave = self._config.policy.admission is Admission.wave
        with (
            Progress(asked.computed, plan.blocks, is_wave=is_wave) as progress,
            tracing(
                self._state.directory.trace, self._runtime.trace, is_worker=self._worker is not None
            ) as write_trace,
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
                    start=self._around.start,
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

    def _seated(self, asked: Asked, blocks: Sequence[Block], plan: RunPlan | None) -> PartStore:
        """The store of the plan's parts; writes the plan down, or checks it against what is written."""
        planned = seat(asked, blocks, self._first_block)
        store = self._around.store_of(planned)
        if not self._plan_path.exists():
            store.require_seats()
        fix_plan(
            self._plan_path,
            planned,
            chunk_tokens=None if plan is None else chunk_tokens(plan.policy),
            backends=None if plan is None or plan.backends is None else (self._runtime.host, plan.backends),
        )
        store.copy.keep(self._plan_path)
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
    ) -> WindowOutcome:
        rejects = self._first_block + (len(plan.blocks) if plan is not None else 0)
        if asked.rejected and rejects not in store.committed():
            store.commit(rejects, rejected_rows(asked), [])
        next_block = self._next_block(store)
        return WindowOutcome(store=store, next_block=next_block, plan=plan, weights_seconds=weights_seconds)

    def _next_block(self, store: PartStore) -> int:
        """A shard may have no row in its last window, and that no block."""
        return 1 + max(store.blocks, default=self._first_block - 1)


def _shifted(blocks: Sequence[Block], by: int) -> tuple[Block, ...]:
    return tuple(replace(block, index=block.index + by) for block in blocks) if by else tuple(blocks)
