"""State shared by all windows of a run in this process."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from runtime.library.api import Runtime

from ..record.parts import PartStore
from ..record.passes import Start
from ..record.plan_file import PlannedRequest, read_plan
from ..record.run_dir import RunState
from ..record.stored_run import RunCopy
from ..tracking.feed import RunFeed
from ..workers.elastic import Worker
from .input import InputWindow
from .tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """`columns`: schema of columns passed through from the input; `fixed_schema`: of all others. `worker`: this process
    as an elastic worker, or None. `copy`: the run's copy in an object store. `checkpoint_seconds`: None for none.
    `feed`: sends the run's curves."""

    task: Task
    runtime: Runtime
    state: RunState
    copy: RunCopy
    worker: Worker | None
    start: Start
    columns: pa.Schema
    fixed_schema: pa.Schema
    windows: Sequence[InputWindow]
    checkpoint_seconds: float | None
    feed: RunFeed

    def open_store(self, planned: list[PlannedRequest]) -> PartStore:
        """The store for the parts of a window with this plan."""
        return PartStore(
            directory=self.state.directory,
            manifest=self.state.manifest,
            plan=planned,
            columns=self.columns,
            fixed_schema=self.fixed_schema,
            is_shared=self.worker is not None,
            is_window=len(self.windows) > 1,
            copy=self.copy,
        )

    def stored_plan(self, window: InputWindow) -> list[PlannedRequest] | None:
        """The plan on disk; None if there is none yet. Raises DamagedRunError."""
        path = window.plan_path(self.state.directory)
        return read_plan(path) if path.exists() else None
