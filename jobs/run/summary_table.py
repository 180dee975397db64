"""The summary table printed at the end of a run, and the reasons of error rows."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq

from runtime.plan.shape.dtypes import Loss
from runtime.units import format_bytes, format_count, format_seconds

from ..files.publishing import JsonValue
from ..record.part_files import visible_files
from ..record.passes import PhaseTimes
from ..record.summary import PERPLEXITIES, MemoryUse, Outcome, Rates, Summary, Utilization

MAX_REASONS = 3
MAX_PLAIN = 1e6  # a number above it is written with an exponent
NUMBER = re.compile(r"\d[\d,.]*")
ZERO_SECONDS = format_seconds(0)
Line = tuple[str, str, str]  # label, measured, and predicted or planned value


def format_table(summary: Summary) -> str:
    """Table of measured values, with predicted or planned ones in their own column. Rows that are zero in both are
    omitted."""
    title = "predicted" if summary.predicted is not None else "planned" if summary.planned is not None else ""
    head = ("", "measured" if title else "", title)
    groups = (_count_lines(summary), _throughput_lines(summary), _time_lines(summary), _byte_lines(summary))
    lines = [line for group in groups if group for line in (("", "", ""), *group)]
    lines = [*lines[1 : 1 + len(groups[0])], ("", "", ""), head, *lines[2 + len(groups[0]) :]]  # head below the counts
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    aligned = (f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in lines)
    return "\n".join(aligned)


def _count_lines(summary: Summary) -> list[Line]:
    prompt, padded = summary.prompt_tokens, summary.padded_prompt_tokens
    issued, useful, spared = summary.issued_tokens, summary.useful_tokens, summary.spared_prompt_tokens
    drafted, accepted = summary.drafted_tokens, summary.accepted_tokens
    label = "generated tokens" if summary.totals is None else "scored tokens"
    reason = summary.plan.why_unshared if summary.plan is not None else None
    unshared = [(f"prompt tokens saved by prefix sharing, off: {reason}", "0", "")] if reason else []
    return [
        *((f"rows {status}", f"{count:,}", "") for status, count in summary.rows.items() if count or status == "ok"),
        *_elapsed_lines(summary),
        ("prompt tokens", f"{prompt:,}", ""),
        *([("prompt tokens saved by prefix sharing", f"{spared:,}", "")] if spared else unshared),
        *([("guessed tokens that were right", f"{accepted:,} of {drafted:,}", "")] if drafted else []),
        *([("prompt tokens, padding included", f"{padded:,}", "")] if padded != prompt else []),
        *_loss_lines(summary),
        (label, f"{useful:,}", ""),
        *([(f"{label}, of ended rows too", f"{issued:,}", "")] if issued != useful else []),
    ]


def _loss_lines(summary: Summary) -> list[Line]:
    """The formats of weights and KV cache, if they are lossy."""
    plan, exact = summary.plan, Loss.exact.value
    if plan is None:
        return []
    weights: list[Line] = [("weights", plan.weights_text, "")] if plan.weight_loss != exact else []
    return weights + ([("keys and values", plan.kv_text, "")] if plan.kv_loss != exact else [])


def _elapsed_lines(summary: Summary) -> list[Line]:
    """Wall-clock times, if the passes recorded them, and rows per minute."""
    lines: list[Line] = []
    elapsed, rate = summary.elapsed, summary.rows_per_minute
    if elapsed is not None:
        starts = f", in {format_count(elapsed.num_starts, 'start')}" if elapsed.num_starts > 1 else ""
        lines.append((f"elapsed{starts}", format_seconds(elapsed.seconds), ""))
        lines.append(("until the first pass began", format_seconds(elapsed.before_passes_seconds), ""))
        if elapsed.first_token_seconds is not None:
            lines.append(("until the first token", format_seconds(elapsed.first_token_seconds), ""))
    return [
        *lines,
        *([("rows per minute of passes", f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}", "")] if rate else []),
    ]


def _throughput_lines(summary: Summary) -> list[Line]:
    measured, predicted = summary.measured, summary.predicted or Rates()
    return [
        ("prefill", _rate_text(measured.prefill) or "-", _rate_text(predicted.prefill)),
        *_rate_lines("decode", (measured.decode_issued, measured.decode_useful), predicted.decode_useful),
        *_rate_lines("total", (measured.total_issued, measured.total_useful), predicted.total_useful),
    ]


def _rate_lines(name: str, rates: tuple[float | None, float | None], predicted: float | None) -> list[Line]:
    """A line, or two if issued and useful rates differ."""
    issued, useful = (_rate_text(rate) or "-" for rate in rates)
    if issued == useful:
        return [(name, useful, _rate_text(predicted))]
    return [(f"{name}, issued", issued, ""), (f"{name}, useful", useful, _rate_text(predicted))]


def _rate_text(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.1f} tok/s"


def _time_lines(summary: Summary) -> list[Line]:
    rate, measured, predicted = summary.hit_rate, summary.measured_times, summary.predicted_times
    used, predicted_use, opening = summary.utilisation, summary.predicted_utilisation, summary.weights_seconds
    return [
        *_phase_lines("prefill", measured.prefill, predicted.prefill if predicted else None),
        *_phase_lines("decode", measured.decode, predicted.decode if predicted else None),
        *_busy_lines(used, predicted_use),
        *([("prefetched in time", f"{rate:.1%}", "")] if rate is not None else []),
        *([("weights opened in", format_seconds(opening), "")] if opening is not None else []),
    ]


def _phase_lines(name: str, measured: PhaseTimes, predicted: PhaseTimes | None) -> list[Line]:
    parts = {
        f"{name} time": "seconds",
        f"{name}: attention": "attention_seconds",
        f"{name}: stalled": "stall_seconds",
    }
    lines: list[Line] = []
    for label, key in parts.items():
        seconds, expected = getattr(measured, key), getattr(predicted, key) if predicted else None
        is_in_compute = key == "attention_seconds" and not expected  # attention on the device is predicted as compute
        lines.append(
            (label, format_seconds(seconds), "" if expected is None or is_in_compute else format_seconds(expected))
        )
    return [line for line in lines if set(line[1:]) - {ZERO_SECONDS, ""}]


def _busy_lines(measured: Utilization | None, predicted: Utilization | None) -> list[Line]:
    """Shares of time in which disk, link and compute were busy, and compute idle."""
    run, expected = measured.run if measured else None, predicted.run if predicted else None
    if run is None:
        return []
    shares: list[Line] = [
        (f"{name} busy", f"{getattr(run, name):.0%}", "" if expected is None else f"{getattr(expected, name):.0%}")
        for name in ("disk", "link", "compute")
        if getattr(run, name) or (expected is not None and getattr(expected, name))
    ]
    idle = ("compute idle", f"{1 - run.compute:.0%}", "" if expected is None else f"{1 - expected.compute:.0%}")
    return [*shares, *([idle] if set(idle[1:]) - {"0%", "-0%", ""} else [])]


def _byte_lines(summary: Summary) -> list[Line]:
    moved = {
        "read from disk": summary.bytes_read_disk,
        "copied to the device": summary.bytes_copied_device,
        "copied to the host": summary.bytes_copied_host,
        "written to disk": summary.bytes_written_disk,
    }
    # Decode passes only: prefill uses nearly all experts.
    shares = {} if summary.experts is None else {"hit": summary.experts.hit, "read": summary.experts.read}
    return [
        *((label, format_bytes(num_bytes), "") for label, num_bytes in moved.items() if num_bytes),
        *((f"experts {name}, decode", f"{share:.1%}", "") for name, share in shares.items()),
        *_memory_lines("host", summary.peak, summary.mean, summary.planned),
        *_memory_lines("device", summary.peak, summary.mean, summary.planned),
    ]


def _memory_lines(name: str, peak: MemoryUse, mean: MemoryUse | None, planned: MemoryUse | None) -> list[Line]:
    def text(use: MemoryUse | None) -> str:
        return format_bytes(getattr(use, f"{name}_bytes")) if use is not None else ""

    if not getattr(peak, f"{name}_bytes") and not (planned and getattr(planned, f"{name}_bytes")):
        return []
    average: list[Line] = [(f"average {name} memory", text(mean), "")] if mean is not None else []
    return [(f"peak {name} memory", text(peak), text(planned)), *average]


def format_outcome(outcome: Outcome) -> str:
    """The summary table, and the most common errors if rows failed."""
    table = format_table(outcome.summary)
    return f"{table}\n\n{format_errors(outcome.directory)}" if outcome.summary.rows["error"] else table


def format_errors(directory: Path) -> str:
    """The most common errors of a run's rows, one line each. Errors that differ only in numbers count as one."""
    counts, firsts = Counter[str](), dict[str, str]()
    for path in visible_files(directory / "generations"):
        for error in pq.read_table(path, columns=["error"])["error"].drop_null().to_pylist():
            kind = NUMBER.sub("0", error)
            counts[kind] += 1
            firsts.setdefault(kind, error)
    lines = [f"{count:>8,} x {firsts[kind]}" for kind, count in counts.most_common(MAX_REASONS)]
    others = [f"and {len(counts) - len(lines)} other reasons"] if len(counts) > len(lines) else []
    return "\n".join(["rows with an error, by their column `error`:", *lines, *others])


def format_completions(folder: Path) -> str:
    """The completions of a run with one prompt, or their errors."""
    rows = pq.read_table(folder, columns=["completion", "error"]).to_pylist()
    return "\n\n".join(row["error"] or row["completion"] for row in rows)


def format_totals(totals: Mapping[str, JsonValue]) -> str:
    """A summary's `totals` of a scored run, as a sentence."""
    values = [(key.split("_")[0], value) for key in PERPLEXITIES if isinstance(value := totals.get(key), float)]
    texts = [f"{value:{',.4f' if value < MAX_PLAIN else '.4g'}} per {unit}" for unit, value in values]
    counts = [int(str(totals[key])) for key in ("num_rows", "num_tokens", "num_greedy")]
    return (
        f"{format_count(counts[0], 'target')} of {format_count(counts[1], 'token')}, {counts[2]:,} of them greedy; "
        f"log-probability {totals['logprob']:,.4f}" + (f", perplexity {', '.join(texts)}" if texts else "")
    )
