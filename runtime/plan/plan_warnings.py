"""Warnings about settings that have no effect in a given plan, or make it slow.

Each warning is one sentence with the config key, the reason, and the value to set. Warnings that need no plan are in
`jobs.config.settings`. A **lane** runs one micro-batch through the model; a **padded lane** has left-padded rows, for
models without packed sequences.
"""

from collections.abc import Iterator

from ..config.orders import BATCHED, PLAIN
from ..config.settings import (
    Admission,
    Attention,
    Dequantize,
    ExpertPaging,
    KVConfig,
    KVTier,
    PolicyConfig,
    PolicyKind,
    Prefetch,
    PrefetchConfig,
    RuntimeConfig,
    Tier,
)
from .placement.dequantized import DequantizedSize
from .placement.experts import pageable_stages
from .placement.placement import Placement
from .placement.walks import cpu_attends
from .planner import RunPlan
from .shape.model import ModelShape

ALL_KV_FITS = "the whole KV cache fits in compute memory"


def plan_warnings(config: RuntimeConfig, shape: ModelShape, plan: RunPlan, *, has_device: bool) -> list[str]:
    return [*ineffective_settings(config, shape, plan, has_device=has_device), *slow_settings(config, plan)]


def ineffective_settings(config: RuntimeConfig, shape: ModelShape, plan: RunPlan, *, has_device: bool) -> list[str]:
    """Returns warnings about settings without effect for this model, machine and plan."""
    return [
        *_weight_warnings(config, shape, has_device=has_device),
        *_compute_warnings(config, shape, plan, has_device=has_device),
        *_kv_warnings(config, shape, plan.placement, has_device=has_device),
        *_prefetch_warnings(config, plan.placement),
        *_policy_warnings(config.policy, shape),
    ]


def slow_settings(config: RuntimeConfig, plan: RunPlan) -> list[str]:
    """Returns warnings about slow plans that other settings avoid."""
    warnings, placement, layout = list[str](), plan.placement, plan.placement.kv
    if config.kv.tier is KVTier.auto and layout.tier is KVTier.nvme and layout.page_bytes:
        keys = " or ".join(ledger.budget_key for ledger in placement.ledgers)
        warnings.append(
            f"kv=auto stores the KV cache of {len(layout.page_bytes)} layers on disk, as memory is full, which is "
            f"slow; raise {keys}, or lower policy.micro_batch_size or sampling.max_new_tokens"
            + (", or set kv.dtype=int8, which is smaller but lossy" if layout.can_be_quantized else "")
        )
    reads_again = bool(placement.paged) and plan.num_lanes > 1 and not placement.decode_walk.batched_experts
    if reads_again and plan.searched_policy is None:  # a search has compared the batched schedule already
        warnings.append(
            f"offload.expert_paging={placement.paging.value} reads an expert up to {plan.num_lanes} times per pass, "
            f"once for each micro-batch; policy.schedule={BATCHED.value} reads it once for all"
        )
    return warnings


def _weight_warnings(config: RuntimeConfig, shape: ModelShape, *, has_device: bool) -> Iterator[str]:
    offload, tier = config.offload, config.tier
    keeps_all_layers = tier is Tier.none or (tier is Tier.cpu and not has_device)
    has_quantized = DequantizedSize.from_shape(shape, frozenset(), 1) is not None
    if offload.dequantize is not Dequantize.auto and not (has_device and has_quantized):
        why = "no weights are stored quantized" if has_device else "there is no accelerator"
        yield f"offload.dequantize={offload.dequantize.value} has no effect: {why}; set auto"
    if offload.tier is Tier.cpu and not has_device:
        yield "offload=cpu is the same as offload=none without an accelerator; offload=nvme streams from disk"
    if offload.resident_layers is not None and keeps_all_layers:
        yield (
            f"offload.resident_layers={offload.resident_layers} has no effect: offload={offload.tier.value} keeps all "
            "layers in memory; set null"
        )
    if offload.device_memory_gib is not None and not has_device:
        key = f"offload.device_memory_gib={offload.device_memory_gib:g}"
        yield f"{key} has no effect without an accelerator; set offload.host_memory_gib"


def _compute_warnings(config: RuntimeConfig, shape: ModelShape, plan: RunPlan, *, has_device: bool) -> Iterator[str]:
    """Yields warnings about CUDA graphs, experts and attention."""
    placement, order, paging = plan.placement, config.policy.schedule, config.offload.expert_paging
    if config.model.graphs and has_device:
        if not placement.is_fully_resident:
            yield (
                "model.graphs=true fails with this plan, which streams weights or KV; set offload=none and kv=device "
                "if they fit, or model.graphs=false"
            )
        elif plan.num_lanes > 1:
            yield f"model.graphs=true has no effect with {plan.num_lanes} micro-batches; set policy.num_micro_batches=1"
    if order is not None and order.style.batches_experts and not placement.decode_walk.batched_experts:
        why = "the model runs its experts in its own code" if shape.has_experts else "the model has no experts"
        yield f"policy.schedule={order.value} has no effect: {why}; set policy.schedule={PLAIN.value}"
    if paging in (ExpertPaging.hit, ExpertPaging.all) and placement.paging is ExpertPaging.off:
        why = "every layer stays in memory"
        if not shape.has_experts:
            why = "the model has no experts"
        elif not pageable_stages(shape):
            why = "this checkpoint's experts share bytes or scales and cannot be read one by one"
        yield f"offload.expert_paging={paging.value} has no effect: {why}; set auto"
    if config.policy.attention is Attention.cpu and not cpu_attends(shape, config, has_device=has_device):
        why = "the model only runs in padded lanes, which use its own attention code"
        if shape.is_packed:
            why = "this model's latents (MLA) are expanded in the accelerator's memory"
        yield f"policy.attention=cpu has no effect: {why}; set policy.attention=device"


def _kv_warnings(config: RuntimeConfig, shape: ModelShape, placement: Placement, *, has_device: bool) -> Iterator[str]:
    kv, layout = config.kv, placement.kv
    if kv.tier is KVTier.cpu and not has_device:
        yield "kv=cpu is the same as kv=device without an accelerator; kv=nvme stores the KV cache on disk"
    is_offloaded = bool(layout.page_bytes) and not layout.stays_in_host
    if is_offloaded:  # then all KV settings have an effect, except perhaps the directory
        if kv.directory is not None and layout.tier is not KVTier.nvme:
            yield f"kv.directory={kv.directory} has no effect: the KV cache is in host memory; set kv=nvme to use it"
        return
    if layout.stays_in_host:
        why = "with policy.attention=cpu the whole KV cache stays in host memory"
    elif not shape.kv_bytes_per_token:
        why = "the model has no KV cache"
    elif kv.tier is KVTier.device or (kv.tier is KVTier.cpu and not has_device):
        why = f"kv={kv.tier.value} keeps the whole KV cache in compute memory"
    elif kv.tier is KVTier.auto or kv.device_fraction is None:
        why = ALL_KV_FITS
    else:
        why = f"kv.device_fraction={kv.device_fraction:g} leaves no layer to offload"
    if kv.tier in (KVTier.cpu, KVTier.nvme) and kv.device_fraction is None and why == ALL_KV_FITS:
        yield f"kv={kv.tier.value} has no effect: {why}; set kv.device_fraction=0 to offload it anyway"
    if kv.device_fraction is not None:
        yield f"kv.device_fraction={kv.device_fraction:g} has no effect: {why}; set null"
    if kv.num_slots != KVConfig.num_slots:
        yield f"kv.num_slots={kv.num_slots} has no effect: {why}; set {KVConfig.num_slots}"
    if kv.directory is not None:
        yield f"kv.directory={kv.directory} has no effect: {why}; set null, or kv=nvme"


def _prefetch_warnings(config: RuntimeConfig, placement: Placement) -> Iterator[str]:
    prefetch, kind = config.prefetch, config.prefetch.kind
    if not placement.walk.streamed:
        if prefetch != PrefetchConfig():
            yield f"prefetch={kind.value} has no effect: every stage stays in memory; remove it"
        return
    depth, block_layers = prefetch.depth, prefetch.block_layers
    if depth != PrefetchConfig.depth:
        if kind is Prefetch.cost_aware:
            yield f"prefetch.depth={depth} has no effect: prefetch=cost_aware chooses it; set prefetch=lookahead"
        elif kind is not Prefetch.lookahead and not placement.paged:  # the depth also sets the slots of paged experts
            yield f"prefetch.depth={depth} has no effect with prefetch={kind.value}; set prefetch=lookahead"
    if block_layers != PrefetchConfig.block_layers and kind is not Prefetch.block:
        yield f"prefetch.block_layers={block_layers} has no effect with prefetch={kind.value}; set prefetch=block"


def _policy_warnings(policy: PolicyConfig, shape: ModelShape) -> Iterator[str]:
    if policy.admission is Admission.continuous and not shape.is_packed:
        yield (
            "policy.admission=continuous admits whole micro-batches: the model runs in padded lanes, which take new "
            "requests only when every sequence is finished; a smaller policy.micro_batch_size admits them earlier"
        )
    if policy.kind is PolicyKind.fixed and policy.pin is not None:
        yield f"policy.pin={policy.pin} has no effect with policy=fixed; set policy=auto"
