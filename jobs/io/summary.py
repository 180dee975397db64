"""From the passes of a run to its numbers: tokens per second by the papers' formulas, bytes and memory per tier.

prefill tokens/s = prompt tokens / prefill time; decode tokens/s = tokens from decode passes / decode time;
total = generated tokens / (prefill + decode time). Issued tokens are all that were sampled, useful ones those up to
and including the end of a row. A run's time is the sum over its passes, never end minus start: queues do not count.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import pyarrow as pa

from .files import JsonValue, write_json

Phase: TypeAlias = Literal["prefill", "decode"]
Status: TypeAlias = Literal["ok", "error", "skipped"]


@dataclass(frozen=True, kw_only=True)
class PassRow:
    """What one pass over the model did and cost. Prefill passes issue the first token of each sequence they finish.

    What seconds and hits mean: `StageTimes` in the engine. `stage_*` has a value for each stage, the others are sums.
    `padded_tokens` is the size of what was computed, padding included: equal to `real_tokens` where nothing is padded.
    """

    pass_index: int
    phase: Phase
    num_sequences: int
    real_tokens: int
    padded_tokens: int
    prompt_tokens: int
    issued_tokens: int
    useful_tokens: int
    seconds: float
    compute_seconds: float = 0.0
    load_seconds: float = 0.0
    stall_seconds: float = 0.0
    copy_seconds: float = 0.0
    attention_seconds: float = 0.0
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    bytes_read_disk: int = 0
    bytes_copied_device: int = 0
    bytes_copied_host: int = 0
    bytes_written_disk: int = 0
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0
    stage_read_seconds: list[float] = field(default_factory=list)
    stage_copy_seconds: list[float] = field(default_factory=list)
    stage_compute_seconds: list[float] = field(default_factory=list)
    stage_attention_seconds: list[float] = field(default_factory=list)
    stage_stall_seconds: list[float] = field(default_factory=list)


PASS_COUNTS = ("num_sequences", "real_tokens", "padded_tokens", "prompt_tokens", "issued_tokens", "useful_tokens")
PASS_SECONDS = ("seconds", "compute_seconds", "load_seconds", "stall_seconds", "copy_seconds", "attention_seconds")
PASS_HITS = ("prefetch_hits", "prefetch_misses")
PASS_BYTES = (
    *("bytes_read_disk", "bytes_copied_device", "bytes_copied_host", "bytes_written_disk"),
    *("peak_host_bytes", "peak_device_bytes"),
)
STAGE_SECONDS = tuple(f"stage_{name}_seconds" for name in ("read", "copy", "compute", "attention", "stall"))
THROUGHPUT_SCHEMA = pa.schema(
    [
        pa.field("block", pa.int32(), nullable=False),
        pa.field("pass_index", pa.int32(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
        *(pa.field(name, pa.int64(), nullable=False) for name in PASS_COUNTS),
        *(pa.field(name, pa.float64(), nullable=False) for name in PASS_SECONDS),
        *(pa.field(name, pa.int64(), nullable=False) for name in (*PASS_HITS, *PASS_BYTES)),
        *(pa.field(name, pa.list_(pa.float64()), nullable=False) for name in STAGE_SECONDS),
        pa.field("operational", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Tokens per second; None where no time was spent, or where nothing is predicted."""

    prefill: float | None = None
    decode_issued: float | None = None
    decode_useful: float | None = None
    total_issued: float | None = None
    total_useful: float | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    host_bytes: int
    device_bytes: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in numbers. `predicted` and `planned` stand beside what was measured, and are None when nobody said."""

    rows: Mapping[Status, int]
    num_passes: int
    prompt_tokens: int
    padded_prompt_tokens: int
    issued_tokens: int
    useful_tokens: int
    prefill_seconds: float
    decode_seconds: float
    compute_seconds: float
    load_seconds: float
    stall_seconds: float
    attention_seconds: float
    prefetch_hits: int
    prefetch_misses: int
    bytes_read_disk: int
    bytes_copied_device: int
    bytes_copied_host: int
    bytes_written_disk: int
    measured: Rates
    peak: MemoryUse
    predicted: Rates | None = None
    planned: MemoryUse | None = None

    @property
    def hit_rate(self) -> float | None:
        """Of streamed stages, how many were there when a lane first asked; None where nothing streamed."""
        asked = self.prefetch_hits + self.prefetch_misses
        return self.prefetch_hits / asked if asked else None


def summarize(
    passes: Sequence[PassRow],
    *,
    rows: Mapping[Status, int],
    predicted: Rates | None = None,
    planned: MemoryUse | None = None,
) -> Summary:
    """Add up `passes`; `rows` counts the published rows by status. Defined for a run without a single pass."""
    prefill = [row for row in passes if row.phase == "prefill"]
    decode = [row for row in passes if row.phase == "decode"]
    return Summary(
        rows={"ok": rows.get("ok", 0), "error": rows.get("error", 0), "skipped": rows.get("skipped", 0)},
        num_passes=len(passes),
        prompt_tokens=sum(row.real_tokens for row in prefill),
        padded_prompt_tokens=sum(row.padded_tokens for row in prefill),
        issued_tokens=sum(row.issued_tokens for row in passes),
        useful_tokens=sum(row.useful_tokens for row in passes),
        prefill_seconds=_seconds(prefill),
        decode_seconds=_seconds(decode),
        compute_seconds=sum(row.compute_seconds for row in passes),
        load_seconds=sum(row.load_seconds for row in passes),
        stall_seconds=sum(row.stall_seconds for row in passes),
        attention_seconds=sum(row.attention_seconds for row in passes),
        prefetch_hits=sum(row.prefetch_hits for row in passes),
        prefetch_misses=sum(row.prefetch_misses for row in passes),
        bytes_read_disk=sum(row.bytes_read_disk for row in passes),
        bytes_copied_device=sum(row.bytes_copied_device for row in passes),
        bytes_copied_host=sum(row.bytes_copied_host for row in passes),
        bytes_written_disk=sum(row.bytes_written_disk for row in passes),
        measured=_rates(prefill, decode),
        peak=MemoryUse(
            host_bytes=max((row.peak_host_bytes for row in passes), default=0),
            device_bytes=max((row.peak_device_bytes for row in passes), default=0),
        ),
        predicted=predicted,
        planned=planned,
    )


def _seconds(passes: Iterable[PassRow]) -> float:
    return sum(row.seconds for row in passes)


def _rates(prefill: Sequence[PassRow], decode: Sequence[PassRow]) -> Rates:
    prefill_seconds, decode_seconds = _seconds(prefill), _seconds(decode)
    both = [*prefill, *decode]
    return Rates(
        prefill=_rate(sum(row.real_tokens for row in prefill), prefill_seconds),
        decode_issued=_rate(sum(row.issued_tokens for row in decode), decode_seconds),
        decode_useful=_rate(sum(row.useful_tokens for row in decode), decode_seconds),
        total_issued=_rate(sum(row.issued_tokens for row in both), prefill_seconds + decode_seconds),
        total_useful=_rate(sum(row.useful_tokens for row in both), prefill_seconds + decode_seconds),
    )


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def write_summary(path: Path, summary: Summary) -> None:
    """Publish `summary` as JSON, replacing an older one. Raises OutputError."""
    value: dict[str, JsonValue] = {**asdict(summary), "hit_rate": summary.hit_rate}
    write_json(path, value, exclusive=False)
