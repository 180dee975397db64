"""What a run is asked to do: typed, frozen, validated. Hydra's YAML groups mirror these classes one to one.

Resolving a config (which dtype `auto` means, how many layers stay resident) yields a plan, never a changed config.
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
    """Where the weights live while the run goes on. `auto`: as many as fit where compute happens, of the others as many
    as fit in host memory, and the rest on disk."""

    auto = "auto"
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class KVTier(Enum):
    """Where keys and values live between the passes. `auto`: where they fit, the fastest first."""

    auto = "auto"
    device = "device"
    cpu = "cpu"
    nvme = "nvme"


class KVDType(Enum):
    """How keys and values are kept. `auto`: as they are computed, which loses nothing. `bfloat16` and `float8` (E4M3)
    round each number; `int8` and `int4` quantise each page once it is full."""

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
    """Whether experts are read one by one: `hit` those that a token visits, once that is known; `all` every one,
    whether visited or not, before it is known; `auto` the one that reads least within the budget."""

    auto = "auto"
    off = "off"
    hit = "hit"
    all = "all"


class Dequantize(Enum):
    """Where an accelerator turns stored weights, such as packed ones, into numbers that it multiplies: `stage` into a
    scratch area, once for all micro-batches that pass a layer; `product` inside of each product; `auto` the first where
    the area fits."""

    auto = "auto"
    stage = "stage"
    product = "product"


class Lanes(Enum):
    """How a micro-batch goes through the model. `auto`: packed where the class allows it."""

    auto = "auto"
    packed = "packed"
    padded = "padded"


class PolicyKind(Enum):
    fixed = "fixed"
    auto = "auto"
    hrm = "hrm"  # searched, however short the run is


class Admission(Enum):
    """When waiting requests enter. `wave`: a block runs to its end; `continuous`: as soon as others have finished."""

    wave = "wave"
    continuous = "continuous"


MAX_MEMORY_GIB, MAX_THREADS = 1 << 20, 1024
TINY, RANDOM = "tiny", "random"  # the model that comes along, and the one that is drawn on the spot
ANY = "hf"  # whatever `model.path` holds: no name of a model
BUILT_IN = (TINY, RANDOM)


class Attention(Enum):
    """Where decode attention runs: where the model computes, or on the CPU's workers, beside the keys and values."""

    device = "device"
    cpu = "cpu"


class FeedForward(Enum):
    """Where experts that lie in host memory are multiplied: all of them where the model computes, or some beside their
    weights, on the CPU, while the others are brought."""

    device = "device"
    cpu = "cpu"


class SharePrefixes(Enum):
    """Whether tokens that several prompts of a block begin with are computed once: `auto`, where that is exact."""

    auto = "auto"
    off = "off"


class DType(Enum):
    """Compute precision. `auto`: float32 on a CPU, on an accelerator the checkpoint's own, or float16 for bfloat16
    where it has no units for that."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Quantize(Enum):
    """How matrices are rounded while they are loaded: as `weightstream pack` rounds them with that `format`."""

    int8 = "int8"
    int4 = "int4"
    fp8 = "fp8"


class Pooling(Enum):
    """What a prompt's embedding is made of: the hidden state of its last token, of its first, or the mean of all."""

    last = "last"
    mean = "mean"
    cls = "cls"


class Readout(Enum):
    """What is read off a prompt: one vector, the classes of a classifier, or what fits the places of its masks."""

    embedding = "embedding"
    classes = "classes"
    masks = "masks"


class SelfCheck(Enum):
    """Whether an excerpt of the model is compared with transformers' own code before a run. `auto`: of model types that
    are not proven, and where it costs next to nothing; `full`: always, with all layers if memory has room for them."""

    auto = "auto"
    off = "off"
    full = "full"


class Parallelism(Enum):
    """How processes compute a run: `one` alone; or several ranks, where with `sharded` each reads an equal share of a
    layer and computes its part of the rows, with `tensor` has an equal share of each matrix and of the KV heads, and
    with `pipeline` has some of the layers."""

    one = "one"
    sharded = "sharded"
    tensor = "tensor"
    pipeline = "pipeline"


class Gather(Enum):
    """How the shares of a layer come together, with `sharded`: in `memory` that all ranks of a machine see, or by a
    `collective` of ranks each of which holds the weights by itself. `auto`: the first where all are on one machine."""

    auto = "auto"
    memory = "memory"
    collective = "collective"


class DividedExperts(Enum):
    """What a rank has of a layer's experts, with `tensor`: `rows` of the matrices of each, or some of them `whole`.
    `auto`: whole where that is less to send, or rows cannot be told apart."""

    auto = "auto"
    rows = "rows"
    whole = "whole"


class Verify(Enum):
    """Which bytes of the weight files a run is bound to. `sampled`: headers and some of each file; `full`: all."""

    sampled = "sampled"
    full = "full"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which checkpoint. `path`: a local directory, a GGUF file, the URL of either, or a hub id. Of the two that need
    none, `tiny` is a small Llama trained for a few tasks, which comes along, and `random` one whose weights are drawn
    on the spot. `quantize`: of what is read once and then stays. `compile`: on an accelerator, steps between products
    run as kernels that torch.compile makes. `graphs`: on a CUDA device, decode passes are recorded and replayed."""

    name: str = TINY
    path: str | None = None
    revision: str | None = None
    tokenizer: str | None = None  # null: beside the weights
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
        """How to have once what `quantize` makes at each start."""
        name = self.quantize.value if self.quantize is not None else "int8"
        return f"weightstream pack model.path={self.path or 'DIR'} out=OUT format={name}, then model.path=OUT"

    @staticmethod
    def from_name(text: str) -> "ModelConfig":
        """The model that a directory, a GGUF file or a hub id names, or `tiny` or `random`, which need no files."""
        require(bool(text.strip()), "model is empty: name a directory, a GGUF file or a hub id")
        return ModelConfig(name=text) if text in BUILT_IN else ModelConfig(name=PurePath(text).name or text, path=text)


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Where weights live and how much memory the run may use. A null budget means all that is free at the start."""

    tier: TextField[Tier] = enum_field(Tier.auto)
    device_memory_gib: float | None = None
    host_memory_gib: float | None = None
    resident_layers: int | None = None  # null: as many as fit beside the block
    direct_io: bool = True
    reader_threads: int = 4
    read_chunk_mib: int = 16
    expert_paging: TextField[ExpertPaging] = enum_field(ExpertPaging.auto)
    dequantize: TextField[Dequantize] = enum_field(Dequantize.auto)
    cache_dir: str | None = None  # converted weights, only where a checkpoint's layout cannot be read in place

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
    """Where keys and values live, and how. Off the device, those of a layer pass through `num_slots` slots, a lane at
    a time: three let one be computed on while the next is fetched and the one before is stored."""

    tier: TextField[KVTier] = enum_field(KVTier.auto)
    dtype: TextField[KVDType] = enum_field(KVDType.auto)
    device_fraction: float | None = None  # of the layers that have any; null: as many as fit beside the weights
    num_slots: int = 3
    directory: str | None = None  # of the unnamed file of the nvme tier; null: the system's directory for such files

    def __post_init__(self) -> None:
        fraction = self.device_fraction
        require(fraction is None or 0 <= fraction <= 1, f"kv.device_fraction must be 0 to 1, got {fraction}")
        require(1 <= self.num_slots <= 64, f"kv.num_slots must be 1 to 64, got {self.num_slots}")
        require(self.directory is None or bool(self.directory.strip()), "kv.directory is empty: name one, or null")


@dataclass(frozen=True, kw_only=True)
class PrefetchConfig:
    """How far reads run ahead of compute. `depth`: stages for lookahead; `block_layers`: stages per block."""

    kind: TextField[Prefetch] = enum_field(Prefetch.lookahead)
    depth: int = 1
    block_layers: int = 2

    def __post_init__(self) -> None:
        require(1 <= self.depth <= 64, f"prefetch.depth must be 1 to 64 layers, got {self.depth}")
        require(1 <= self.block_layers <= 64, f"prefetch.block_layers must be 1 to 64 layers, got {self.block_layers}")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """A block is `num_micro_batches` micro-batches of at most `micro_batch_size` sequences.

    What is None is chosen: with `fixed` by the rules of `runtime/plan/placement/defaults.py`, with `auto` by a search
    where that pays and by those rules elsewhere, with `hrm` by a search. `pin` names an earlier choice of a search,
    which is then taken."""

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
            why = f"policy.schedule={self.schedule.value} has the CPU attend beside compute: set policy.attention=cpu"
            require(self.attention is Attention.cpu, why)


@dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """How many processes compute a run, and what each of them does."""

    way: TextField[Parallelism] = enum_field(Parallelism.one)
    gather: TextField[Gather] = enum_field(Gather.auto)
    experts: TextField[DividedExperts] = enum_field(DividedExperts.auto)

    def __post_init__(self) -> None:
        for key, value, way in (
            ("gather", self.gather, Parallelism.sharded),
            ("experts", self.experts, Parallelism.tensor),
        ):
            require(
                self.way is way or value.value == "auto",
                f"devices.{key}={value.value} says nothing of devices={self.way.value}: it is for devices={way.value}",
            )

    def for_parallelism(self, way: Parallelism) -> "DevicesConfig":
        """These with another way, and of the rest what is for it."""
        return self if way is self.way else DevicesConfig(way=way)


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """The compute device and its threads, and how fast it is where that is known; `links` join it with others.
    `device: auto` takes an accelerator when torch finds one."""

    name: str = "auto"
    device: str = "auto"
    num_threads: int | None = None  # null: torch's own choice
    sheet: DataSheet | None = None
    rates: MeasuredRates | None = None  # null, with sheet: measured in the run
    links: LinksConfig | None = None  # null: devices of one host, which meet in its memory

    def __post_init__(self) -> None:
        require(
            self.sheet is None or self.rates is None,
            f"machine.sheet and machine.rates are both given for {self.name}: keep the one, and set the other to null",
        )
        threads = self.num_threads
        is_sound = threads is None or 1 <= threads <= MAX_THREADS
        require(is_sound, f"machine.num_threads must be 1 to {MAX_THREADS:,}, got {threads}")


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """All that `Runtime` needs; a job adds a data set and an output directory.

    A text for a group is what it is on the command line: `offload="nvme"` is `OffloadConfig(tier="nvme")`, and so for
    `kv`, `prefetch` and `policy`. A text for `model` is a directory, a GGUF file, a hub id, `tiny` or `random`.
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
        """What a plan goes by: weights that are rounded while they are read stay, of `auto` too."""
        is_open = self.offload.tier is Tier.auto and self.model.quantize is not None
        return Tier.cpu if is_open else self.offload.tier


def require_beams_fit(policy: PolicyConfig, sampling: SamplingConfig) -> None:
    """Raises ConfigError where the beams of a search could not be computed side by side."""
    num_beams, size = sampling.num_beams or 1, policy.micro_batch_size
    if num_beams == 1:
        return
    require(
        size is None or size >= num_beams,
        f"sampling.num_beams={num_beams} sequences share a micro-batch, and policy.micro_batch_size={size} has no room "
        f"for them: raise it to {num_beams}, or leave it open",
    )
    require(
        policy.admission is Admission.wave,
        f"sampling.num_beams={num_beams} sequences take every step together, and policy.admission="
        f"{policy.admission.value} admits one at a time: set policy.admission=wave, or sampling.num_beams=1",
    )


def require_groups_agree(policy: PolicyConfig, prefetch: PrefetchConfig, offload: OffloadConfig) -> None:
    """Raises ConfigError where the groups contradict each other, whatever the model and the machine."""
    order, is_off = policy.schedule, prefetch.kind is Prefetch.off and offload.tier is Tier.nvme
    if order is not None and order.style.num_slots > 1:
        require(
            not is_off,
            f"policy.schedule={order.value} reads a stage while the one before it is computed, which prefetch=off "
            f"forbids: prefetch=lookahead, or policy.schedule={PLAIN.value}",
        )
