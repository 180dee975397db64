"""What a task is to a run. All else of a run is the same for every task."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from runtime.config.settings import SamplingConfig
from runtime.library.api import Runtime

from ...config.settings import EncodeConfig, RunSettings
from ...datasets import Row, read_rows
from ...files.publishing import JsonValue
from ..requests import MakeRequests, ReadColumns

log = logging.getLogger(__name__)


def dataset_rows(config: RunSettings, runtime: Runtime | None) -> list[Row]:
    """The rows of the data set; `runtime` counts tokens where it has a tokenizer."""
    log.info("reading %s", config.dataset.place)
    encodes = isinstance(config, EncodeConfig)
    if runtime is None or runtime.model.tokenizer is None:
        return read_rows(config.dataset, encodes=encodes)
    return read_rows(config.dataset, count_tokens=lambda text: len(runtime.tokenize([text])[0]), encodes=encodes)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a run does with its rows. `columns`: those of `GenerationRow.values` that every output row has with this
    sampling, whatever it brought along. `rows` are asked for without a runtime first, unless the settings need one to
    tell them. `totals`: what the parts in a directory come to beside what every run's summary says, of these input
    rows. `identity`: what makes the run this run beside its settings. `check` raises ConfigError where the model cannot
    do the task. `read`: makes what reads the columns of a request with an encoding. `problem`: why nothing can be asked
    of a row, whatever the model."""

    directory: Path
    columns: Callable[[SamplingConfig], pa.Schema]
    requests: MakeRequests
    rows: Callable[[RunSettings, Runtime | None], list[Row]] = dataset_rows
    totals: Callable[[Path, Callable[[], Sequence[Row]]], Mapping[str, JsonValue] | None] = lambda *_: None
    identity: Mapping[str, JsonValue] = field(default_factory=dict)
    check: Callable[[Runtime], None] = lambda _: None
    make_reader: Callable[[Runtime], ReadColumns] = lambda _: lambda _: {}
    problem: Callable[[Row], str | None] = lambda row: row.error
