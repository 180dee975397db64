"""A table as a run: its directory is named after what the table asks, so that one that is given again goes on."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from runtime.config.settings import Admission, RuntimeConfig
from runtime.library.api import Runtime
from runtime.library.columns import result_schema
from runtime.library.prompt import Prompt, require_unique_ids
from runtime.library.tables import Asked

from ..config.settings import GenerateConfig, Workers
from ..datasets import Row, input_digest
from ..record.run_dir import RunDirectory
from ..run.generation import generation, perform


def never() -> bool:
    """Whether a run is to stop: an engine that wants it to ends the process."""
    return False


def kept_results(asked: Sequence[Asked], config: RuntimeConfig, runtime: Runtime, output_root: str) -> pa.Table:
    """The results of a table's rows, in their order, from a run below `output_root`: what of it is committed is read,
    the rest is generated. Several processes that are given the same table share the run's blocks out, but for
    continuous admission, which has none. Raises the errors of runtime.errors."""
    require_unique_ids([(place, each) for place, each in enumerate(asked) if isinstance(each, Prompt)], {})
    rows = [_row(place, each) for place, each in enumerate(asked)]
    groups = {group.name: getattr(config, group.name) for group in fields(RuntimeConfig)}
    is_wave = config.policy.admission is Admission.wave
    settings = replace(
        GenerateConfig(), **groups, output_root=output_root, workers=Workers.elastic if is_wave else Workers.one
    )
    directory = Path(output_root) / f"table-{input_digest(rows)[:16]}"
    task = replace(generation(settings), directory=directory, rows=lambda *_: rows)
    perform(task, settings, never, runtime=runtime)
    names = result_schema(config.sampling).names
    parts = pq.read_table(RunDirectory(path=directory).generations, columns=["row_index", *names])
    return parts.sort_by("row_index").select(names)


def _row(place: int, asked: Asked) -> Row:
    """What a row of a table asks, as a row of a data set."""
    row = Row(index=place, id=asked.id or str(place), prompt="", messages=None, columns={}, error=None)
    if not isinstance(asked, Prompt):
        return replace(row, error=asked.error)
    return replace(
        row,
        prompt=asked.text or "",
        messages=None if asked.messages is None else [dict(message) for message in asked.messages],
        prompt_ids=None if asked.token_ids is None else tuple(asked.token_ids),
        overrides=asked.overrides,
    )
