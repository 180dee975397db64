"""Which load a run puts on memory: that of its heaviest block, or where sequences come and go of its fullest lanes."""

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
    return [[sizes[i] for i in micro_batch] for micro_batch in block.micro_batches]


def least_memory_config(config: RuntimeConfig) -> RuntimeConfig:
    """What was left open as what takes least: no resident layer, and the shallowest prefetching."""
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
    """What memory must hold: the most that any block takes, or where sequences come and go the longest ones side by
    side."""
    chunk = chunk_tokens(config.policy)
    if config.policy.admission is Admission.continuous:
        return _continuous_load(shape, config, budgets, blocks, sizes)
    return Load.from_blocks(shape, [block_lanes(block, sizes) for block in blocks], chunk)


def _continuous_load(
    shape: ModelShape,
    config: RuntimeConfig,
    budgets: Budgets,
    blocks: Sequence[Block],
    sizes: Sequence[SequenceSize],
) -> Load:
    """The load of as many seats as blocks have, and pages for all of them; fewer pages where the budget says so, but so
    many that the longest sequence can run to its limit alone.

    A sequence that gave way is prefilled with all that it knows, so any lane may have to compute its every token. A
    padded lane may come to hold the longest prompt beside the longest answer.
    """
    chunk = chunk_tokens(config.policy)
    slots = max((len(block.members) for block in blocks), default=0)
    lane_size = max((len(lane) for block in blocks for lane in block.micro_batches), default=1)
    if shape.is_packed:
        most_tokens = nlargest(slots, (size.capacity_tokens for size in sizes))
        longest = [SequenceSize(num_prompt_tokens=num_tokens, max_new_tokens=0) for num_tokens in most_tokens]
    else:
        most = SequenceSize(
            num_prompt_tokens=max((size.num_prompt_tokens for size in sizes), default=0),
            max_new_tokens=max((size.max_new_tokens for size in sizes), default=0),
            num_scored=max((size.num_scored for size in sizes), default=0),
        )
        longest = [most] * min(slots, len(sizes))
    lanes = [longest[i : i + lane_size] for i in range(0, len(longest), lane_size)]
    full = Load.from_lanes(shape, lanes, chunk)
    full = replace(
        full,
        num_prefill_passes=sum(size.num_prompt_tokens for size in sizes) / max(1, full.block_tokens),
        num_decode_passes=sum(size.max_new_tokens - 1 for size in sizes) / max(1, slots),
    )
    if not shape.is_packed or not lanes:
        return full
    least = full.max_positions // PAGE_TOKENS
    counts = [full.num_kv_pages] * 2  # where lanes share nothing with each other, and where they do
    if any(size.prefix is not None for size in sizes):
        # Those of the block that has most, where prompts begin alike: its sequences enter one behind the other, and if
        # others are seated together they give way.
        blocks_lanes = [block_lanes(block, sizes) for block in blocks]
        most = [max(kv_tokens(shape, each, among_lanes=among) for each in blocks_lanes) for among in (False, True)]
        counts = [max(count // PAGE_TOKENS, least) for count in most]
    # Pages that any sequences may have that come to share a lane: all of the longest ones', or what most have of their
    # own beside all prefixes of the run.
    own = [size.capacity_tokens // PAGE_TOKENS - _whole_pages(size.prefix) for size in sizes]
    prefixes = {each for size in sizes if size.prefix is not None for each in size.prefix.chain}
    shared = sum(_whole_pages(prefix) - _whole_pages(prefix.parent) for prefix in prefixes)
    most_pages = min(full.max_pages, sum(sorted(own, reverse=True)[: full.max_rows]) + shared)
    per_lane, per_block = (
        replace(full, num_kv_pages=count, full_pages=count, max_pages=most_pages) for count in counts
    )
    return _fit_pages(shape, config, budgets, per_lane, per_block, least)


def _whole_pages(prefix: SharedPrefix | None) -> int:
    """Whole ones."""
    return prefix.num_tokens // PAGE_TOKENS if prefix is not None else 0


def _fit_pages(
    shape: ModelShape, config: RuntimeConfig, budgets: Budgets, per_lane: Load, per_block: Load, least: int
) -> Load:
    """The most pages that the fastest memory holds in which the load `is_roomy`. Without one, the most that any memory
    holds, or the `least` that are of use, for a ledger to say why they are too many. `in_lanes`: the load with all
    pages where keys and values travel and each lane has prefixes of its own, `together` where they do not.

    Answers mostly end before their limits, so half the pages of all limits seat nearly as many sequences as all of
    them, and keep keys and values where they are fast. With fewer, sequences give way and are prefilled again.
    """
    most, full = least, per_lane
    for tier in kv_tiers(shape, config, has_device=budgets.has_device):
        tier_config = least_memory_config(replace(config, kv=replace(config.kv, tier=tier)))
        full = per_lane if can_offload_kv(shape, tier_config, tier, has_device=budgets.has_device) else per_block
        counts = range(least, full.num_kv_pages + 1)
        num_pages = _max_fitting_pages(shape, tier_config, budgets, full, counts)
        if replace(full, num_kv_pages=num_pages).has_enough_pages:
            return replace(full, num_kv_pages=num_pages)
        most = max(most, num_pages)
    return replace(full, num_kv_pages=most)


def _max_fitting_pages(shape: ModelShape, config: RuntimeConfig, budgets: Budgets, full: Load, counts: range) -> int:
    """The largest of these numbers of pages that fits; 0 where none does. What a page takes follows from nothing but
    the placement: pinned memory comes in powers of two, and pages on disk pass through slots."""
    num_fitting = bisect_left(
        counts, True, key=lambda n: not choose_placement(shape, config, budgets, replace(full, num_kv_pages=n)).fits
    )
    return counts[num_fitting - 1] if num_fitting else 0
