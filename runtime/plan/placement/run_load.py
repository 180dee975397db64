"""Computes the worst-case load of a run: its largest block, or with continuous admission its longest sequences.

With continuous admission, waiting sequences enter a lane (a running micro-batch) as soon as others end.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from heapq import nlargest

from ...batching.balance import Block
from ...batching.prefixes import SharedPrefix
from ...config.settings import Admission, Prefetch, PrefetchConfig, RuntimeConfig
from ..shape.model import ModelShape
from .defaults import chunk_tokens
from .load import Load
from .memory import PAGE_TOKENS, MicroBatch, SequenceSize, kv_tokens
from .placement import Budgets
from .placer import can_offload_kv, choose_placement, kv_tiers


def block_lanes(block: Block, sizes: Sequence[SequenceSize]) -> list[MicroBatch]:
    """Returns the sizes of the sequences in each micro-batch. `sizes`: of all requests."""
    return [[sizes[i] for i in micro_batch] for micro_batch in block.micro_batches]


def least_memory_config(config: RuntimeConfig) -> RuntimeConfig:
    """Returns the config with automatic settings fixed to the values that take least memory."""
    offload, prefetch = config.offload, config.prefetch
    return replace(
        config,
        offload=replace(offload, resident_layers=0) if offload.resident_layers is None else offload,
        prefetch=PrefetchConfig(depth=1) if prefetch.kind is Prefetch.cost_aware else prefetch,
    )


def run_load(
    shape: ModelShape,
    config: RuntimeConfig,
    budgets: Budgets,
    blocks: Sequence[Block],
    sizes: Sequence[SequenceSize],
) -> Load:
    """Returns the load of the largest block, or with continuous admission of the longest sequences in one block."""
    if config.policy.admission is Admission.continuous:
        return _continuous_load(shape, config, budgets, blocks, sizes)
    return Load.from_blocks(shape, [block_lanes(block, sizes) for block in blocks], chunk_tokens(config.policy))


def _continuous_load(
    shape: ModelShape,
    config: RuntimeConfig,
    budgets: Budgets,
    blocks: Sequence[Block],
    sizes: Sequence[SequenceSize],
) -> Load:
    """Returns the load if the longest sequences run together, as many as the largest block has.

    KV pages are reduced until they fit the budget, but not below those of the longest sequence.

    A preempted sequence loses its KV pages, and later prefills again with all tokens that it has by then. So in the
    worst case a lane prefills all tokens of its sequences. A padded lane may have the longest prompt together with the
    longest output.
    """
    chunk = chunk_tokens(config.policy)
    num_slots = max((len(block.members) for block in blocks), default=0)  # sequences that run at a time
    lane_size = max((len(lane) for block in blocks for lane in block.micro_batches), default=1)
    if shape.is_packed:
        capacities = nlargest(num_slots, (size.capacity_tokens for size in sizes))
        longest = [SequenceSize(num_prompt_tokens=num_tokens, max_new_tokens=0) for num_tokens in capacities]
    else:
        widest = SequenceSize(
            num_prompt_tokens=max((size.num_prompt_tokens for size in sizes), default=0),
            max_new_tokens=max((size.max_new_tokens for size in sizes), default=0),
            num_scored=max((size.num_scored for size in sizes), default=0),
        )
        longest = [widest] * min(num_slots, len(sizes))
    lanes = [longest[i : i + lane_size] for i in range(0, len(longest), lane_size)]
    full = Load.from_lanes(shape, lanes, chunk)
    full = replace(
        full,
        num_prefill_passes=sum(size.num_prompt_tokens for size in sizes) / max(1, full.block_tokens),
        num_decode_passes=sum(size.max_new_tokens - 1 for size in sizes) / max(1, num_slots),
    )
    if not shape.is_packed or not lanes:
        return full
    min_pages = full.max_positions // PAGE_TOKENS
    counts = [full.num_kv_pages] * 2  # without and with prefix sharing across lanes
    if any(size.prefix is not None for size in sizes):
        # Enough pages for the largest block. If the sequences need more at some time, some are preempted.
        blocks_lanes = [block_lanes(block, sizes) for block in blocks]
        tokens = [max(kv_tokens(shape, lanes, among_lanes=among) for lanes in blocks_lanes) for among in (False, True)]
        counts = [max(num_tokens // PAGE_TOKENS, min_pages) for num_tokens in tokens]
    # Upper bound of a lane's pages: the largest unshared parts of sequences plus all prefixes, or the pages of the
    # longest sequences if those are fewer.
    own = [size.capacity_tokens // PAGE_TOKENS - _whole_pages(size.prefix) for size in sizes]
    prefixes = {prefix for size in sizes if size.prefix is not None for prefix in size.prefix.chain}
    shared = sum(_whole_pages(prefix) - _whole_pages(prefix.parent) for prefix in prefixes)
    most_pages = min(full.max_pages, sum(sorted(own, reverse=True)[: full.max_rows]) + shared)
    per_lane, per_block = (
        replace(full, num_kv_pages=count, full_pages=count, max_pages=most_pages) for count in counts
    )
    return _fit_pages(shape, config, budgets, per_lane, per_block, min_pages)


def _whole_pages(prefix: SharedPrefix | None) -> int:
    return prefix.num_tokens // PAGE_TOKENS if prefix is not None else 0


def _fit_pages(
    shape: ModelShape, config: RuntimeConfig, budgets: Budgets, per_lane: Load, per_block: Load, min_pages: int
) -> Load:
    """Returns the load with as many KV pages as fit, in the fastest tier that fits enough of them.

    Half of all pages are enough (`has_enough_pages`), since most outputs end before their token limit. If no tier fits
    enough, returns the most pages that fit in any tier, but at least `min_pages`: the ledger then shows what does not
    fit. `per_lane`: the full load if prefixes are shared within lanes, as for offloaded KV. `per_block`: the full load
    if prefixes are shared within the block, as for KV in compute memory.
    """
    max_pages, full = min_pages, per_lane
    for tier in kv_tiers(shape, config, has_device=budgets.has_device):
        tier_config = least_memory_config(replace(config, kv=replace(config.kv, tier=tier)))
        full = per_lane if can_offload_kv(shape, tier_config, tier, has_device=budgets.has_device) else per_block
        counts = range(min_pages, full.num_kv_pages + 1)
        num_pages = _max_fitting_pages(shape, tier_config, budgets, full, counts)
        if replace(full, num_kv_pages=num_pages).has_enough_pages:
            return replace(full, num_kv_pages=num_pages)
        max_pages = max(max_pages, num_pages)
    return replace(full, num_kv_pages=max_pages)


def _max_fitting_pages(shape: ModelShape, config: RuntimeConfig, budgets: Budgets, full: Load, counts: range) -> int:
    """Returns the largest of the page `counts` with which a placement of load `full` fits; 0 if there is none."""
    num_fitting = bisect_left(
        counts, True, key=lambda n: not choose_placement(shape, config, budgets, replace(full, num_kv_pages=n)).fits
    )
    return counts[num_fitting - 1] if num_fitting else 0
