"""How fast each worker of a run is, by the passes in the last parts: rows and tokens a second of its time in passes."""

import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..files.publishing import PARQUET_PROBLEMS, JsonValue, read_regular
from ..record.found import FoundRun

log = logging.getLogger(__name__)
NUM_PARTS = 100  # the last ones, so that many are read quickly


@dataclass(frozen=True, kw_only=True)
class WorkerRate:
    """What one process did of the last parts: `num_rows` is its share of their rows, by the seconds of its passes."""

    holder: Mapping[str, JsonValue]
    num_parts: int
    num_rows: float
    num_tokens: int
    seconds: float

    @property
    def rows_per_second(self) -> float:
        return self.num_rows / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def is_holder(self, holder: Mapping[str, JsonValue]) -> bool:
        """Whether this is the process that a lease names."""
        return bool(self.holder) and all(holder.get(key) == value for key, value in self.holder.items())


class _Pass(NamedTuple):
    worker: str
    seconds: float
    useful_tokens: int


@dataclass(kw_only=True)
class _Share:
    num_parts: int = 0
    num_rows: float = 0.0
    num_tokens: int = 0
    seconds: float = 0.0


def worker_rates(run: FoundRun, rows_by_block: Mapping[int, int]) -> list[WorkerRate]:
    """Those who had a part in the last parts, the fastest first. Parts of earlier versions do not say whose they are;
    what cannot be read is left out, with a warning."""
    last = sorted((path.stat().st_mtime, block) for block, path in run.parts.items() if block in rows_by_block)
    shares: defaultdict[str, _Share] = defaultdict(_Share)
    for _, block in last[-NUM_PARTS:]:
        passes = _passes(run.directory.throughput_part(block))
        seconds = sum(each.seconds for each in passes)
        for name in {each.worker for each in passes}:
            own = [each for each in passes if each.worker == name]
            share, own_seconds = shares[name], sum(each.seconds for each in own)
            share.num_parts += 1
            share.num_rows += rows_by_block[block] * own_seconds / seconds if seconds else 0.0
            share.num_tokens += sum(each.useful_tokens for each in own)
            share.seconds += own_seconds
    rates = [WorkerRate(holder=_holder(name), **vars(share)) for name, share in shares.items()]
    return sorted(rates, key=lambda rate: -rate.rows_per_second)


def _holder(text: str) -> Mapping[str, JsonValue]:
    """The process that the column names, or an empty one where that is damaged: nothing goes by it."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _passes(path: Path) -> Sequence[_Pass]:
    """Its passes, as far as they say who ran them."""
    try:
        with pq.ParquetFile(pa.BufferReader(read_regular(path)[0])) as file:
            if not {*_Pass._fields} <= {*file.schema_arrow.names}:
                return []
            passes = [_Pass(**row) for row in file.read(list(_Pass._fields)).to_pylist()]
    except PARQUET_PROBLEMS as error:
        log.warning("the rates lack %s: %s", path, error)
        return []
    return [each for each in passes if each.worker is not None]
