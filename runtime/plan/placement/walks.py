"""Makes the walks of prefill and decode passes. A **walk** describes the path of a pass: stages, slots and transfers.

A **lane** is a micro-batch in execution. A **turn** is the computation of one lane in one stage.
"""

from collections.abc import Sequence

from ...config.orders import PLAIN, Order
from ...config.settings import Attention, Prefetch, PrefetchConfig, RuntimeConfig
from ..schedule.walk import Walk
from ..shape.model import ModelShape
from .kv import KVLayout


def num_weight_slots(prefetch: PrefetchConfig, order: Order) -> int:
    """Returns the number of weight slots, for stages that are read ahead and stages in computation."""
    lookahead_slots = prefetch.depth + order.style.num_open
    return {Prefetch.off: 1, Prefetch.block: 2 * prefetch.block_layers}.get(prefetch.kind, lookahead_slots)


def cpu_attends(shape: ModelShape, config: RuntimeConfig, *, has_device: bool) -> bool:
    """True if attention runs on the CPU.

    Padded lanes do not support it, nor do layers with latents (MLA) next to an accelerator, which expands them in its
    own memory.
    """
    is_possible = shape.is_packed and not (has_device and shape.expanded_kv_width)
    return is_possible and config.policy.attention is Attention.cpu


def make_walk(
    shape: ModelShape,
    config: RuntimeConfig,
    streamed: Sequence[int],
    kv: KVLayout,
    num_lanes: int,
    *,
    in_host: frozenset[int],
    is_decode: bool,
    has_device: bool,
    is_paged: bool = False,
) -> Walk:
    """Returns the walk of prefill or decode passes. Only decode passes skip the encoder and use CPU attention.

    `streamed`: stages that are read into slots. `in_host`: streamed stages that are in host memory, not on disk.
    `is_paged`: experts are read one by one, also if no stage is streamed.
    """
    prefetch, order = config.prefetch, config.policy.schedule or PLAIN
    own = shape.own_stages
    first = shape.first_decode_stage if is_decode else own.start
    in_pass = tuple(stage for stage in streamed if stage >= first)
    block = prefetch.block_layers if prefetch.kind is Prefetch.block and len(in_pass) > prefetch.block_layers else 1
    copies = has_device and (bool(in_pass) or is_paged)
    num_from_disk = sum(stage not in in_host for stage in in_pass)
    max_staging_slots = (2 if block == 1 else block) if copies else 0
    offloaded_kv = tuple(shape.layers[layer].index for layer in kv.page_bytes) if kv.num_slots else ()
    # If the order spreads the parts ("pages") of a stage over turns, each turn of a streamed stage gets one page. If
    # turns end with barriers, turns of resident stages get pages too, as disk and link would be idle without a page.
    style = order.style
    stages_per_load = round((own.stop - first) / max(1, len(in_pass))) if style.has_barriers else 1
    batched_experts = tuple[int, ...]()
    if style.batches_experts:  # lanes stop at experts run by model/expert_groups.py
        batched_experts = tuple(stage.index for stage in shape.layers if any(p.is_experts for p in stage.parameters))
    attends = is_decode and cpu_attends(shape, config, has_device=has_device)
    return Walk(
        num_stages=own.stop,
        first_stage=first,
        streamed=in_pass,
        num_slots=min(num_weight_slots(prefetch, order), len(in_pass)),
        num_staging_slots=min(max_staging_slots, num_from_disk),
        in_host=in_host.intersection(in_pass),
        copies=copies,
        block=block,
        order=order if is_decode else order.without_cpu_attention,
        num_pages=max(1, num_lanes) * stages_per_load if style.spreads_pages else 1,
        cpu_attention=tuple(stage.index for stage in shape.layers) if attends else (),
        batched_experts=batched_experts,
        offloaded_kv=offloaded_kv,
        num_kv_slots=kv.num_slots if offloaded_kv else 0,
        is_lane_major=shape.rank_stages is not None and not in_pass and not style.batches_experts,
        receives=own.start > 0,
        sends=own.stop < len(shape.stages),
    )
