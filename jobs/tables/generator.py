"""One adapter for engines of data: it is called with a table, and each engine has a thin face of its own in front of
that."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Protocol, TypeVar, Unpack

import pyarrow as pa

from runtime.config.settings import RuntimeConfig
from runtime.errors import require
from runtime.library.columns import result_schema
from runtime.library.keywords import Settings, changed
from runtime.library.prompt import Prompt
from runtime.library.tables import TableColumns

from .opened import close, opened
from .runs import kept_results

T = TypeVar("T")
WINDOW = 16_384  # rows


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
        self._config = changed(config, settings)
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
        return self._columns.schema(given, self._config.sampling)

    @property
    def struct_type(self) -> pa.StructType:
        """The type of `structs`."""
        return pa.struct([each.with_name(name) for each, name in zip(self._results, self._added, strict=True)])

    def __call__(self, table: pa.Table) -> pa.Table:
        """`table` with its results; the face for Ray Data's `map_batches`, with `batch_format="pyarrow"`."""
        schema = self.schema(table.schema)
        asked = self._columns.prompts(table)
        with opened(self._config) as found:
            found.warn_of_few([each for each in asked if isinstance(each, Prompt)])
            if self._output_root is None:
                columns = self._columns
                answered = found.runtime.generate_table(
                    table, prompt=columns.prompt, id=columns.id, overrides=columns.overrides, prefix=columns.prefix
                )
                return answered.select(schema.names)
            results = kept_results(asked, self._config, found.runtime, self._output_root)
        return self._columns.answered(table, results, self._config.sampling)

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
        found = self(table).select(self._added).combine_chunks()
        arrays = [column.combine_chunks() for column in found.columns]
        return pa.StructArray.from_arrays(arrays, fields=list(self.struct_type))

    def documents(self, data: Iterable[D] | None, rank: int = 0, world_size: int = 1) -> Iterator[D]:
        """Documents with their results in `metadata`, `window` of them together; the face for datatrove, a step of its
        pipelines. Columns are a document's `text` and `id`, and what is in its `metadata`."""
        waiting = iter(data or ())
        while some := list(islice(waiting, self._window)):
            table = pa.Table.from_pylist([self._row(document) for document in some])
            for document, results in zip(some, self.structs(table).to_pylist(), strict=True):
                document.metadata.update(results)
                yield document

    def _row(self, document: Document) -> dict[str, object]:
        known: dict[str, object] = {**document.metadata, "text": document.text, "id": document.id}
        return {name: known.get(name) for name in self._columns.read}

    @property
    def _results(self) -> list[pa.Field]:
        return list(result_schema(self._config.sampling))

    @property
    def _added(self) -> list[str]:
        return [f"{self._columns.prefix}{each.name}" for each in self._results]

    def close(self) -> None:
        """Frees the weights that this process holds for tables; the next one reads them again."""
        close()
