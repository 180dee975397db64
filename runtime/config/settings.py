"""The settings of a run as typed, frozen, validated dataclasses. Each Hydra group in conf/ has the keys of one class.

A plan contains the values that `auto` and null stand for; a config itself never changes.
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
    """The memory that holds the weights during a run. `none`: the compute device, without offloading; `cpu`: host
    memory; `nvme`: disk; `auto`: as many weights as fit on the device, then in host memory, and other weights on
    disk."""

    auto = "auto"
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class KVTier(Enum):
    """The memory that holds the KV cache between passes. `auto`: the fastest memory that is large enough."""

    auto = "auto"
    device = "device"
    cpu = "cpu"
    nvme = "nvme"


class KVDType(Enum):
    """The storage dtype of the KV cache. `auto`: the compute dtype, without loss. `bfloat16` and `float8` (E4M3) round
    each number; `int8` and `int4` quantize each page of 16 positions once it is full."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float8 = "float8"
    int8 = "int8"
    int4 = "int4"

    @property
    def is_quantized(self) -> bool:
        return self in (KVDType.int8, KVDType.int4)


class Prefetch(Enum):
    """Reading of weights ahead of compute. `off`: each layer when it is needed; `lookahead`: the next layers while one
    is computed; `block`: the next group of layers while a group is computed; `cost_aware`: `lookahead` with a depth
    chosen from measured times."""

    off = "off"
    lookahead = "lookahead"
    block = "block"
    cost_aware = "cost_aware"


class ExpertPaging(Enum):
    """Reading of experts one by one instead of whole layers. `hit`: after routing, only experts that tokens are routed
    to; `all`: before routing, every expert; `auto`: the mode that reads the fewest bytes within the budget."""

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
    """How settings of the policy that are None are chosen. `fixed`: by rules; `auto`: by a search, unless the run is
    short; `hrm`: always by a search."""

    fixed = "fixed"
    auto = "auto"
    hrm = "hrm"


class Admission(Enum):
    """When waiting requests are started. `wave`: a block of them when the previous block has finished; `continuous`:
    one when another request finishes."""

    wave = "wave"
    continuous = "continuous"


MAX_MEMORY_GIB, MAX_THREADS, MAX_DRAFT_TOKENS = 1 << 20, 1024, 15  # a KV page has 16 tokens
MTP = "mtp"  # `policy.draft_model` for the prediction head of the model's own checkpoint
TINY, RANDOM = "tiny", "random"  # the bundled model, and one with random weights
ANY = "hf"  # any checkpoint at `model.path`
BUILT_IN = (TINY, RANDOM)


class Attention(Enum):
    """The processor for decode attention: the compute device, or CPU workers next to a KV cache in host memory."""

    device = "device"
    cpu = "cpu"


class FeedForward(Enum):
    """The processor for experts in host memory. `device`: the compute device for all experts; `cpu`: the CPU for some
    experts, while other experts are copied to the device."""

    device = "device"
    cpu = "cpu"


class SharePrefixes(Enum):
    """Prefix caching within a block: common prefixes of prompts are computed once. `auto`: on if results stay exact."""

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
    """The output of an encoding request: a vector, a classifier's logits, or predicted tokens for the prompt's mask
    tokens."""

    embedding = "embedding"
    classes = "classes"
    masks = "masks"


class SelfCheck(Enum):
    """The comparison of a few layers with transformers' own code before a run. `auto`: for model types without a test
    in this project, and if it takes little time; `full`: always, with all layers if they fit in memory."""

    auto = "auto"
    off = "off"
    full = "full"


class Parallelism(Enum):
    """Parallelism of processes (ranks). `one`: a single process. `sharded`: each rank reads an equal share of every
    layer, gets the shares of other ranks, and computes its part of the prompts. `tensor`: each rank has a share of
    every matrix and of the KV heads. `pipeline`: each rank has some of the layers."""

    one = "one"
    sharded = "sharded"
    tensor = "tensor"
    pipeline = "pipeline"


class Gather(Enum):
    """How `sharded` ranks get the shares of a layer that other ranks read. `memory`: all read into shared memory of one
    machine; `collective`: by an all-gather into each rank's memory; `auto`: `memory` if all ranks are on one machine,
    else `collective`."""

    auto = "auto"
    memory = "memory"
    collective = "collective"


class DividedExperts(Enum):
    """How `tensor` ranks divide the experts of a layer. `rows`: each rank has rows of every expert's matrices; `whole`:
    each rank has some entire experts; `auto`: `whole` if it sends fewer bytes, or if rows cannot be split."""

    auto = "auto"
    rows = "rows"
    whole = "whole"


class Verify(Enum):
    """Which bytes of the weight files a run's fingerprint covers. `sampled`: headers and samples of each file; `full`:
    all bytes."""

    sampled = "sampled"
    full = "full"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The checkpoint, and how it is computed. `path`: a local directory, a GGUF file, a URL of one of these, or a hub
    id. Two models need no path: `tiny`, a small bundled Llama, and `random`, with random weights. `quantize`: rounds
    weights at load time; all weights then stay in memory. `compile`: on an accelerator, compiles the operations between
    matrix products with torch.compile. `graphs`: on a CUDA device, captures decode passes as CUDA graphs."""

    name: str = TINY
    path: str | None = None
    mirrors: tuple[str, ...] = ()  # copies of a local `path`, or other directories of its striped store
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
    """Placement of weights, and memory budgets. A budget of None means all memory that is free at the start."""

    tier: TextField[Tier] = enum_field(Tier.auto)
    device_memory_gib: float | None = None
    host_memory_gib: float | None = None
    resident_layers: int | None = None  # layers that stay in memory; null: as many as fit beside a block of sequences
    direct_io: bool = True
    reader_threads: int = 4
    read_chunk_mib: int = 16
    expert_paging: TextField[ExpertPaging] = enum_field(ExpertPaging.auto)
    kept_experts: int | None = None  # paged experts that stay in memory; null: as many as fit, if layers are null too
    dequantize: TextField[Dequantize] = enum_field(Dequantize.auto)
    gather_tables: bool | None = None  # read only looked-up rows of embedding tables; null: if memory is short
    cache_dir: str | None = None  # for converted weights, if a checkpoint's layout cannot be read directly

    def __post_init__(self) -> None:
        for key in ("device_memory_gib", "host_memory_gib"):
            value = getattr(self, key)
            is_sound = value is None or 0 < value <= MAX_MEMORY_GIB
            require(is_sound, f"offload.{key} must be above 0 and {MAX_MEMORY_GIB:,} GiB at most, got {value}")
        layers = self.resident_layers
        require(layers is None or layers >= 0, f"offload.resident_layers must be 0 or more, got {layers}")
        experts = self.kept_experts
        require(experts is None or experts >= 0, f"offload.kept_experts must be 0 or more, got {experts}")
        require(1 <= self.reader_threads <= 64, f"offload.reader_threads must be 1 to 64, got {self.reader_threads}")
        require(1 <= self.read_chunk_mib <= 64, f"offload.read_chunk_mib must be 1 to 64, got {self.read_chunk_mib}")


@dataclass(frozen=True, kw_only=True)
class KVConfig:
    """Placement and dtype of the KV cache. KV that is not on the device is copied through `num_slots` device buffers
    (slots), each for one layer of one micro-batch. With three slots, one is in use while the next is loaded and the
    previous is stored."""

    tier: TextField[KVTier] = enum_field(KVTier.auto)
    dtype: TextField[KVDType] = enum_field(KVDType.auto)
    device_fraction: float | None = None  # of layers with KV on the device; null: as many as fit beside the weights
    num_slots: int = 3
    directory: str | None = None  # of the nvme tier's anonymous file; null: the system's temporary directory

    def __post_init__(self) -> None:
        fraction = self.device_fraction
        require(fraction is None or 0 <= fraction <= 1, f"kv.device_fraction must be 0 to 1, got {fraction}")
        require(1 <= self.num_slots <= 64, f"kv.num_slots must be 1 to 64, got {self.num_slots}")
        require(self.directory is None or bool(self.directory.strip()), "kv.directory is empty: set a path or null")


@dataclass(frozen=True, kw_only=True)
class PrefetchConfig:
    """Weight reads ahead of compute. `depth`: layers read ahead by `lookahead`; `block_layers`: layers per group of
    `block`."""

    kind: TextField[Prefetch] = enum_field(Prefetch.lookahead)
    depth: int = 1
    block_layers: int = 2

    def __post_init__(self) -> None:
        require(1 <= self.depth <= 64, f"prefetch.depth must be 1 to 64 layers, got {self.depth}")
        require(1 <= self.block_layers <= 64, f"prefetch.block_layers must be 1 to 64 layers, got {self.block_layers}")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The batching policy. A block is `num_micro_batches` micro-batches of at most `micro_batch_size` sequences.

    The planner replaces None. With `kind=fixed`, it applies the rules in `runtime/plan/placement/defaults.py`. With
    `auto`, it searches for the fastest values, unless the run is short; with `hrm`, it always searches. `pin`: the
    name of an earlier search, whose result is used.
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
    draft_tokens: int | None = (
        None  # most tokens per sequence and decode pass that are guessed; null: those that cost little
    )
    draft_model: str | None = None  # guesses: `mtp`, or a small model of the family: directory, GGUF file or hub id
    pin: str | None = None

    def __post_init__(self) -> None:
        require(self.draft_model is None or bool(self.draft_model.strip()), "policy.draft_model is empty: set null")
        for key in ("micro_batch_size", "num_micro_batches", "prefill_chunk_tokens"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"policy.{key} must be 1 or more, got {value}")
        drafts = self.draft_tokens
        is_sound = drafts is None or 0 <= drafts <= MAX_DRAFT_TOKENS
        require(is_sound, f"policy.draft_tokens must be 0 to {MAX_DRAFT_TOKENS}, got {drafts}")
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
    """The compute device, its CPU threads, its rates if known, and its links to other devices. `device: auto`: an
    accelerator if torch finds one, else the CPU."""

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
    """All settings of `Runtime`. A job has more, such as a data set and an output directory.

    A group may be set to a str, as on the command line: `offload="nvme"` is `OffloadConfig(tier="nvme")`. The same
    applies to `kv`, `prefetch` and `policy`. A str for `model` is a directory, a GGUF file, a hub id, `tiny` or
    `random`.
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
        is_quantized = self.offload.tier is Tier.auto and self.model.quantize is not None
        return Tier.cpu if is_quantized else self.offload.tier


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
    """Raises ConfigError if settings of different groups contradict each other, whatever the model and machine."""
    order, reads_late = policy.schedule, prefetch.kind is Prefetch.off and offload.tier is Tier.nvme
    if order is not None and order.style.num_slots > 1:  # weight slots: one is filled while the other is in use
        require(
            not reads_late,
            f"policy.schedule={order.value} reads a stage during the previous one, which prefetch=off forbids: set "
            f"prefetch=lookahead, or policy.schedule={PLAIN.value}",
        )
