"""From the passes of a run to its numbers: tokens per second by the papers' formulas, bytes and memory per tier.

prefill tokens/s = prompt tokens / prefill time; decode tokens/s = tokens from decode passes / decode time;
total = generated tokens / (prefill + decode time). Issued tokens are all that were sampled, useful ones those up to
and including the end of a row. A run's time is the sum over its passes, never end minus start: queues do not count.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import pyarrow as pa

from runtime.units import format_bytes, format_seconds

from .files import JsonValue, write_json

Phase: TypeAlias = Literal["prefill", "decode"]
Status: TypeAlias = Literal["ok", "error", "skipped"]


@dataclass(frozen=True, kw_only=True)
class PassRow:
    """What one pass over the model did and cost. Prefill passes issue the first token of each sequence they finish.

    `padded_tokens` is the size of what was computed, padding included: equal to `real_tokens` where nothing is padded.
    """

    pass_index: int
    phase: Phase
    num_sequences: int
    real_tokens: int
    padded_tokens: int
    issued_tokens: int
    useful_tokens: int
    seconds: float
    compute_seconds: float = 0.0
    load_seconds: float = 0.0
    stall_seconds: float = 0.0
    bytes_read_disk: int = 0
    bytes_copied_device: int = 0
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0


PASS_COUNTS = ("num_sequences", "real_tokens", "padded_tokens", "issued_tokens", "useful_tokens")
PASS_SECONDS = ("seconds", "compute_seconds", "load_seconds", "stall_seconds")
PASS_BYTES = ("bytes_read_disk", "bytes_copied_device", "peak_host_bytes", "peak_device_bytes")
THROUGHPUT_SCHEMA = pa.schema(
    [
        pa.field("block", pa.int32(), nullable=False),
        pa.field("pass_index", pa.int32(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
        *(pa.field(name, pa.int64(), nullable=False) for name in PASS_COUNTS),
        *(pa.field(name, pa.float64(), nullable=False) for name in PASS_SECONDS),
        *(pa.field(name, pa.int64(), nullable=False) for name in PASS_BYTES),
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
    bytes_read_disk: int
    bytes_copied_device: int
    measured: Rates
    peak: MemoryUse
    predicted: Rates | None = None
    planned: MemoryUse | None = None


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
        bytes_read_disk=sum(row.bytes_read_disk for row in passes),
        bytes_copied_device=sum(row.bytes_copied_device for row in passes),
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
    value: dict[str, JsonValue] = asdict(summary)
    write_json(path, value, exclusive=False)


def format_table(summary: Summary) -> str:
    """The table a person reads at the end of a run: measured, and what was predicted or planned in its own column."""
    has_claims = summary.predicted is not None or summary.planned is not None
    head = ["", "measured", "predicted or planned"] if has_claims else ["", "measured", ""]
    groups = (_counts(summary), _throughput(summary), _time(summary), _bytes(summary))
    lines = [head, *(line for group in groups for line in ([""] * 3, *group))]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    aligned = (f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in lines)
    return "\n".join(aligned)


def _counts(summary: Summary) -> list[list[str]]:
    prompt, padded = summary.prompt_tokens, summary.padded_prompt_tokens
    return [
        *([f"rows {status}", f"{count:,}", ""] for status, count in summary.rows.items()),
        ["passes", f"{summary.num_passes:,}", ""],
        ["prompt tokens", f"{prompt:,}", ""],
        *([["prompt tokens, padding included", f"{padded:,}", ""]] if padded != prompt else []),
        ["generated tokens, issued", f"{summary.issued_tokens:,}", ""],
        ["generated tokens, useful", f"{summary.useful_tokens:,}", ""],
    ]


def _throughput(summary: Summary) -> list[list[str]]:
    measured, claimed = summary.measured, summary.predicted or Rates()
    pairs = (
        ("prefill", measured.prefill, claimed.prefill),
        ("decode, issued", measured.decode_issued, claimed.decode_issued),
        ("decode, useful", measured.decode_useful, claimed.decode_useful),
        ("total, issued", measured.total_issued, claimed.total_issued),
        ("total, useful", measured.total_useful, claimed.total_useful),
    )
    return [[name, _rate_text(rate) or "-", _rate_text(claim)] for name, rate, claim in pairs]


def _rate_text(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.1f} tok/s"


def _time(summary: Summary) -> list[list[str]]:
    times = (
        ("prefill time", summary.prefill_seconds),
        ("decode time", summary.decode_seconds),
        ("computing", summary.compute_seconds),
        ("loading (beside compute)", summary.load_seconds),
        ("stalled on loads", summary.stall_seconds),
    )
    return [[name, format_seconds(seconds), ""] for name, seconds in times]


def _bytes(summary: Summary) -> list[list[str]]:
    peak, planned = summary.peak, summary.planned
    return [
        ["read from disk", format_bytes(summary.bytes_read_disk), ""],
        ["copied to the device", format_bytes(summary.bytes_copied_device), ""],
        ["peak host memory", format_bytes(peak.host_bytes), format_bytes(planned.host_bytes) if planned else ""],
        ["peak device memory", format_bytes(peak.device_bytes), format_bytes(planned.device_bytes) if planned else ""],
    ]
