"""What can be combined in front of an accelerator, of models of each kind, and why some of it is refused."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from runtime.config.settings import (
    Admission,
    Attention,
    DType,
    ExpertPaging,
    KVConfig,
    KVTier,
    ModelConfig,
    OffloadConfig,
    Order,
    PolicyConfig,
    PolicyKind,
    Prefetch,
    PrefetchConfig,
    RuntimeConfig,
    SamplingConfig,
    Tier,
)
from runtime.plan.cost.rates import MachineRates

PROMPTS, NUM_NEW_TOKENS = (1, 2, 0, 4), (3, 1, 2, 2)  # of the reference's; rows leave their lanes one by one
CHUNK_TOKENS = 16  # the longest prompt is prefilled in pieces
TIERS = (Tier.none, Tier.cpu, Tier.nvme)  # auto is one of them here, or between: see test_mixed_tier.py
KVS = (
    KVConfig(),
    KVConfig(tier=KVTier.device),
    *(KVConfig(tier=tier, device_fraction=share) for tier in (KVTier.cpu, KVTier.nvme) for share in (0.5, 0.0)),
)
PREFETCHES = (
    PrefetchConfig(kind=Prefetch.off),
    PrefetchConfig(kind=Prefetch.lookahead, depth=1),
    PrefetchConfig(kind=Prefetch.lookahead, depth=2),
    PrefetchConfig(kind=Prefetch.block, block_layers=2),
    PrefetchConfig(kind=Prefetch.cost_aware),
)
RATES = MachineRates(
    disk_bytes_per_second=1e9, link_in_bytes_per_second=1e10, link_out_bytes_per_second=1e10,
    gemm_flops_per_second={1: 1e9}, attention_bytes_per_second=1e10, cpu_attention_bytes_per_second=1e10,
    prefill_attention_flops_per_second=1e10,
)  # fmt: skip
CGOPIPE = "policy.schedule=cgopipe needs attention on the CPU"
BESIDE = "policy.attention=cpu with an accelerator needs the KV cache in host memory"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model of two layers, none of whose stages stays in the device, or of four, of which one layer stays, with
    embeddings and head. What a search would not choose for it is left out."""

    family: str
    has_few_layers: bool = False
    orders: Sequence[Order] = (Order.zigzag, Order.flexgen, Order.cgopipe)
    attentions: Sequence[Attention] = tuple(Attention)
    pagings: Sequence[ExpertPaging] = (ExpertPaging.off,)
    prefetches: Sequence[PrefetchConfig] = PREFETCHES


KINDS = {
    "dense": Kind(family="llama", has_few_layers=True),
    "experts": Kind(
        family="mixtral",
        has_few_layers=True,
        orders=tuple(Order),
        pagings=(ExpertPaging.off, ExpertPaging.hit, ExpertPaging.all),
    ),
    "windows": Kind(family="gemma-2"),
    "latents": Kind(
        family="deepseek-v3",
        orders=(Order.zigzag, Order.flexgen, Order.module_batched),
        attentions=(Attention.device,),
        prefetches=PREFETCHES[1:2],
    ),
    "padded": Kind(
        family="falcon, first",
        orders=(Order.zigzag, Order.flexgen),
        attentions=(Attention.device,),
        prefetches=PREFETCHES[1:2],
    ),
}


Pair: TypeAlias = tuple[object, object]


@dataclass(frozen=True, kw_only=True)
class Combination:
    order: Order
    attention: Attention
    paging: ExpertPaging
    tier: Tier
    kv: KVConfig
    prefetch: PrefetchConfig
    admission: Admission

    def config(self, directory: Path) -> RuntimeConfig:
        """Raises ConfigError."""
        return RuntimeConfig(
            model=ModelConfig(name="test", path=str(directory), dtype=DType.float32),
            offload=OffloadConfig(
                tier=self.tier,
                resident_layers=1,
                expert_paging=self.paging,
                read_chunk_mib=1,
                host_memory_gib=4.0,  # nobody asks the kernel
            ),
            kv=self.kv,
            prefetch=self.prefetch,
            policy=PolicyConfig(
                kind=PolicyKind.fixed,
                micro_batch_size=2,
                num_micro_batches=2,
                admission=self.admission,
                schedule=self.order,
                attention=self.attention,
                prefill_chunk_tokens=CHUNK_TOKENS,
            ),
            sampling=SamplingConfig(max_new_tokens=max(NUM_NEW_TOKENS), ignore_eos=True),
        )

    @property
    def pairs(self) -> set[Pair]:
        """Of settings of one order and attention."""
        return set(itertools.combinations((self.tier, self.paging, self.kv, self.prefetch, self.admission), 2))

    @property
    def refusal(self) -> str | None:
        """How the reason begins for which it is to be refused."""
        is_ahead, is_off = self.order in (Order.flexgen, Order.cgopipe), self.prefetch.kind is Prefetch.off
        if self.order is Order.cgopipe and self.attention is Attention.device:
            return CGOPIPE
        if is_ahead and is_off and self.tier is Tier.nvme:
            return f"policy.schedule={self.order.value} reads a stage during the previous one"
        if self.attention is Attention.cpu and self.kv.tier in (KVTier.device, KVTier.nvme):
            return BESIDE
        if is_ahead and is_off and self.tier is Tier.cpu:
            return f"1 slots, but policy.schedule={self.order.value} loads a stage"
        return None


def combinations(kind: Kind, order: Order, attention: Attention) -> Iterator[Combination]:
    axes = (TIERS, kind.pagings, KVS, kind.prefetches, Admission)
    for tier, paging, kv, prefetch, admission in itertools.product(*axes):
        yield Combination(
            order=order,
            attention=attention,
            paging=paging,
            tier=tier,
            kv=kv,
            prefetch=prefetch,
            admission=admission,
        )
