"""One table adapter with a thin method per data engine. Engines create, copy and drop their functions freely, so the
process keeps one open runtime for all of them. With an output root, a table is a run named after its content; the same
table resumes it.
"""

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
    """Rows generated together, rows that fill a block, and predicted rows/s of both."""

    num_rows: int
    block_rows: int
    rate: float
    block_rate: float

    def __str__(self) -> str:
        at_least = "at least " if self.block_rows >= LARGE_TABLE_ROWS else ""
        return (
            f"rows handed over at a time: {self.num_rows:,}; one block has room for {at_least}{self.block_rows:,} of "
            f"this size. Predicted: {self.block_rate:,.1f} rows/s with a full block, {self.rate:,.1f} with these. Hand "
            "over more rows at a time"
        )


def find_underfill(planner: Planner, sizes: Sequence[SequenceSize]) -> BlockUnderfill | None:
    """Returns how far `sizes` are from filling a block; None if they fill one or more rows would not be clearly faster.
    Measures rates if none are cached. Raises BudgetError."""
    if not sizes:
        return None
    shape, config, budgets = planner.model.shape, planner.config, planner.budgets
    rates = planner.measure(plan_run(shape, config, budgets, sizes), sizes)
    large_table = [sizes[place % len(sizes)] for place in range(LARGE_TABLE_ROWS)]
    actual, full = (plan_run(shape, config, budgets, each, rates=rates) for each in (sizes, large_table))
    assert actual.prediction is not None, "rates are given"
    assert full.prediction is not None, "rates are given"
    underfill = BlockUnderfill(
        num_rows=len(sizes),
        block_rows=full.block_size,
        rate=len(sizes) / actual.prediction.seconds,
        block_rate=len(large_table) / full.prediction.seconds,
    )
    is_far = (
        underfill.block_rows >= MIN_ROWS_RATIO * underfill.num_rows
        and underfill.block_rate >= MIN_SPEEDUP * underfill.rate
    )
    return underfill if is_far else None


log = logging.getLogger(__name__)
WINDOW = 16_384  # rows


_runtime_lock = RLock()  # engines may call from several threads; a runtime serves one at a time


@dataclass(kw_only=True)
class OpenRuntime:
    """An open runtime with its settings and process id. `is_fill_checked`: the block fill was checked once."""

    config: RuntimeConfig
    process: int
    runtime: Runtime
    is_fill_checked: bool = False

    def warn_if_underfilled(self, prompts: Sequence[Prompt]) -> None:
        """Warns once if the rows are far too few to fill a block and that costs speed."""
        if self.is_fill_checked or not prompts:
            return
        self.is_fill_checked = True
        if len(prompts) >= LARGE_TABLE_ROWS:
            return
        requests = make_requests(self.runtime.model, self.runtime.config.sampling, list(enumerate(prompts)))
        found = find_underfill(self.runtime.planner, [each.size for each in requests if isinstance(each, Request)])
        if found is not None:
            log.warning("%s", found)


_open_runtime: OpenRuntime | None = None


@contextmanager
def lock_runtime(config: RuntimeConfig) -> Iterator[OpenRuntime]:
    """Context manager: locks and returns the open runtime of these settings. Closes one with other settings first;
    leaves one inherited from a parent process alone. Raises the errors of `Runtime`."""
    global _open_runtime
    with _runtime_lock:
        if _open_runtime is None or (_open_runtime.process, _open_runtime.config) != (os.getpid(), config):
            close()
            _open_runtime = OpenRuntime(config=config, process=os.getpid(), runtime=Runtime(config).open())
        yield _open_runtime


def close() -> None:
    """Frees the weights that this process holds for tables; the next table reads them again."""
    global _open_runtime
    with _runtime_lock:
        if _open_runtime is not None and _open_runtime.process == os.getpid():
            _open_runtime.runtime.close()
        _open_runtime = None


def generate_in_run(
    prompts: Sequence[PromptOrRejected], config: RuntimeConfig, runtime: Runtime, output_root: str
) -> pa.Table:
    """Returns a table's results in row order, from a run below `output_root`: reads committed rows and generates the
    rest. Processes with the same table share its blocks, except under continuous admission. Raises the errors of
    runtime.errors."""
    require_unique_ids([(place, each) for place, each in enumerate(prompts) if isinstance(each, Prompt)], {})
    rows = [_make_row(place, each) for place, each in enumerate(prompts)]
    groups = {group.name: getattr(config, group.name) for group in fields(RuntimeConfig)}
    is_wave = config.policy.admission is Admission.wave
    settings = replace(
        GenerateConfig(), **groups, output_root=output_root, workers=Workers.elastic if is_wave else Workers.one
    )
    directory = Path(output_root) / f"table-{input_digest(rows)[:16]}"
    task = replace(generation_task(settings), directory=directory, rows=lambda *_: rows)
    run_task(task, settings, lambda: False, runtime=runtime)  # an engine that wants it to stop ends the process
    names = result_schema(config.sampling).names
    parts = pq.read_table(RunDirectory(path=directory).generations, columns=["row_index", *names])
    return parts.sort_by("row_index").select(names)


def _make_row(place: int, prompt: PromptOrRejected) -> Row:
    """Converts a table's prompt to a dataset row."""
    row = Row(index=place, id=prompt.id or str(place), prompt="", messages=None, columns={}, error=None)
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
    """Appends generated columns to tables of prompts, as `Runtime.generate_table` does, which documents `prompt`, `id`,
    `overrides` and `prefix`. Each table is planned on its own: pass thousands of rows rather than batches of 32. Warns
    if a table is far from filling a block.

    Picklable: nothing is loaded before the first table. The model then stays open in the process, for all generators
    with these settings, until `close` or until another model replaces it. Settings are those of `Runtime`.

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
        require(output_root != "", "output_root is empty: name a directory, or leave it out to keep nothing")
        is_greedy = self._config.sampling.is_greedy and "temperature" not in self._columns.overrides
        require(
            is_greedy or id is not None or "seed" in self._columns.overrides,
            "draws follow from a row's id, and tokens are drawn: name a column of ids, id='...', or of seeds, "
            "overrides={'seed': '...'}",
        )

    def schema(self, given: pa.Schema) -> pa.Schema:
        """The output columns for a table with the `given` columns. Raises ConfigError."""
        return self._columns.output_schema(given, self._config.sampling)

    @property
    def struct_type(self) -> pa.StructType:
        """The element type of `structs`."""
        return pa.struct(
            [each.with_name(name) for each, name in zip(self._result_fields, self._result_names, strict=True)]
        )

    def __call__(self, table: pa.Table) -> pa.Table:
        """Returns `table` with its results. For Ray Data's `map_batches` with `batch_format="pyarrow"`."""
        schema = self.schema(table.schema)
        asked = self._columns.read_prompts(table)
        with lock_runtime(self._config) as found:
            found.warn_if_underfilled([each for each in asked if isinstance(each, Prompt)])
            if self._output_root is None:
                columns = self._columns
                answered = found.runtime.generate_table(
                    table, prompt=columns.prompt, id=columns.id, overrides=columns.overrides, prefix=columns.prefix
                )
                return answered.select(schema.names)
            results = generate_in_run(asked, self._config, found.runtime, self._output_root)
        return self._columns.append_results(table, results, self._config.sampling)

    def batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Generates for record batches, `window` rows or more together. For Spark's `mapInArrow`."""
        held: list[pa.RecordBatch] = []
        for batch in batches:
            held.append(batch)
            if sum(map(len, held)) >= self._window:
                yield from self(pa.Table.from_batches(held)).to_batches()
                held = []
        if held:
            yield from self(pa.Table.from_batches(held)).to_batches()

    def structs(self, table: pa.Table) -> pa.StructArray:
        """Returns only the results, as one struct per row. For engines that take one column, such as Daft."""
        found = self(table).select(self._result_names).combine_chunks()
        arrays = [column.combine_chunks() for column in found.columns]
        return pa.StructArray.from_arrays(arrays, fields=list(self.struct_type))

    def documents(self, data: Iterable[D] | None, rank: int = 0, world_size: int = 1) -> Iterator[D]:
        """Adds results to the `metadata` of documents, `window` at a time. For datatrove, as a pipeline step. Columns
        are `text`, `id` and the keys of `metadata`."""
        waiting = iter(data or ())
        while some := list(islice(waiting, self._window)):
            known = ({**each.metadata, "text": each.text, "id": each.id} for each in some)
            table = pa.Table.from_pylist(
                [{name: row.get(name) for name in self._columns.input_columns} for row in known]
            )
            for document, results in zip(some, self.structs(table).to_pylist(), strict=True):
                document.metadata.update(results)
                yield document

    @property
    def _result_fields(self) -> list[pa.Field]:
        return list(result_schema(self._config.sampling))

    @property
    def _result_names(self) -> list[str]:
        return [f"{self._columns.prefix}{each.name}" for each in self._result_fields]

    def close(self) -> None:
        """Frees the weights that this process holds for tables; the next table reads them again."""
        close()
