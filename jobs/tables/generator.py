"""Table adapter with a thin method per data engine. Engines create, copy and drop their functions freely, so a process
keeps one open runtime for all of them. With an output root, a table is a run named after its content, and the same
table resumes it."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Protocol, TypeVar, Unpack

import pyarrow as pa
import pyarrow.parquet as pq

from runtime.config.settings import Admission, RuntimeConfig
from runtime.errors import require
from runtime.library.api import Runtime
from runtime.library.columns import result_schema
from runtime.library.generation import make_requests, require_unique_ids
from runtime.library.keywords import Settings, apply_settings
from runtime.library.prompt import Prompt
from runtime.library.tables import PromptOrRejected, TableColumns
from runtime.plan.placement.memory import SequenceSize
from runtime.plan.planner import plan_run
from runtime.planning.planner import Planner
from runtime.sequences.sequence import Request

from ..config.settings import GenerateConfig, Workers
from ..datasets import Row, input_digest
from ..record.run_dir import RunDirectory
from ..run.run import run_task
from ..run.tasks.generate import generation_task

LARGE_TABLE_ROWS = 8_192  # enough rows to find the block size
MIN_ROWS_RATIO, MIN_SPEEDUP = 2.0, 1.5  # thresholds of block over table: rows, and rows/s


@dataclass(frozen=True, kw_only=True)
class BlockUnderfill:
    """Number of rows generated together, number that fills a block, and predicted rows/s of both."""

    num_rows: int
    block_rows: int
    rate: float
    block_rate: float

    def __str__(self) -> str:
        at_least = "at least " if self.block_rows >= LARGE_TABLE_ROWS else ""
        return (
            f"rows per table: {self.num_rows:,}; a block has room for {at_least}{self.block_rows:,}. Predicted: "
            f"{self.block_rate:,.1f} rows/s with a full block, {self.rate:,.1f} with these. Pass larger tables"
        )


def find_underfill(planner: Planner, sizes: Sequence[SequenceSize]) -> BlockUnderfill | None:
    """Compares a table of `sizes` with one that fills a block; None if a larger table would not be clearly faster.
    Measures rates if none are cached. Raises BudgetError."""
    if not sizes:
        return None
    shape, config, budgets = planner.model.shape, planner.config, planner.budgets
    rates = planner.measure(plan_run(shape, config, budgets, sizes), sizes)
    large_table = [sizes[i % len(sizes)] for i in range(LARGE_TABLE_ROWS)]
    actual, full = (plan_run(shape, config, budgets, table, rates=rates) for table in (sizes, large_table))
    assert actual.prediction is not None, "rates are given"
    assert full.prediction is not None, "rates are given"
    underfill = BlockUnderfill(
        num_rows=len(sizes),
        block_rows=full.block_size,
        rate=len(sizes) / actual.prediction.seconds,
        block_rate=len(large_table) / full.prediction.seconds,
    )
    is_small = underfill.block_rows >= MIN_ROWS_RATIO * underfill.num_rows
    is_slow = underfill.block_rate >= MIN_SPEEDUP * underfill.rate
    return underfill if is_small and is_slow else None


log = logging.getLogger(__name__)
WINDOW = 16_384  # rows


_runtime_lock = RLock()  # engines may call from several threads; a runtime serves one at a time


@dataclass(kw_only=True)
class OpenRuntime:
    """An open runtime. `process`: pid that opened it. `is_fill_checked`: `warn_if_underfilled` has run."""

    config: RuntimeConfig
    process: int
    runtime: Runtime
    is_fill_checked: bool = False

    def warn_if_underfilled(self, prompts: Sequence[Prompt]) -> None:
        """Warns once if the rows are too few to fill a block and that costs speed."""
        if self.is_fill_checked or not prompts:
            return
        self.is_fill_checked = True
        if len(prompts) >= LARGE_TABLE_ROWS:
            return
        requests = make_requests(self.runtime.model, self.runtime.config.sampling, list(enumerate(prompts)))
        sizes = [request.size for request in requests if isinstance(request, Request)]
        if (underfill := find_underfill(self.runtime.planner, sizes)) is not None:
            log.warning("%s", underfill)


_open_runtime: OpenRuntime | None = None


@contextmanager
def lock_runtime(config: RuntimeConfig) -> Iterator[OpenRuntime]:
    """Context manager: locks and returns the open runtime of these settings. Closes one with other settings first, but
    not one inherited by fork. Raises the errors of `Runtime`."""
    global _open_runtime
    with _runtime_lock:
        if _open_runtime is None or (_open_runtime.process, _open_runtime.config) != (os.getpid(), config):
            close()
            _open_runtime = OpenRuntime(config=config, process=os.getpid(), runtime=Runtime(config).open())
        yield _open_runtime


def close() -> None:
    """Closes the runtime of this process; the next table opens it again."""
    global _open_runtime
    with _runtime_lock:
        if _open_runtime is not None and _open_runtime.process == os.getpid():  # after a fork it is the parent's
            _open_runtime.runtime.close()
        _open_runtime = None


def generate_in_run(
    prompts: Sequence[PromptOrRejected], config: RuntimeConfig, runtime: Runtime, output_root: str
) -> pa.Table:
    """Results of a table in row order, from a run below `output_root`, which is resumed. Processes with the same table
    share its blocks, except with continuous admission. Raises the errors of runtime.errors."""
    require_unique_ids([(i, prompt) for i, prompt in enumerate(prompts) if isinstance(prompt, Prompt)], {})
    rows = [_make_row(i, prompt) for i, prompt in enumerate(prompts)]
    groups = {group.name: getattr(config, group.name) for group in fields(RuntimeConfig)}
    is_wave = config.policy.admission is Admission.wave
    settings = replace(
        GenerateConfig(), **groups, output_root=output_root, workers=Workers.elastic if is_wave else Workers.one
    )
    directory = Path(output_root) / f"table-{input_digest(rows)[:16]}"
    task = replace(generation_task(settings), directory=directory, rows=lambda *_: rows)
    run_task(task, settings, lambda: False, runtime=runtime)  # engines stop it by ending the process
    names = result_schema(config.sampling).names
    parts = pq.read_table(RunDirectory(path=directory).generations, columns=["row_index", *names])
    return parts.sort_by("row_index").select(names)


def _make_row(index: int, prompt: PromptOrRejected) -> Row:
    """Converts a table's prompt to a dataset row."""
    row = Row(index=index, id=prompt.id or str(index), prompt="", messages=None, columns={}, error=None)
    if not isinstance(prompt, Prompt):
        return replace(row, error=prompt.error)
    return replace(
        row,
        prompt=prompt.text or "",
        messages=None if prompt.messages is None else [dict(message) for message in prompt.messages],
        prompt_ids=None if prompt.token_ids is None else tuple(prompt.token_ids),
        overrides=prompt.overrides,
    )


class Document(Protocol):
    """Protocol of datatrove documents."""

    text: str
    id: str
    metadata: dict


D = TypeVar("D", bound=Document)


class TableGenerator:
    """Appends generated columns to tables of prompts. `prompt`, `id`, `overrides` and `prefix` are those of
    `Runtime.generate_table`, settings those of `Runtime`. Each table is planned on its own: pass thousands of rows
    rather than batches of 32. Warns if a table is far from filling a block.

    Picklable: nothing is loaded before the first table. The model then stays open in the process, for all generators
    with these settings, until `close` or until another model replaces it.

    With `output_root`, each table is a run: the same table resumes it in any process, and a finished one is only read.
    Without it, nothing is stored. `window`: rows generated together when they come from an iterator.

    Raises ConfigError, also if tokens are sampled without `id` or a `seed` per row: row numbers of a split table are
    not stable.
    """

    def __init__(
        self,
        config: RuntimeConfig | None = None,
        *,
        prompt: str = "prompt",
        id: str | None = None,
        overrides: Mapping[str, str] | None = None,
        prefix: str = "",
        output_root: str | None = None,
        window: int = WINDOW,
        **settings: Unpack[Settings],
    ):
        self._config = apply_settings(config, settings)
        self._columns = TableColumns(prompt=prompt, id=id, overrides=dict(overrides or {}), prefix=prefix)
        self._output_root, self._window = output_root, window
        require(window >= 1, f"window must be 1 or more rows, got {window}")
        require(output_root != "", "output_root is empty: name a directory, or omit it to store nothing")
        is_greedy = self._config.sampling.is_greedy and "temperature" not in self._columns.overrides
        require(
            is_greedy or id is not None or "seed" in self._columns.overrides,
            "sampling needs stable ids or seeds: name a column of ids, id='...', or of seeds, "
            "overrides={'seed': '...'}",
        )

    def schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Output columns for a table with these columns. Raises ConfigError."""
        return self._columns.output_schema(input_schema, self._config.sampling)

    @property
    def struct_type(self) -> pa.StructType:
        """The element type of `structs`."""
        named = zip(self._result_fields, self._result_names, strict=True)
        return pa.struct([field.with_name(name) for field, name in named])

    def __call__(self, table: pa.Table) -> pa.Table:
        """Returns `table` with its results. For Ray Data's `map_batches` with `batch_format="pyarrow"`."""
        schema = self.schema(table.schema)
        prompts = self._columns.read_prompts(table)
        with lock_runtime(self._config) as state:
            state.warn_if_underfilled([prompt for prompt in prompts if isinstance(prompt, Prompt)])
            if self._output_root is None:
                columns = self._columns
                output = state.runtime.generate_table(
                    table, prompt=columns.prompt, id=columns.id, overrides=columns.overrides, prefix=columns.prefix
                )
                return output.select(schema.names)
            results = generate_in_run(prompts, self._config, state.runtime, self._output_root)
        return self._columns.append_results(table, results, self._config.sampling)

    def batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Generates for record batches, `window` rows or more together. For Spark's `mapInArrow`."""
        pending: list[pa.RecordBatch] = []
        for batch in batches:
            pending.append(batch)
            if sum(map(len, pending)) >= self._window:
                yield from self(pa.Table.from_batches(pending)).to_batches()
                pending = []
        if pending:
            yield from self(pa.Table.from_batches(pending)).to_batches()

    def structs(self, table: pa.Table) -> pa.StructArray:
        """Returns only the results, as one struct per row. For engines that take one column, such as Daft."""
        results = self(table).select(self._result_names)
        arrays = [column.combine_chunks() for column in results.combine_chunks().columns]
        return pa.StructArray.from_arrays(arrays, fields=list(self.struct_type))

    def documents(self, data: Iterable[D] | None, rank: int = 0, world_size: int = 1) -> Iterator[D]:
        """Adds results to the `metadata` of documents, `window` at a time. For datatrove, as a pipeline step. Columns
        are `text`, `id` and the keys of `metadata`."""
        remaining = iter(data or ())
        while window := list(islice(remaining, self._window)):
            rows = ({**document.metadata, "text": document.text, "id": document.id} for document in window)
            names = self._columns.input_columns
            table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
            for document, results in zip(window, self.structs(table).to_pylist(), strict=True):
                document.metadata.update(results)
                yield document

    @property
    def _result_fields(self) -> list[pa.Field]:
        return list(result_schema(self._config.sampling))

    @property
    def _result_names(self) -> list[str]:
        return [f"{self._columns.prefix}{field.name}" for field in self._result_fields]

    def close(self) -> None:
        """Closes the runtime of this process; the next table opens it again."""
        close()
