"""Statistics of passes (forwards through the model): rows of `throughput/`, and seconds by phase and resource."""

import time
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, TypeAlias

import pyarrow as pa

from runtime.engine.records import PassRecord
from runtime.plan.cost.predict import Prediction
from runtime.plan.cost.simulator import PhaseTime
from runtime.resources import Resource

from ..files.locks import this_process
from ..files.publishing import canonical_json

Phase: TypeAlias = Literal["prefill", "decode", "mixed"]
Status: TypeAlias = Literal["ok", "error", "skipped"]


@dataclass(frozen=True, kw_only=True)
class PassRow:
    """Statistics of one pass. A prefill pass that completes a prompt issues (samples) the first new token.

    `StageTimes` of the engine defines seconds, hits and experts. A stage is the weights of one layer, of the
    embeddings, or of the head. `stage_*` has a value for each stage; other times are sums over stages.

    - `pass_index`: number of the pass in its block, or in the run if blocks overlap
    - `real_tokens`: computed tokens without padding; `padded_tokens`: with padding
    - `prompt_tokens`: the tokens of prompts among `real_tokens`
    - `predicted_*`: predicted for an average pass of this phase; None without a prediction
    - `host_bytes`, `device_bytes`: memory in use at the end of the pass
    - `started_at`: start of the process in Unix seconds
    - `since_start_seconds`: from the start of the process to the end of the pass
    - `spared_tokens`: prompt tokens that were not computed because prompts share prefixes, minus the computed tokens of
      these prefixes
    - `drafted_tokens`: guessed tokens that were computed; `accepted_tokens`: those that were right. Others are padding.
    - `worker`: the process, as JSON
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
    experts_total: int = 0
    experts_hit: int = 0
    experts_read: int = 0
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
    predicted_seconds: float | None = None
    predicted_compute_seconds: float | None = None
    predicted_load_seconds: float | None = None
    predicted_copy_seconds: float | None = None
    predicted_attention_seconds: float | None = None
    predicted_stall_seconds: float | None = None
    host_bytes: int = 0
    device_bytes: int = 0
    started_at: float = 0.0
    since_start_seconds: float = 0.0
    spared_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    worker: str = ""

    @property
    def prefill_share(self) -> float:
        """The fraction of prefill in the pass, from 0 to 1: its prompt tokens divided by all its tokens."""
        if self.phase == "mixed":
            return self.prompt_tokens / self.real_tokens
        return 1.0 if self.phase == "prefill" else 0.0

    @property
    def decode_issued(self) -> int:
        """The number of tokens issued by decode. Prefill issues the first token of each sequence."""
        if self.phase == "mixed":
            return self.real_tokens - self.prompt_tokens
        return self.issued_tokens if self.phase == "decode" else 0

    @property
    def decode_useful(self) -> float:
        return self.useful_tokens * self.decode_issued / self.issued_tokens if self.issued_tokens else 0.0


PASS_COUNTS = ("num_sequences", "real_tokens", "padded_tokens", "prompt_tokens", "issued_tokens", "useful_tokens")
PASS_SECONDS = ("seconds", "compute_seconds", "load_seconds", "stall_seconds", "copy_seconds", "attention_seconds")
PASS_HITS = ("prefetch_hits", "prefetch_misses", "experts_total", "experts_hit", "experts_read")
PASS_BYTES = (
    *("bytes_read_disk", "bytes_copied_device", "bytes_copied_host", "bytes_written_disk"),
    *("peak_host_bytes", "peak_device_bytes"),
)
PREDICTED_SECONDS = tuple(f"predicted_{name}" for name in PASS_SECONDS)
STAGE_SECONDS = tuple(f"stage_{name}_seconds" for name in ("read", "copy", "compute", "attention", "stall"))
LATER_COLUMNS = ("drafted_tokens", "accepted_tokens")  # runs of version 0.1.0 lack them
THROUGHPUT_SCHEMA = pa.schema(
    [
        pa.field("block", pa.int32(), nullable=False),
        pa.field("pass_index", pa.int32(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
        *(pa.field(name, pa.int64(), nullable=False) for name in PASS_COUNTS),
        *(pa.field(name, pa.float64(), nullable=False) for name in PASS_SECONDS),
        *(pa.field(name, pa.int64(), nullable=False) for name in (*PASS_HITS, *PASS_BYTES)),
        *(pa.field(name, pa.list_(pa.float64()), nullable=False) for name in STAGE_SECONDS),
        *(pa.field(name, pa.float64(), nullable=True) for name in PREDICTED_SECONDS),
        pa.field("operational", pa.string(), nullable=False),
        pa.field("host_bytes", pa.int64()),
        pa.field("device_bytes", pa.int64()),
        pa.field("started_at", pa.float64()),
        pa.field("since_start_seconds", pa.float64()),
        pa.field("spared_tokens", pa.int64()),
        pa.field("drafted_tokens", pa.int64()),
        pa.field("accepted_tokens", pa.int64()),
        pa.field("worker", pa.string()),
    ]
)


def without_stages(row: PassRow) -> PassRow:
    """The pass without the lists of times by stage, which summaries do not need."""
    return replace(row, **{name: [] for name in STAGE_SECONDS})


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of this process: `at` in Unix seconds, `clock` as time.monotonic(). `worker`: the process, as JSON."""

    at: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.monotonic)
    worker: str = field(default_factory=lambda: canonical_json(asdict(this_process())))

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.clock


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Seconds of a phase by resource. `attention_seconds`: if measured, of all attention; if predicted, of attention on
    the CPU only."""

    seconds: float
    compute_seconds: float
    load_seconds: float
    copy_seconds: float
    attention_seconds: float
    stall_seconds: float

    @staticmethod
    def from_phase(phase: PhaseTime) -> "PhaseTimes":
        busy = phase.busy_seconds
        return PhaseTimes(
            seconds=phase.seconds,
            compute_seconds=busy[Resource.compute],
            load_seconds=busy[Resource.disk],
            copy_seconds=busy[Resource.host_to_device] + busy[Resource.device_to_host],
            attention_seconds=busy[Resource.cpu_attention],
            stall_seconds=phase.stall_seconds,
        )

    def scale(self, factor: float) -> "PhaseTimes":
        return PhaseTimes(**{name: factor * value for name, value in vars(self).items()})

    def add(self, other: "PhaseTimes") -> "PhaseTimes":
        return PhaseTimes(**{name: value + vars(other)[name] for name, value in vars(self).items()})


def mean_pass(prediction: Prediction, prefill_share: float) -> PhaseTimes:
    """The predicted times of an average pass, of which the fraction `prefill_share` is prefill."""

    def mean(phase: PhaseTime) -> PhaseTimes:
        return PhaseTimes.from_phase(phase).scale(1 / phase.num_passes if phase.num_passes else 0.0)

    prefill, decode = mean(prediction.prefill), mean(prediction.decode)
    return prefill.scale(prefill_share).add(decode.scale(1 - prefill_share))


SEPARATE_FIELDS = ("block", "index", "phase", "counts", "times")  # fields of PassRecord that a PassRow has otherwise


def pass_row(record: PassRecord, pass_index: int, prediction: Prediction | None, start: Start) -> PassRow:
    """Converts the engine's record of a pass that has just ended. `prediction`: of the whole run."""
    times = record.times
    lists = {f"stage_{name}": list(value) for name, value in vars(times).items() if isinstance(value, tuple)}
    sums = {name: value for name, value in vars(times).items() if isinstance(value, int)}
    row = PassRow(
        pass_index=pass_index,
        phase=record.phase.value,
        started_at=start.at,
        since_start_seconds=start.seconds,
        worker=start.worker,
        load_seconds=sum(times.read_seconds),
        copy_seconds=sum(times.copy_seconds),
        compute_seconds=sum(times.compute_seconds),
        attention_seconds=sum(times.attention_seconds),
        stall_seconds=sum(times.stall_seconds),
        **vars(record.counts),
        **sums,
        **lists,
        **{name: value for name, value in vars(record).items() if name not in SEPARATE_FIELDS},
    )
    if prediction is None:
        return row
    predicted = vars(mean_pass(prediction, row.prefill_share))
    return replace(row, **{f"predicted_{name}": value for name, value in predicted.items()})
