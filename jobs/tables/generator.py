"""One adapter for engines of data: it is called with a table, and each engine has a thin face of its own in front of
that. Engines make, copy and drop their functions as they like: the model that this process holds open for tables stays.
A table that is kept is a run, whose directory is named after what it asks, so that one that is given again goes on."""

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

LARGE_TABLE_ROWS = 8_192  # that a block is looked for in
MIN_ROWS_RATIO, MIN_SPEEDUP = 2.0, 1.5  # a block's rows by those that there are; its rows a second by theirs


@dataclass(frozen=True, kw_only=True)
class BlockUnderfill:
    """Rows that are generated together, how many like them one block takes, and predicted rows a second of both."""

    num_rows: int
    block_rows: int
    rate: float
    block_rate: float

    def __str__(self) -> str:
        at_least = "at least " if self.block_rows >= LARGE_TABLE_ROWS else ""
        return (
            f"{self.num_rows:,} rows are generated together, and one block takes {at_least}{self.block_rows:,} of this "
            f"size: {self.block_rate:,.1f} rows/s are predicted with that many, {self.rate:,.1f} with these; hand over "
            "more rows at a time"
        )


def find_underfill(planner: Planner, sizes: Sequence[SequenceSize]) -> BlockUnderfill | None:
    """What `sizes` lack of a block; None where they fill one, or more of them would not be clearly faster. Rates are
    measured where none are kept. Raises BudgetError."""
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


_runtime_lock = RLock()  # an engine may call from several threads, and a model is asked by one


@dataclass(kw_only=True)
class OpenRuntime:
    """An open runtime, the settings and the process that it is of, and whether it was looked how full its blocks
    are."""

    config: RuntimeConfig
    process: int
    runtime: Runtime
    is_fill_checked: bool = False

    def warn_if_underfilled(self, prompts: Sequence[Prompt]) -> None:
        """Warns, once, where these rows are far fewer than a block takes, and that costs speed."""
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
    """The open runtime of these settings; for as long as the block lasts it is nobody else's. One of other settings is
    closed first, and one that a parent process has left behind is not touched. Raises what `Runtime` raises."""
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
    """The results of a table's rows, in their order, from a run below `output_root`: what of it is committed is read,
    the rest is generated. Several processes that are given the same table share the run's blocks out, but for
    continuous admission, which has none. Raises the errors of runtime.errors."""
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
    """What a row of a table asks, as a row of a data set."""
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
    """What is asked of datatrove's documents."""

    text: str
    id: str
    metadata: dict


D = TypeVar("D", bound=Document)


class TableGenerator:
    """Generates behind the prompts of a table: called with one, it gives it back with the columns of results, as
    `Runtime.generate_table` does, which says what `prompt`, `id`, `overrides` and `prefix` are. Each table is planned
    for itself: give it blocks of thousands of rows rather than batches of 32. It warns where a table is far from
    filling a block.

    Nothing is read before the first table, so that it can be sent to other processes. What is read then stays open in
    the process, for all tables and generators with these settings, until `close`, or another model takes its place.
    Settings are those of `Runtime`.

    With an `output_root`, each table is a run below it: a table that is given again, to whichever process, goes on
    where it was, and a finished one is read. Without one, nothing is kept. `window`: rows that are generated together
    where they come in an iterator.

    Raises ConfigError, also where tokens are drawn and neither `id` nor a `seed` of each row says how: a row's place in
    a table that an engine has cut is nobody's.
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
        """The columns that a table with the `given` ones comes back with. Raises ConfigError."""
        return self._columns.output_schema(given, self._config.sampling)

    @property
    def struct_type(self) -> pa.StructType:
        """The type of `structs`."""
        return pa.struct(
            [each.with_name(name) for each, name in zip(self._result_fields, self._result_names, strict=True)]
        )

    def __call__(self, table: pa.Table) -> pa.Table:
        """`table` with its results; the face for Ray Data's `map_batches`, with `batch_format="pyarrow"`."""
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
        """The same of record batches, `window` rows and more together; the face for Spark's `mapInArrow`."""
        held: list[pa.RecordBatch] = []
        for batch in batches:
            held.append(batch)
            if sum(map(len, held)) >= self._window:
                yield from self(pa.Table.from_batches(held)).to_batches()
                held = []
        if held:
            yield from self(pa.Table.from_batches(held)).to_batches()

    def structs(self, table: pa.Table) -> pa.StructArray:
        """The results alone, a struct for each row; the face for engines that take one column back, as Daft does."""
        found = self(table).select(self._result_names).combine_chunks()
        arrays = [column.combine_chunks() for column in found.columns]
        return pa.StructArray.from_arrays(arrays, fields=list(self.struct_type))

    def documents(self, data: Iterable[D] | None, rank: int = 0, world_size: int = 1) -> Iterator[D]:
        """Documents with their results in `metadata`, `window` of them together; the face for datatrove, a step of its
        pipelines. Columns are a document's `text` and `id`, and what is in its `metadata`."""
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
        """Frees the weights that this process holds for tables; the next one reads them again."""
        close()
