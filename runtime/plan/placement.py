"""Where each stage's weights live, how many slots the others pass through, and whether all of it fits."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import OffloadConfig, Prefetch, PrefetchConfig, Tier
from .extents import group_layout, resident_groups, slot_layout
from .ledger import Entry, Ledger
from .memory import MicroBatch, block_entries, kv_pages, pinned_bytes
from .shapes import ModelShape, Stage, StageKind
from .spread import spread
from .walk import Walk


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that a run may use. `device_bytes` is None where compute happens in host memory."""

    host_bytes: int
    device_bytes: int | None = None

    @property
    def has_device(self) -> bool:
        return self.device_bytes is not None


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`resident` stages stay in compute memory; the others follow `walk` through slots of `slot_bytes`. Decode passes
    follow `decode_walk`, which is the same one unless there is an encoder to leave out. Of `paged` stages, all
    streamed, only the dense part follows the walk; their experts have slots of their own."""

    resident: frozenset[int]
    walk: Walk
    decode_walk: Walk
    slot_bytes: int
    ledgers: tuple[Ledger, ...]
    num_kv_pages: int  # of packed lanes
    paged: frozenset[int] = frozenset()

    @property
    def fits(self) -> bool:
        return all(ledger.fits for ledger in self.ledgers)

    def require_fit(self) -> None:
        for ledger in self.ledgers:
            ledger.require_fit(
                f"raise {ledger.budget_key}, or lower policy.micro_batch_size, policy.num_micro_batches, "
                "policy.prefill_chunk_tokens, sampling.max_new_tokens or prefetch.depth, or use offload=nvme"
            )


def _kept_layers(shape: ModelShape, num_resident: int) -> list[int]:
    """The decoder's layers first, which every pass needs; an encoder's are needed once per block."""
    kept: list[int] = []
    for kind in (StageKind.layer, StageKind.encoder):
        stages = shape.of_kind(kind)
        num_kept = min(num_resident - len(kept), len(stages))
        kept += [stages[place].index for place in spread(len(stages), num_kept)]
    return kept


def num_slots_for(prefetch: PrefetchConfig) -> int:
    slots = {
        Prefetch.off: 1,
        Prefetch.lookahead: prefetch.depth + 1,
        Prefetch.block: 2 * prefetch.block_layers,
        Prefetch.cost_aware: prefetch.depth + 1,
    }
    return slots[prefetch.kind]


def place(
    shape: ModelShape,
    offload: OffloadConfig,
    prefetch: PrefetchConfig,
    budgets: Budgets,
    block: Sequence[MicroBatch],
    prefill_chunk_tokens: int,
    num_kv_pages: int | None = None,
) -> Placement:
    """The placement with the most resident layers that fits; without any when nothing fits (its ledgers say why).

    `num_kv_pages`: of packed lanes; None: what `block` comes to when every sequence has run to its limit.

    Embeddings and head stay resident where they fit and are streamed like layers where they don't.
    """
    num_pages = kv_pages(block) if num_kv_pages is None else num_kv_pages
    entries = block_entries(shape, block, prefill_chunk_tokens, num_pages)
    layers = [stage.index for stage in shape.stages if stage.kind.is_layer]
    outer = [stage.index for stage in shape.stages if not stage.kind.is_layer]

    def attempt(resident: Sequence[int]) -> Placement:
        return _placement(shape, offload.tier, prefetch, budgets, frozenset(resident), entries, num_pages)

    if offload.tier is Tier.none or (offload.tier is Tier.cpu and not budgets.has_device):
        return attempt([*outer, *layers])
    wanted = (
        range(len(layers), -1, -1) if offload.resident_layers is None else [min(offload.resident_layers, len(layers))]
    )
    placement = None
    for num_resident in wanted:
        placement = attempt([*outer, *_kept_layers(shape, num_resident)])
        if placement.fits:
            return placement
    assert placement is not None, "there is always a last number to try"
    streamed_outer = attempt(_kept_layers(shape, wanted[-1]))
    return streamed_outer if streamed_outer.fits else placement


def _placement(
    shape: ModelShape,
    tier: Tier,
    prefetch: PrefetchConfig,
    budgets: Budgets,
    resident: frozenset[int],
    entries: tuple[Entry, ...],
    num_kv_pages: int,
) -> Placement:
    streamed = tuple(stage.index for stage in shape.stages if stage.index not in resident)
    walk, decode_walk = (
        _walk(len(shape.stages), first, streamed, tier, prefetch, has_device=budgets.has_device)
        for first in (0, shape.first_decode_stage)
    )
    slot_bytes = max((slot_layout(shape.stages[s]).num_bytes for s in streamed), default=0)
    weights = (
        Entry(
            name="resident weights",
            num_bytes=_resident_bytes([shape.stages[s] for s in sorted(resident)]),
            equation=f"{len(resident)} of {len(shape.stages)} stages",
        ),
        Entry(name="slots", num_bytes=walk.num_slots * slot_bytes, equation=f"{walk.num_slots} x {slot_bytes:,} B"),
    )
    return Placement(
        resident=resident,
        walk=walk,
        decode_walk=decode_walk,
        slot_bytes=slot_bytes,
        ledgers=_ledgers(shape, tier, budgets, walk, slot_bytes, weights + entries),
        num_kv_pages=num_kv_pages,
    )


def _walk(
    num_stages: int, first: int, streamed: Sequence[int], tier: Tier, prefetch: PrefetchConfig, *, has_device: bool
) -> Walk:
    """A walk that begins later needs no more slots of either kind than the whole one."""
    passed = tuple(stage for stage in streamed if stage >= first)
    block = prefetch.block_layers if prefetch.kind is Prefetch.block and len(passed) > prefetch.block_layers else 1
    copies = has_device and bool(passed)
    reads = tier is Tier.nvme
    staging = (2 if block == 1 else block) if copies and reads else 0
    return Walk(
        num_stages=num_stages,
        first_stage=first,
        streamed=passed,
        num_slots=min(num_slots_for(prefetch), len(passed)),
        num_staging_slots=min(staging, len(passed)),
        reads=reads,
        copies=copies,
        block=block,
    )


def _ledgers(
    shape: ModelShape, tier: Tier, budgets: Budgets, walk: Walk, slot_bytes: int, compute_entries: tuple[Entry, ...]
) -> tuple[Ledger, ...]:
    host_key, device_key = "offload.host_memory_gib", "offload.device_memory_gib"
    if budgets.device_bytes is None:
        return (Ledger(memory="host", budget_bytes=budgets.host_bytes, budget_key=host_key, entries=compute_entries),)
    staging, pinned = walk.num_staging_slots, pinned_bytes(slot_bytes)
    host = [Entry(name="staging slots", num_bytes=staging * pinned, equation=f"{staging} x {pinned:,} B, pinned")]
    if tier is Tier.cpu:
        stages = [shape.stages[s] for s in walk.streamed]
        host.append(
            Entry(
                name="weights",
                num_bytes=sum(pinned_bytes(slot_layout(stage).num_bytes) for stage in stages),
                equation=f"{len(stages)} stages, pinned",
            )
        )
    return (
        Ledger(memory="device", budget_bytes=budgets.device_bytes, budget_key=device_key, entries=compute_entries),
        Ledger(memory="host", budget_bytes=budgets.host_bytes, budget_key=host_key, entries=tuple(host)),
    )


def _resident_bytes(stages: Sequence[Stage]) -> int:
    """Of the buffers that hold the stages: tied weights once, alignment included."""
    return sum(group_layout(group).num_bytes for group in resident_groups(stages))
