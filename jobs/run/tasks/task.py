"""The interface between a run and its task; everything else in a run is the same for all tasks."""

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
    """The rows of the data set; `runtime`, if it has a tokenizer, counts tokens."""
    log.info("reading %s", config.dataset.source_name)
    encodes = isinstance(config, EncodeConfig)
    if runtime is None or runtime.model.tokenizer is None:
        return read_rows(config.dataset, encodes=encodes)
    return read_rows(config.dataset, count_tokens=lambda text: len(runtime.tokenize([text])[0]), encodes=encodes)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run's task. `columns`: schema of the output rows, without passed-through columns. `rows`: reads rows; gets a
    runtime only if settings need a tokenizer. `totals`: values for the summary, from the run directory and the input
    rows. `identity`: added to the run's identity, besides settings. `check`: raises ConfigError if the model cannot do
    the task. `make_reader`: returns a function that converts encodings to output columns. `problem`: the reason why a
    row cannot be used with any model."""

    directory: Path
    columns: Callable[[SamplingConfig], pa.Schema]
    requests: MakeRequests
    rows: Callable[[RunSettings, Runtime | None], list[Row]] = dataset_rows
    totals: Callable[[Path, Callable[[], Sequence[Row]]], Mapping[str, JsonValue] | None] = lambda *_: None
    identity: Mapping[str, JsonValue] = field(default_factory=dict)
    check: Callable[[Runtime], None] = lambda _: None
    make_reader: Callable[[Runtime], ReadColumns] = lambda _: lambda _: {}
    problem: Callable[[Row], str | None] = lambda row: row.error
