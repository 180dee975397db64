"""The numbers that the passes of a run come to: tokens per second by the papers' formulas, bytes and memory per tier.

prefill tokens/s = prompt tokens / prefill time; decode tokens/s = tokens from decode passes / decode time;
total = generated tokens / (prefill + decode time). Issued tokens are all that were sampled, useful ones those up to
and including the end of a row. A run's time is the sum over its passes, never end minus start: queues do not count.

A mixed pass, which computes prompts beside tokens that are decoded, is divided between the two by what it computed:
its seconds, and the padding, in proportion to the tokens. A row that decodes computes one token and issues one, so
the issued tokens of its decode share are its other tokens than those of prompts; useful ones are divided as issued
ones are. Tokens that are prefilled a second time, after a resume or where memory ran short, count as prompt tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from runtime.plan.facts import PlanFacts

from ..files.publishing import JsonValue, write_json
from .passes import PASS_SECONDS, PREDICTED_SECONDS, PassRow, PhaseTimes, RunTimes, Status


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Tokens per second; None where no time was spent, or where nothing is predicted."""

    prefill: float | None = None
    decode_issued: float | None = None
    decode_useful: float | None = None
    total_issued: float | None = None
    total_useful: float | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertUse:
    """How many experts decode passes use: shares of all experts in layers that are read expert by expert. Lanes that
    ask one by one may read some more than once, and together more than all."""

    hit: float
    read: float


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    host_bytes: int
    device_bytes: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in numbers. `predicted` and `planned` stand beside what was measured, and are None when nobody said: what
    was predicted of each pass before its block ran, over the tokens that it then computed. `plan` is that of the last
    start."""

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
    experts: ExpertUse | None
    measured: Rates
    measured_times: RunTimes
    predicted: Rates | None
    predicted_times: RunTimes | None
    peak: MemoryUse
    planned: MemoryUse | None = None
    plan: PlanFacts | None = None

    @property
    def hit_rate(self) -> float | None:
        """How many of the streamed stages were there when a lane first asked, between 0 and 1; None where nothing
        streamed."""
        asked = self.prefetch_hits + self.prefetch_misses
        return self.prefetch_hits / asked if asked else None


def summarize(
    passes: Sequence[PassRow],
    *,
    rows: Mapping[Status, int],
    planned: MemoryUse | None = None,
    plan: PlanFacts | None = None,
) -> Summary:
    """Add up `passes`; `rows` counts the published rows by status. Defined for a run without a single pass."""
    measured = run_times(passes, PASS_SECONDS)
    is_predicted = bool(passes) and all(row.predicted_seconds is not None for row in passes)
    predicted = run_times(passes, PREDICTED_SECONDS) if is_predicted else None
    return Summary(
        rows={"ok": rows.get("ok", 0), "error": rows.get("error", 0), "skipped": rows.get("skipped", 0)},
        num_passes=len(passes),
        prompt_tokens=sum(row.prompt_tokens for row in passes),
        padded_prompt_tokens=round(sum(row.padded_tokens * row.prefill_share for row in passes)),
        issued_tokens=sum(row.issued_tokens for row in passes),
        useful_tokens=sum(row.useful_tokens for row in passes),
        prefill_seconds=measured.prefill.seconds,
        decode_seconds=measured.decode.seconds,
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
        experts=expert_use(passes),
        measured=rates(passes, measured),
        measured_times=measured,
        predicted=predicted and replace(rates(passes, predicted), decode_issued=None, total_issued=None),
        predicted_times=predicted,
        peak=MemoryUse(
            host_bytes=max((row.peak_host_bytes for row in passes), default=0),
            device_bytes=max((row.peak_device_bytes for row in passes), default=0),
        ),
        planned=planned,
        plan=plan,
    )


def run_times(passes: Sequence[PassRow], columns: Sequence[str]) -> RunTimes:
    """Sums of PASS_SECONDS, or of PREDICTED_SECONDS. Mixed passes are divided like their seconds."""

    def added(shares: Sequence[float]) -> PhaseTimes:
        sums = {
            name: sum(getattr(row, column) * share for row, share in zip(passes, shares, strict=True))
            for name, column in zip(PASS_SECONDS, columns, strict=True)
        }
        return PhaseTimes(**sums)

    shares = [row.prefill_share for row in passes]
    return RunTimes(prefill=added(shares), decode=added([1 - share for share in shares]))


def expert_use(passes: Sequence[PassRow]) -> ExpertUse | None:
    """How many experts the passes used; None where no expert was read by itself. A mixed pass counts by its share of
    decoding."""

    def added(counts: Iterable[int]) -> float:
        return sum(count * (1.0 - row.prefill_share) for count, row in zip(counts, passes, strict=True))

    total = added(row.experts_total for row in passes)
    if not total:
        return None
    hit, read = added(row.experts_hit for row in passes), added(row.experts_read for row in passes)
    return ExpertUse(hit=hit / total, read=read / total)


def rates(passes: Sequence[PassRow], times: RunTimes) -> Rates:
    """The tokens of `passes` over these seconds, whether they were measured or predicted."""
    prefill_seconds, decode_seconds = times.prefill.seconds, times.decode.seconds
    total_seconds = prefill_seconds + decode_seconds
    return Rates(
        prefill=_rate(sum(row.prompt_tokens for row in passes), prefill_seconds),
        decode_issued=_rate(sum(row.decode_issued for row in passes), decode_seconds),
        decode_useful=_rate(sum(row.decode_useful for row in passes), decode_seconds),
        total_issued=_rate(sum(row.issued_tokens for row in passes), total_seconds),
        total_useful=_rate(sum(row.useful_tokens for row in passes), total_seconds),
    )


def _rate(tokens: float, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def write_summary(path: Path, summary: Summary) -> None:
    """Publish `summary` as JSON, replacing an older one. Raises OutputError."""
    value: dict[str, JsonValue] = {**asdict(summary), "hit_rate": summary.hit_rate}
    write_json(path, value, exclusive=False)
