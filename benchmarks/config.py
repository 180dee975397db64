"""The settings of `jobs.bench`; mirrors conf/bench.yaml."""

from dataclasses import dataclass, field
from enum import Enum

from jobs.config.settings import LogLevel
from runtime.config.settings import Gather, ModelConfig, require
from runtime.plan.placement.defaults import MICRO_BATCH_SIZE

from .contenders import CONTENDERS, PEERS, PREDICTED_CONTENDERS, PREFIX_CONTENDERS, Contender, OwnContender, Peer
from .gpu.config import GpuConfig
from .instruction_sets import Isa
from .task import BenchmarkTask


class Suite(Enum):
    """The suites of `jobs.bench`; conf/bench.yaml explains each."""

    speed = "speed"
    predictions = "predictions"
    policies = "policies"
    scale = "scale"
    blocks = "blocks"
    floor = "floor"
    evaluation = "evaluation"
    prefixes = "prefixes"
    devices = "devices"
    larger_than_memory = "larger_than_memory"
    gpu = "gpu"


class Form(Enum):
    """A model as published, or as `weightstream pack` stores it."""

    published = "published"
    lossless = "lossless"
    int8 = "int8"
    int4 = "int4"
    fp8 = "fp8"


@dataclass(frozen=True, kw_only=True)
class LargerConfig:
    """Settings of `suite=larger_than_memory`, with a model of `num_layers` layers of Mixtral 8x7B (2.7 GiB each).
    `architecture` overrides keys of Mixtral's config. The model and its packed forms are kept in `directory`, or
    deleted after the benchmark if it is None."""

    num_layers: int = 12
    host_memory_gib: float = 8.0
    forms: list[Form] = field(default_factory=lambda: [Form.published, Form.lossless, Form.int8, Form.int4])
    peers: list[Contender] = field(default_factory=lambda: [Contender.llama_cpp_mmap_q8_0])
    directory: str | None = None
    architecture: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.num_layers >= 1, f"larger.num_layers must be 1 or more, got {self.num_layers}")
        require(self.host_memory_gib > 0, f"larger.host_memory_gib must be above 0, got {self.host_memory_gib}")
        require(bool(self.forms), "larger.forms is empty: name at least one")
        wrong = [contender.value for contender in self.peers if contender not in PEERS]
        require(not wrong, f"larger.peers must be peers, got {', '.join(wrong)}")


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """Settings of `suite=devices`: the numbers of ranks (processes) to measure, how ranks exchange weights, and the
    limit of the read rate of each rank."""

    sizes: list[int] = field(default_factory=lambda: [1, 2, 4])
    gathers: list[Gather] = field(default_factory=lambda: [Gather.memory, Gather.collective])
    read_mb_per_second: float = 8.0

    def __post_init__(self) -> None:
        require(bool(self.sizes) and min(self.sizes) >= 1, f"ranks.sizes must be 1 or more each, got {self.sizes}")
        is_known = bool(self.gathers) and Gather.auto not in self.gathers
        require(is_known, "ranks.gathers must be memory, collective or both")
        rate = self.read_mb_per_second
        require(rate > 0, f"ranks.read_mb_per_second must be above 0 MB/s, got {rate}")


@dataclass(frozen=True, kw_only=True)
class ProductsConfig:
    """The matrix products of `suite=floor`: x of shape (rows, inputs) times weights of shape (outputs, inputs)."""

    outputs: int = 8192
    inputs: int = 2048
    rows: list[int] = field(default_factory=lambda: [1, 4, 8, 16, 64, 256, 512])

    def __post_init__(self) -> None:
        for key in ("outputs", "inputs"):
            size = getattr(self, key)
            require(size >= 128 and size % 128 == 0, f"products.{key} must be a multiple of 128, got {size}")
        require(bool(self.rows) and min(self.rows) >= 1, f"products.rows must be 1 or more each, got {self.rows}")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """All settings of `jobs.bench`; conf/bench.yaml explains each."""

    model: ModelConfig = field(default_factory=ModelConfig)
    suite: Suite = Suite.speed
    checkpoints: list[str] = field(default_factory=list)
    blocks: list[int] = field(default_factory=lambda: [8, 64, 256])
    contenders: list[Contender] = field(default_factory=lambda: [Contender.nvme, Contender.none])
    num_prompts: int = 64
    prompt_tokens: int = 60
    num_new_tokens: int = 32
    ignore_eos: bool = True
    rounds: int = 3
    batch_size: int | None = None
    batch_sizes: dict[Contender, int] = field(default_factory=dict)
    peer_minutes: float | None = None
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    weight_share: float = 0.25
    num_threads: int = 2
    isa: Isa | None = None
    questions: str | None = None
    tokenizer: str | None = None
    kv_seats: int = 8
    rows: dict[Contender, int] = field(default_factory=dict)
    products: ProductsConfig = field(default_factory=ProductsConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)
    larger: LargerConfig = field(default_factory=LargerConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    name: str = "bench"
    output_root: str = "outputs"
    log_level: LogLevel = LogLevel.warning

    def __post_init__(self) -> None:
        counts = ("num_prompts", "prompt_tokens", "num_new_tokens", "rounds", "num_threads", "kv_seats")
        for key in (*counts, "batch_size", "micro_batch_size", "num_micro_batches"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"{key} must be 1 or more, got {value}")
        require(
            set(self.batch_sizes) <= set(PEERS) and all(size >= 1 for size in self.batch_sizes.values()),
            "batch_sizes must be 1 or more each, for peers only, got "
            + ", ".join(f"{each.value}: {size}" for each, size in self.batch_sizes.items()),
        )
        require(
            all(1 <= count <= self.num_prompts for count in self.rows.values()),
            f"rows must be 1 to num_prompts={self.num_prompts}, got "
            + ", ".join(f"{each.value}: {count}" for each, count in self.rows.items()),
        )
        require(
            self.suite is not Suite.prefixes or set(self.contenders) <= set(PREFIX_CONTENDERS),
            f"contenders: suite=prefixes allows {', '.join(each.value for each in PREFIX_CONTENDERS)} only",
        )
        limit = self.peer_minutes
        require(limit is None or limit > 0, f"peer_minutes must be above 0, or null for no limit, got {limit}")
        require(bool(self.contenders), "contenders is empty: name at least one")
        require(
            self.ignore_eos or not set(PEERS) & set(self.contenders),
            "ignore_eos=false samples with Weightstream's own seeds: remove these from contenders: "
            + ", ".join(each.value for each in PEERS if each in self.contenders),
        )
        require(
            self.suite not in (Suite.predictions, Suite.floor) or set(self.contenders) <= set(PREDICTED_CONTENDERS),
            f"contenders: suite={self.suite.value} allows only "
            + ", ".join(each.value for each in PREDICTED_CONTENDERS),
        )
        require(
            self.suite not in (Suite.predictions, Suite.blocks, Suite.floor) or self.num_new_tokens >= 2,
            f"num_new_tokens must be 2 or more with suite={self.suite.value}, which times decode passes; got "
            f"{self.num_new_tokens}",
        )
        require(bool(self.blocks) and min(self.blocks) >= 1, f"blocks must be 1 or more sequences, got {self.blocks}")
        require(
            self.suite is not Suite.speed or not self.checkpoints,
            "checkpoints has no effect with suite=speed: set model.path instead",
        )
        require(
            self.suite is not Suite.policies or self.num_prompts >= 4,
            f"num_prompts must be 4 or more with suite=policies, got {self.num_prompts}",
        )
        require(self.weight_share > 0, f"weight_share must be above 0, got {self.weight_share}")


def make_task(config: BenchConfig, contender: Contender, path: str, num_prompts: int) -> BenchmarkTask:
    """The measurement of `contender` with the checkpoint at `path`."""
    entry = CONTENDERS[contender]
    batch_size = config.batch_sizes.get(contender, config.batch_size)
    return BenchmarkTask(
        contender=contender.value,
        path=path,
        num_prompts=num_prompts,
        prompt_tokens=config.prompt_tokens,
        num_new_tokens=config.num_new_tokens,
        ignore_eos=config.ignore_eos,
        batch_size=batch_size if isinstance(entry, Peer) and entry.batch_sizes else None,
        micro_batch_size=config.micro_batch_size,
        num_micro_batches=config.num_micro_batches or -(-num_prompts // (config.micro_batch_size or MICRO_BATCH_SIZE)),
        weight_share=config.weight_share,
        num_threads=config.num_threads,
        schedule=(entry.schedule if isinstance(entry, OwnContender) else OwnContender.schedule).value,
        limit_minutes=config.peer_minutes if isinstance(entry, Peer) else None,
    )
