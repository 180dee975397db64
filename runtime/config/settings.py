"""The settings of a run: typed, frozen, validated. Hydra's YAML groups mirror these classes one to one.

The plan resolves `auto` and null values; a config never changes.
"""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath

from ..errors import require
from .orders import PLAIN
from .orders import Order as Order
from .profiles import DataSheet, LinksConfig, MeasuredRates
from .sampling import SamplingConfig
from .sampling import SamplingOverrides as SamplingOverrides
from .texts import TextField, enum_field, group_field, optional_enum_field, require_plain_url


class Tier(Enum):
    """The memory that holds the weights during a run. `auto` fills the compute device first, then host memory, then
    disk."""

    auto = "auto"
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class KVTier(Enum):
    """The memory that holds the KV cache between passes. `auto`: the fastest with enough room."""

    auto = "auto"
    device = "device"
    cpu = "cpu"
    nvme = "nvme"


class KVDType(Enum):
    """The storage dtype of the KV cache. `auto`: the compute dtype, without loss. `bfloat16` and `float8` (E4M3) round
    each number; `int8` and `int4` quantize each page once it is full."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float8 = "float8"
    int8 = "int8"
    int4 = "int4"

    @property
    def is_quantized(self) -> bool:
        return self in (KVDType.int8, KVDType.int4)


class Prefetch(Enum):
    off = "off"
    lookahead = "lookahead"
    block = "block"
    cost_aware = "cost_aware"


class ExpertPaging(Enum):
    """Reading of single experts. `hit`: those that tokens are routed to, after routing; `all`: every expert, before
    routing; `auto`: the mode that reads least within the budget."""

    auto = "auto"
    off = "off"
    hit = "hit"
    all = "all"


class Dequantize(Enum):
    """Dequantization of stored weights on an accelerator. `stage`: once per layer into a scratch buffer, for all
    micro-batches; `product`: inside each matrix product; `auto`: `stage` if the buffer fits."""

    auto = "auto"
    stage = "stage"
    product = "product"


class Lanes(Enum):
    """The layout of a micro-batch in the model's forward. `auto`: packed if the class supports it."""

    auto = "auto"
    packed = "packed"
    padded = "padded"


class PolicyKind(Enum):
    fixed = "fixed"
    auto = "auto"
    hrm = "hrm"  # always by a search, even for a short run


class Admission(Enum):
    """Admission of waiting requests. `wave`: when a block has finished; `continuous`: when another request finishes."""

    wave = "wave"
    continuous = "continuous"


MAX_MEMORY_GIB, MAX_THREADS = 1 << 20, 1024
TINY, RANDOM = "tiny", "random"  # the bundled model, and one with random weights
ANY = "hf"  # any checkpoint at `model.path`
BUILT_IN = (TINY, RANDOM)


class Attention(Enum):
    """The processor for decode attention: the compute device, or CPU workers next to a KV cache in host memory."""

    device = "device"
    cpu = "cpu"


class FeedForward(Enum):
    """The processor for experts in host memory. `device`: the compute device for all; `cpu`: the CPU for some while the
    others are copied to the device."""

    device = "device"
    cpu = "cpu"


class SharePrefixes(Enum):
    """Prefix caching within a block: common prefixes of prompts are computed once. `auto`: if the result is exact."""

    auto = "auto"
    off = "off"


class DType(Enum):
    """Compute precision. `auto`: float32 on a CPU. On an accelerator: the checkpoint's dtype, or float16 instead of
    bfloat16 if the device has no bfloat16 units."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Quantize(Enum):
    """Quantization of matrices at load time, with the rounding of `weightstream pack format=...`."""

    int8 = "int8"
    int4 = "int4"
    fp8 = "fp8"


class Pooling(Enum):
    """Pooling of hidden states into an embedding: the last token's, the first token's (`cls`), or the mean."""

    last = "last"
    mean = "mean"
    cls = "cls"


class Readout(Enum):
    """The output of an encoding request: one vector, a classifier's logits, or tokens for the prompt's masks."""

    embedding = "embedding"
    classes = "classes"
    masks = "masks"


class SelfCheck(Enum):
    """The comparison of a model excerpt with transformers' own code before a run. `auto`: for unproven model types, and
    if it is nearly free; `full`: always, with all layers if they fit in memory."""

    auto = "auto"
    off = "off"
    full = "full"


class Parallelism(Enum):
    """Parallelism of processes. `one`: a single process. `sharded`: each rank reads an equal share of every layer and
    computes its part of the rows. `tensor`: each has a share of every matrix and of the KV heads. `pipeline`: each has
    some of the layers."""

    one = "one"
    sharded = "sharded"
    tensor = "tensor"
    pipeline = "pipeline"


class Gather(Enum):
    """Exchange of a layer's shares, with `sharded`. `memory`: in shared memory of one machine; `collective`: by
    collectives between ranks with separate copies; `auto`: `memory` if all ranks are on one machine."""

    auto = "auto"
    memory = "memory"
    collective = "collective"


class DividedExperts(Enum):
    """Division of a layer's experts among ranks, with `tensor`. `rows`: rows of every expert's matrices; `whole`: some
    entire experts; `auto`: `whole` if it sends less, or if rows cannot be split."""

    auto = "auto"
    rows = "rows"
    whole = "whole"


class Verify(Enum):
    """Coverage of the weight files by a run's fingerprint. `sampled`: headers and samples of each file; `full`: all
    bytes."""

    sampled = "sampled"
    full = "full"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The checkpoint. `path`: a local directory, a GGUF file, a URL of either, or a hub id. Two models need no path:
    `tiny`, a small bundled Llama, and `random`, with random weights. `quantize`: rounds weights at load time; they then
    stay in memory. `compile`: on an accelerator, compiles the operations between products with torch.compile.
    `graphs`: on a CUDA device, captures decode passes as CUDA graphs."""

    name: str = TINY
    path: str | None = None
    revision: str | None = None
    tokenizer: str | None = None  # null: the checkpoint's
    dtype: TextField[DType] = enum_field(DType.auto)
    quantize: TextField[Quantize | None] = optional_enum_field(Quantize)
    lanes: TextField[Lanes] = enum_field(Lanes.auto)
    self_check: TextField[SelfCheck] = enum_field(SelfCheck.auto)
    verify: TextField[Verify] = enum_field(Verify.sampled)
    compile: bool = False
    graphs: bool = False

    def __post_init__(self) -> None:
        require(bool(self.name), "model.name is empty")
        require_plain_url(self.path, "model.path")
        require_plain_url(self.tokenizer, "model.tokenizer")

    @property
    def pack_command(self) -> str:
        """The command that stores the quantized weights once, instead of quantizing at each start."""
        name = self.quantize.value if self.quantize is not None else "int8"
        return f"weightstream pack model.path={self.path or 'DIR'} out=OUT format={name}, then model.path=OUT"

    @staticmethod
    def from_name(text: str) -> "ModelConfig":
        """Returns the config for a directory, a GGUF file, a hub id, `tiny` or `random`."""
        require(bool(text.strip()), "model is empty: set it to a directory, a GGUF file or a hub id")
        return ModelConfig(name=text) if text in BUILT_IN else ModelConfig(name=PurePath(text).name or text, path=text)


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Placement of weights, and memory budgets. A budget of None is all memory that is free at the start."""

    tier: TextField[Tier] = enum_field(Tier.auto)
    device_memory_gib: float | None = None
    host_memory_gib: float | None = None
    resident_layers: int | None = None  # null: as many as fit in addition to the block
    direct_io: bool = True
    reader_threads: int = 4
    read_chunk_mib: int = 16
    expert_paging: TextField[ExpertPaging] = enum_field(ExpertPaging.auto)
    dequantize: TextField[Dequantize] = enum_field(Dequantize.auto)
    cache_dir: str | None = None  # for converted weights, if a checkpoint's layout cannot be read directly

    def __post_init__(self) -> None:
        for key in ("device_memory_gib", "host_memory_gib"):
            value = getattr(self, key)
            is_sound = value is None or 0 < value <= MAX_MEMORY_GIB
            require(is_sound, f"offload.{key} must be above 0 and {MAX_MEMORY_GIB:,} GiB at most, got {value}")
        layers = self.resident_layers
        require(layers is None or layers >= 0, f"offload.resident_layers must be 0 or more, got {layers}")
        require(1 <= self.reader_threads <= 64, f"offload.reader_threads must be 1 to 64, got {self.reader_threads}")
        require(1 <= self.read_chunk_mib <= 64, f"offload.read_chunk_mib must be 1 to 64, got {self.read_chunk_mib}")


@dataclass(frozen=True, kw_only=True)
class KVConfig:
    """Placement and dtype of the KV cache. Outside of the device, a layer's KV passes through `num_slots` slots, one
    lane at a time. With three, one is in use while the next is fetched and the previous is stored."""

    tier: TextField[KVTier] = enum_field(KVTier.auto)
    dtype: TextField[KVDType] = enum_field(KVDType.auto)
    device_fraction: float | None = None  # of layers with KV; null: as many as fit in addition to the weights
    num_slots: int = 3
    directory: str | None = None  # of the nvme tier's anonymous file; null: the system's temporary directory

    def __post_init__(self) -> None:
        fraction = self.device_fraction
        require(fraction is None or 0 <= fraction <= 1, f"kv.device_fraction must be 0 to 1, got {fraction}")
        require(1 <= self.num_slots <= 64, f"kv.num_slots must be 1 to 64, got {self.num_slots}")
        require(self.directory is None or bool(self.directory.strip()), "kv.directory is empty: set a path or null")


@dataclass(frozen=True, kw_only=True)
class PrefetchConfig:
    """Weight reads ahead of compute. `depth`: stages for lookahead; `block_layers`: stages per block."""

    kind: TextField[Prefetch] = enum_field(Prefetch.lookahead)
    depth: int = 1
    block_layers: int = 2

    def __post_init__(self) -> None:
        require(1 <= self.depth <= 64, f"prefetch.depth must be 1 to 64 layers, got {self.depth}")
        require(1 <= self.block_layers <= 64, f"prefetch.block_layers must be 1 to 64 layers, got {self.block_layers}")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The batching policy. A block is `num_micro_batches` micro-batches of at most `micro_batch_size` sequences.

    The planner replaces None: with `fixed` by rules in `runtime/plan/placement/defaults.py`, with `auto` by a search
    if it pays off, with `hrm` always by a search. `pin` reuses the result of an earlier search.
    """

    kind: TextField[PolicyKind] = enum_field(PolicyKind.auto)
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    admission: TextField[Admission] = enum_field(Admission.wave)
    schedule: TextField[Order | None] = optional_enum_field(Order)
    attention: TextField[Attention | None] = optional_enum_field(Attention)
    feedforward: TextField[FeedForward | None] = optional_enum_field(FeedForward)
    prefill_chunk_tokens: int | None = None
    share_prefixes: TextField[SharePrefixes] = enum_field(SharePrefixes.auto)
    pin: str | None = None

    def __post_init__(self) -> None:
        for key in ("micro_batch_size", "num_micro_batches", "prefill_chunk_tokens"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"policy.{key} must be 1 or more, got {value}")
        if self.schedule is not None and self.schedule.style.needs_cpu_attention:
            problem = f"policy.schedule={self.schedule.value} needs attention on the CPU: set policy.attention=cpu"
            require(self.attention is Attention.cpu, problem)


@dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """The parallelism of a run."""

    way: TextField[Parallelism] = enum_field(Parallelism.one)
    gather: TextField[Gather] = enum_field(Gather.auto)
    experts: TextField[DividedExperts] = enum_field(DividedExperts.auto)

    def __post_init__(self) -> None:
        options = (("gather", self.gather, Parallelism.sharded), ("experts", self.experts, Parallelism.tensor))
        for key, value, needed in options:
            require(
                self.way is needed or value.value == "auto",
                f"devices.{key}={value.value} has no effect with devices={self.way.value}: set devices={needed.value}",
            )

    def for_parallelism(self, parallelism: Parallelism) -> "DevicesConfig":
        """Returns a config for another parallelism, with default options."""
        return self if parallelism is self.way else DevicesConfig(way=parallelism)


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """The compute device, its threads, its rates if known, and its links to others. `device: auto`: an accelerator if
    torch finds one."""

    name: str = "auto"
    device: str = "auto"
    num_threads: int | None = None  # null: torch's default
    sheet: DataSheet | None = None
    rates: MeasuredRates | None = None  # null, and no sheet: measured in the run
    links: LinksConfig | None = None  # null: devices of one host, connected through its memory

    def __post_init__(self) -> None:
        require(
            self.sheet is None or self.rates is None,
            f"machine.sheet and machine.rates exclude each other ({self.name}): set one of them to null",
        )
        threads = self.num_threads
        is_sound = threads is None or 1 <= threads <= MAX_THREADS
        require(is_sound, f"machine.num_threads must be 1 to {MAX_THREADS:,}, got {threads}")


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """All settings of `Runtime`; a job adds a data set and an output directory.

    A group may be a str, as on the command line: `offload="nvme"` is `OffloadConfig(tier="nvme")`; likewise `kv`,
    `prefetch` and `policy`. A str for `model` is a directory, a GGUF file, a hub id, `tiny` or `random`.
    """

    model: TextField[ModelConfig] = group_field(ModelConfig(), ModelConfig.from_name)
    offload: TextField[OffloadConfig] = group_field(OffloadConfig(), lambda text: OffloadConfig(tier=text))
    kv: TextField[KVConfig] = group_field(KVConfig(), lambda text: KVConfig(tier=text))
    prefetch: TextField[PrefetchConfig] = group_field(PrefetchConfig(), lambda text: PrefetchConfig(kind=text))
    policy: TextField[PolicyConfig] = group_field(PolicyConfig(), lambda text: PolicyConfig(kind=text))
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)

    def __post_init__(self) -> None:
        require_groups_agree(self.policy, self.prefetch, self.offload)

    @property
    def tier(self) -> Tier:
        """The effective tier: `auto` becomes `cpu` with `model.quantize`, since quantized weights stay in memory."""
        is_open = self.offload.tier is Tier.auto and self.model.quantize is not None
        return Tier.cpu if is_open else self.offload.tier


def require_beams_fit(policy: PolicyConfig, sampling: SamplingConfig) -> None:
    """Raises ConfigError if the beams of one search cannot run in one micro-batch."""
    num_beams, size = sampling.num_beams or 1, policy.micro_batch_size
    if num_beams == 1:
        return
    require(
        size is None or size >= num_beams,
        f"policy.micro_batch_size={size} is below sampling.num_beams={num_beams}; all beams run in one micro-batch: "
        f"set policy.micro_batch_size to {num_beams} or null",
    )
    require(
        policy.admission is Admission.wave,
        f"sampling.num_beams={num_beams} is not supported with policy.admission={policy.admission.value}: "
        "set policy.admission=wave, or sampling.num_beams=1",
    )


def require_groups_agree(policy: PolicyConfig, prefetch: PrefetchConfig, offload: OffloadConfig) -> None:
    """Raises ConfigError if groups contradict each other, independent of model and machine."""
    order, is_off = policy.schedule, prefetch.kind is Prefetch.off and offload.tier is Tier.nvme
    if order is not None and order.style.num_slots > 1:
        require(
            not is_off,
            f"policy.schedule={order.value} reads a stage during the previous one, which prefetch=off forbids: set "
            f"prefetch=lookahead, or policy.schedule={PLAIN.value}",
        )
