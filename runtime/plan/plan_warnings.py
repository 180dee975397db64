"""Warnings about settings that have no effect, or less than expected, in a given plan.

Each is one sentence: the key, the reason, and what to do. `jobs.config.settings.doubtful_settings` covers warnings that
need no plan.
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

ROOM_FOR_ALL = "there is room for all keys and values where compute happens"


def plan_warnings(config: RuntimeConfig, shape: ModelShape, plan: RunPlan, *, has_device: bool) -> list[str]:
    """Returns all warnings for a plan."""
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
    """Returns warnings about slow plans that the user can avoid."""
    warnings, placement, layout = list[str](), plan.placement, plan.placement.kv
    if config.kv.tier is KVTier.auto and layout.tier is KVTier.nvme and layout.page_bytes:
        keys = " or ".join(ledger.budget_key for ledger in placement.ledgers)
        warnings.append(
            f"kv=auto keeps keys and values of {len(layout.page_bytes)} layers on disk, which is slow: memory has no "
            f"room for more; raise {keys}, or lower policy.micro_batch_size or sampling.max_new_tokens"
            + ("; with a loss, kv.dtype=int8 keeps them in fewer bytes" if layout.can_be_quantized else "")
        )
    is_by_rule = plan.searched_policy is None
    if placement.paged and plan.num_lanes > 1 and not placement.decode_walk.batched_experts and is_by_rule:
        warnings.append(
            f"offload.expert_paging={placement.paging.value} reads an expert up to {plan.num_lanes} times in a pass: "
            f"each of {plan.num_lanes} micro-batches asks by itself; policy.schedule={BATCHED.value} reads it once"
        )
    return warnings


def _weight_warnings(config: RuntimeConfig, shape: ModelShape, *, has_device: bool) -> Iterator[str]:
    offload, tier = config.offload, config.tier
    keeps_all = tier is Tier.none or (tier is Tier.cpu and not has_device)
    is_stored = DequantizedSize.from_shape(shape, frozenset(), 1) is not None
    if offload.dequantize is not Dequantize.auto and not (has_device and is_stored):
        why = "all weights lie as they are multiplied" if has_device else "compute happens in host memory"
        yield f"offload.dequantize={offload.dequantize.value} has no effect: {why}; leave it auto"
    if offload.tier is Tier.cpu and not has_device:
        yield "offload=cpu is as offload=none here: compute happens in host memory; offload=nvme streams from disk"
    if offload.resident_layers is not None and keeps_all:
        yield (
            f"offload.resident_layers={offload.resident_layers} has no effect: offload={offload.tier.value} keeps "
            "every layer; leave it null"
        )
    if offload.device_memory_gib is not None and not has_device:
        yield (
            f"offload.device_memory_gib={offload.device_memory_gib:g} has no effect: compute happens in host memory; "
            "offload.host_memory_gib limits that"
        )


def _compute_warnings(config: RuntimeConfig, shape: ModelShape, plan: RunPlan, *, has_device: bool) -> Iterator[str]:
    """Yields warnings about CUDA graphs, experts and attention. A device without CUDA graphs is rejected before."""
    placement, order, paging = plan.placement, config.policy.schedule, config.offload.expert_paging
    if config.model.graphs and has_device:
        if not placement.is_fully_resident:
            yield (
                "model.graphs=true is refused by a run of this plan: weights, or keys and values, travel; offload=none "
                "and kv=device where they fit, or model.graphs=false"
            )
        elif plan.num_lanes > 1:
            yield f"model.graphs=true has no effect: {plan.num_lanes} lanes take turns; policy.num_micro_batches=1"
    if order is not None and order.style.batches_experts and not placement.decode_walk.batched_experts:
        why = "the model runs its experts in its own code" if shape.has_experts else "the model has no experts"
        yield f"policy.schedule={order.value} has no effect: {why}; policy.schedule={PLAIN.value} is the same"
    if paging in (ExpertPaging.hit, ExpertPaging.all) and placement.paging is ExpertPaging.off:
        why = "every layer stays in memory"
        if not shape.has_experts:
            why = "the model has no experts"
        elif not pageable_stages(shape):
            why = "this checkpoint's experts share bytes or scales, so none can be read by itself"
        yield f"offload.expert_paging={paging.value} has no effect: {why}; leave it auto"
    if config.policy.attention is Attention.cpu and not cpu_attends(shape, config, has_device=has_device):
        why = "padded lanes attend in the model's own code"
        if shape.is_packed:
            why = "an accelerator expands this model's latents in its own memory"
        yield f"policy.attention=cpu has no effect: {why}; policy.attention=device is the same"


def _kv_warnings(config: RuntimeConfig, shape: ModelShape, placement: Placement, *, has_device: bool) -> Iterator[str]:
    kv, layout = config.kv, placement.kv
    if kv.tier is KVTier.cpu and not has_device:
        yield ("kv=cpu is as kv=device here: compute happens in host memory; kv=nvme keeps keys and values elsewhere")
    if layout.page_bytes and not layout.stays_in_host:
        if kv.directory is not None and layout.tier is not KVTier.nvme:
            yield f"kv.directory={kv.directory} has no effect: keys and values lie in host memory; kv=nvme uses it"
        return
    if layout.stays_in_host:
        why = "policy.attention=cpu attends where all keys and values are"
    elif not shape.kv_bytes_per_token:
        why = "the model keeps no keys and values"
    elif kv.tier is KVTier.device or (kv.tier is KVTier.cpu and not has_device):
        why = f"kv={kv.tier.value} keeps all keys and values where compute happens"
    elif kv.tier is KVTier.auto or kv.device_fraction is None:
        why = ROOM_FOR_ALL
    else:
        why = f"no layer's keys and values are left to kv={kv.tier.value}"
    if kv.tier in (KVTier.cpu, KVTier.nvme) and kv.device_fraction is None and why == ROOM_FOR_ALL:
        yield f"kv={kv.tier.value} has no effect: {why}; kv.device_fraction=0 keeps them elsewhere nevertheless"
    if kv.device_fraction is not None:
        yield f"kv.device_fraction={kv.device_fraction:g} has no effect: {why}; leave it null"
    if kv.num_slots != KVConfig.num_slots:
        yield f"kv.num_slots={kv.num_slots} has no effect: {why}; leave it {KVConfig.num_slots}"
    if kv.directory is not None:
        yield f"kv.directory={kv.directory} has no effect: {why}; leave it null, or choose kv=nvme"


def _prefetch_warnings(config: RuntimeConfig, placement: Placement) -> Iterator[str]:
    prefetch, kind = config.prefetch, config.prefetch.kind
    if not placement.walk.streamed:
        if prefetch != PrefetchConfig():
            yield f"prefetch={kind.value} has no effect: every stage stays in memory; leave the group prefetch out"
        return
    depth, block_layers = prefetch.depth, prefetch.block_layers
    if depth != PrefetchConfig.depth:
        if kind is Prefetch.cost_aware:
            yield f"prefetch.depth={depth} has no effect: prefetch=cost_aware finds one; prefetch=lookahead takes it"
        elif kind is not Prefetch.lookahead and not placement.paged:  # experts have slots by depth
            yield f"prefetch.depth={depth} has no effect beside prefetch={kind.value}; prefetch=lookahead takes it"
    if block_layers != PrefetchConfig.block_layers and kind is not Prefetch.block:
        yield (
            f"prefetch.block_layers={block_layers} has no effect beside prefetch={kind.value}; prefetch=block takes it"
        )


def _policy_warnings(policy: PolicyConfig, shape: ModelShape) -> Iterator[str]:
    if policy.admission is Admission.continuous and not shape.is_packed:
        yield (
            "policy.admission=continuous goes by whole micro-batches: padded lanes cannot be joined, so requests enter "
            "as the last of a micro-batch ends; a smaller policy.micro_batch_size lets them enter earlier"
        )
    if policy.kind is PolicyKind.fixed and policy.pin is not None:
        yield f"policy.pin={policy.pin} has no effect beside policy=fixed; policy=auto takes it"
