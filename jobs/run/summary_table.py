"""The table a person reads at the end of a run."""

from runtime.units import format_bytes, format_seconds

from .passes import PhaseTimes
from .summary import Rates, Summary


def format_table(summary: Summary) -> str:
    """Measured, and what was predicted or planned in its own column."""
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
    rate, measured, claimed = summary.hit_rate, summary.measured_times, summary.predicted_times
    hits = [["prefetched in time", f"{rate:.1%}", ""]] if rate is not None else []
    return [
        *_phase("prefill", measured.prefill, claimed.prefill if claimed else None),
        *_phase("decode", measured.decode, claimed.decode if claimed else None),
        *hits,
    ]


def _phase(name: str, measured: PhaseTimes, claimed: PhaseTimes | None) -> list[list[str]]:
    """What works side by side, and how long compute waited. Lines of two zeros are left out; attention where the model
    computes is predicted as part of that."""
    parts = {
        f"{name} time": "seconds",
        f"{name}: computing": "compute_seconds",
        f"{name}: loading (beside compute)": "load_seconds",
        f"{name}: copying (beside compute)": "copy_seconds",
        f"{name}: attention": "attention_seconds",
        f"{name}: stalled": "stall_seconds",
    }
    lines = []
    for label, key in parts.items():
        seconds, claim = getattr(measured, key), getattr(claimed, key) if claimed else None
        if seconds or claim or key in ("seconds", "stall_seconds"):
            is_part = key == "attention_seconds" and not claim
            lines.append([label, format_seconds(seconds), "" if claim is None or is_part else format_seconds(claim)])
    return lines


def _bytes(summary: Summary) -> list[list[str]]:
    peak, planned = summary.peak, summary.planned
    return [
        ["read from disk", format_bytes(summary.bytes_read_disk), ""],
        *_experts(summary),
        ["copied to the device", format_bytes(summary.bytes_copied_device), ""],
        *([["copied to the host", format_bytes(back), ""]] if (back := summary.bytes_copied_host) else []),
        *([["written to disk", format_bytes(kept), ""]] if (kept := summary.bytes_written_disk) else []),
        ["peak host memory", format_bytes(peak.host_bytes), format_bytes(planned.host_bytes) if planned else ""],
        ["peak device memory", format_bytes(peak.device_bytes), format_bytes(planned.device_bytes) if planned else ""],
    ]


def _experts(summary: Summary) -> list[list[str]]:
    """Where they are read one by one, and of decode passes alone: prompts visit nearly all."""
    use = summary.experts
    if use is None:
        return []
    return [["experts hit, decode", f"{use.hit:.1%}", ""], ["experts read, decode", f"{use.read:.1%}", ""]]
