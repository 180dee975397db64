"""The summary of a run's passes (forwards through the model): tokens per second, bytes and memory.

| rate | is |
|---|---|
| prefill | prompt tokens / seconds of prefill |
| decode | tokens sampled in decode / seconds of decode |
| total | all sampled tokens / (seconds of prefill and decode) |

Issued tokens are all sampled tokens; useful tokens are those in completions. Times are sums over passes, without time
in queues. A mixed pass does prefill and decode together: its seconds, padding and useful tokens are divided between the
phases in proportion to their computed tokens. Tokens that are prefilled again, after a resume or preemption, count as
prompt tokens.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

from runtime.plan.placement.ledger import Ledger
from runtime.plan.resolved_settings import ResolvedSettings

from ..files.publishing import JsonValue, write_json
from .passes import PASS_SECONDS, PREDICTED_SECONDS, PassRow, PhaseTimes, Status

PERPLEXITIES = ("token_perplexity", "word_perplexity", "byte_perplexity")  # keys in the totals of a scored run


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Tokens per second. None if there is no time or no prediction."""

    prefill: float | None = None
    decode_issued: float | None = None
    decode_useful: float | None = None
    total_issued: float | None = None
    total_useful: float | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertUse:
    """Experts that decode passes used, as fractions of all experts in layers that are read expert by expert. `hit`:
    tokens were routed to them. `read`: they were read; may exceed 1, as an expert may be read for several
    micro-batches."""

    hit: float
    read: float

    @staticmethod
    def from_passes(passes: Sequence[PassRow]) -> "ExpertUse | None":
        """The fractions over `passes`; None if no layer is read expert by expert. A mixed pass counts in proportion to
        its decode."""

        def weighted_sum(counts: Iterable[int]) -> float:
            return sum(count * (1.0 - row.prefill_share) for count, row in zip(counts, passes, strict=True))

        total = weighted_sum(row.experts_total for row in passes)
        if not total:
            return None
        hit = weighted_sum(row.experts_hit for row in passes)
        return ExpertUse(hit=hit / total, read=weighted_sum(row.experts_read for row in passes) / total)


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of host and device memory."""

    host_bytes: int
    device_bytes: int


@dataclass(frozen=True, kw_only=True)
class BusyShares:
    """The fractions of time in which resources were busy. They may exceed 1, because directions of the link, reader
    threads and CPU workers are added. `bubble_seconds`: time in which compute was idle."""

    disk: float
    link: float
    compute: float
    bubble_seconds: float

    @staticmethod
    def from_times(times: PhaseTimes) -> "BusyShares | None":
        if not times.seconds:
            return None
        return BusyShares(
            disk=times.load_seconds / times.seconds,
            link=times.copy_seconds / times.seconds,
            compute=times.compute_seconds / times.seconds,
            bubble_seconds=max(0.0, times.seconds - times.compute_seconds),
        )


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """Times of all passes of a run, by phase."""

    prefill: PhaseTimes
    decode: PhaseTimes

    @staticmethod
    def from_passes(passes: Sequence[PassRow], columns: Sequence[str]) -> "RunTimes":
        """The sums of `columns`, which are PASS_SECONDS or PREDICTED_SECONDS. Mixed passes are divided between the
        phases."""

        def weighted_sum(shares: Sequence[float]) -> PhaseTimes:
            sums = {
                name: sum(getattr(row, column) * share for row, share in zip(passes, shares, strict=True))
                for name, column in zip(PASS_SECONDS, columns, strict=True)
            }
            return PhaseTimes(**sums)

        shares = [row.prefill_share for row in passes]
        return RunTimes(prefill=weighted_sum(shares), decode=weighted_sum([1 - share for share in shares]))

    def rates(self, passes: Sequence[PassRow]) -> Rates:
        """The tokens of `passes`, divided by these times."""
        prefill_seconds, decode_seconds = self.prefill.seconds, self.decode.seconds
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


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """How busy resources were, by phase and in the whole run. None for a phase without passes."""

    prefill: BusyShares | None
    decode: BusyShares | None
    run: BusyShares | None

    @staticmethod
    def from_times(times: RunTimes) -> "Utilization":
        total = times.prefill.add(times.decode)
        return Utilization(
            prefill=BusyShares.from_times(times.prefill),
            decode=BusyShares.from_times(times.decode),
            run=BusyShares.from_times(total),
        )


@dataclass(frozen=True, kw_only=True)
class Elapsed:
    """Wall-clock time of all processes with at least one pass. Time in which several run counts once. `num_starts`: the
    number of processes. `first_token_seconds` and `before_passes_seconds`: from the start of the first process to its
    first token, and to its first pass."""

    num_starts: int
    seconds: float
    first_token_seconds: float | None
    before_passes_seconds: float

    @staticmethod
    def from_passes(passes: Sequence[PassRow]) -> "Elapsed | None":
        starts: dict[float, list[PassRow]] = defaultdict(list)
        for row in passes:
            starts[row.started_at].append(row)
        if not starts:
            return None
        seconds, last_end = 0.0, -inf  # the union of intervals, in order of their begin
        for begin, rows in sorted(starts.items()):
            end = begin + max(row.since_start_seconds for row in rows)
            seconds += max(0.0, end - max(begin, last_end))
            last_end = max(last_end, end)
        first = starts[min(starts)]
        return Elapsed(
            num_starts=len(starts),
            seconds=seconds,
            first_token_seconds=min((row.since_start_seconds for row in first if row.issued_tokens), default=None),
            before_passes_seconds=min(row.since_start_seconds - row.seconds for row in first),
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The summary of a run.

    - `experts`: None if no layer is read expert by expert
    - `measured`, `predicted`: rates; predictions are made before each block, None if there are none
    - `peak`, `mean`, `planned`: memory use; the mean is weighted by the time of passes
    - `plan`, `ledgers`, `weights_seconds`: resolved settings, planned bytes of each memory, and seconds to open the
      weights; of the last process
    - `totals`: results of the task, such as perplexities
    - `spared_prompt_tokens`: prompt tokens that were not computed because prompts share prefixes
    - `drafted_tokens`, `accepted_tokens`: guessed tokens that were computed, and those that were right
    """

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
    mean: MemoryUse | None = None
    elapsed: Elapsed | None = None
    rows_per_minute: float | None = None
    utilisation: Utilization | None = None
    predicted_utilisation: Utilization | None = None
    weights_seconds: float | None = None
    planned: MemoryUse | None = None
    plan: ResolvedSettings | None = None
    ledgers: Sequence[Ledger] = ()
    totals: Mapping[str, JsonValue] | None = None
    spared_prompt_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def hit_rate(self) -> float | None:
        """The fraction of streamed stages (such as layers) whose weights were there when compute needed them. None if
        nothing was streamed."""
        num_requests = self.prefetch_hits + self.prefetch_misses
        return self.prefetch_hits / num_requests if num_requests else None

    @property
    def values(self) -> dict[str, JsonValue]:
        """The content of `summary.json`."""
        return {**asdict(self), "hit_rate": self.hit_rate}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run. `summary`: of all its processes. `was_finished`: the run was finished before this start."""

    directory: Path
    summary: Summary
    was_finished: bool

    @property
    def exit_code(self) -> int:
        return 3 if self.summary.rows["error"] else 0

    @property
    def values(self) -> dict[str, JsonValue]:
        """What `summary=json` prints."""
        return {
            "run": str(self.directory),
            "exit_code": self.exit_code,
            "was_finished": self.was_finished,
            "summary": self.summary.values,
        }


def summarize(
    passes: Sequence[PassRow],
    *,
    rows: Mapping[Status, int],
    planned: MemoryUse | None = None,
    plan: ResolvedSettings | None = None,
    weights_seconds: float | None = None,
    ledgers: Sequence[Ledger] = (),
    totals: Mapping[str, JsonValue] | None = None,
) -> Summary:
    """Sums up `passes`, which may be empty. `rows`: the number of output rows by status."""
    measured = RunTimes.from_passes(passes, PASS_SECONDS)
    is_predicted = bool(passes) and all(row.predicted_seconds is not None for row in passes)
    predicted = RunTimes.from_passes(passes, PREDICTED_SECONDS) if is_predicted else None
    seconds = sum(row.seconds for row in passes)
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
        experts=ExpertUse.from_passes(passes),
        measured=measured.rates(passes),
        measured_times=measured,
        predicted=predicted and replace(predicted.rates(passes), decode_issued=None, total_issued=None),
        predicted_times=predicted,
        peak=peak_memory(passes),
        mean=mean_memory(passes),
        elapsed=Elapsed.from_passes(passes),
        rows_per_minute=60 * sum(rows.values()) / seconds if seconds else None,
        utilisation=Utilization.from_times(measured) if passes else None,
        predicted_utilisation=Utilization.from_times(predicted) if predicted is not None else None,
        weights_seconds=weights_seconds,
        planned=planned,
        plan=plan,
        ledgers=ledgers,
        totals=totals,
        spared_prompt_tokens=sum(row.spared_tokens for row in passes),
        drafted_tokens=sum(row.drafted_tokens for row in passes),
        accepted_tokens=sum(row.accepted_tokens for row in passes),
    )


def peak_memory(passes: Sequence[PassRow]) -> MemoryUse:
    """The maximum over all passes."""
    return MemoryUse(
        host_bytes=max((row.peak_host_bytes for row in passes), default=0),
        device_bytes=max((row.peak_device_bytes for row in passes), default=0),
    )


def mean_memory(passes: Sequence[PassRow]) -> MemoryUse | None:
    """The mean memory in use, weighted by the time of passes; None without passes."""
    seconds = sum(row.seconds for row in passes)
    if not seconds:
        return None
    return MemoryUse(
        host_bytes=round(sum(row.host_bytes * row.seconds for row in passes) / seconds),
        device_bytes=round(sum(row.device_bytes * row.seconds for row in passes) / seconds),
    )


def write_summary(path: Path, summary: Summary) -> None:
    """Publishes `summary` as JSON, replacing an older one. Raises OutputError."""
    write_json(path, summary.values, exclusive=False)
