"""Where each stage's weights and each layer's keys and values live, how many slots the others pass through, and whether
all of it fits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..config import ExpertPaging, KVTier, Order, RuntimeConfig, Tier, require
from .exchange import ExchangeSize, device_entry, exchange_size, pinned_entry
from .experts import ExpertSizes, batch_entries, choose_paging, host_entries, pageable_stages, slot_entry
from .extents import group_layout, pinned_bytes, resident_groups, slot_layout
from .kv import KVLayout, kv_cost, kv_layout, travelling_layers
from .ledger import Entry, Ledger
from .load import Load
from .memory import lane_entries
from .shapes import ModelShape, Stage, StageKind
from .spread import spread
from .walk import Walk
from .walks import cpu_attends, make_walks

KV_FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.0)  # tried where kv.device_fraction is left open


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
    """`resident` stages stay in compute memory; the others follow `walk`, or in decode passes `decode_walk`, through
    slots of `slot_bytes`. Of `paged` stages, all streamed, only the dense part follows the walk; their experts have
    `num_expert_slots` of their own. `host_layers` keep their KV in host memory, where the CPU attends to it, through
    `exchange`."""

    resident: frozenset[int]
    walk: Walk
    decode_walk: Walk
    slot_bytes: int
    ledgers: tuple[Ledger, ...]
    kv: KVLayout
    exchange: ExchangeSize
    paged: frozenset[int] = frozenset()
    paging: ExpertPaging = ExpertPaging.off
    num_expert_slots: int = 0

    @property
    def host_layers(self) -> frozenset[int]:
        return frozenset(self.kv.page_bytes) if self.kv.stays_in_host else frozenset()

    @property
    def fits(self) -> bool:
        return all(ledger.fits for ledger in self.ledgers)

    def require_fit(self) -> None:
        for ledger in self.ledgers:
            ledger.require_fit(
                f"raise {ledger.budget_key}, or lower policy.micro_batch_size, policy.num_micro_batches, "
                "policy.prefill_chunk_tokens, sampling.max_new_tokens or prefetch.depth, or use offload=nvme or kv=nvme"
            )


def kv_tiers(shape: ModelShape, config: RuntimeConfig, *, has_device: bool) -> tuple[KVTier, ...]:
    """To be tried, the fastest first. Raises ConfigError where the CPU is to attend to what lies elsewhere."""
    tier = config.kv.tier
    if has_device and cpu_attends(shape, config, has_device=True):
        require(
            tier in (KVTier.auto, KVTier.cpu),
            f"policy.attention=cpu in front of an accelerator wants keys and values in host memory, kv={tier.value} "
            "keeps them elsewhere: kv=cpu",
        )
        return (KVTier.cpu,)
    if tier is not KVTier.auto:
        return (tier,)
    return (KVTier.device, KVTier.cpu, KVTier.nvme) if has_device else (KVTier.device, KVTier.nvme)


def place(shape: ModelShape, config: RuntimeConfig, budgets: Budgets, load: Load) -> Placement:
    """The first that fits, of what keeps most in compute memory: keys and values before layers. Where nothing fits, the
    ledgers of the smallest say why.

    Embeddings and head stay resident where they fit and are streamed like layers where they don't.
    """
    placer = _Placer(shape=shape, config=config, budgets=budgets, load=load)
    placement = None
    for placement in placer.attempts():
        if placement.fits:
            return placement
    assert placement is not None, "there is always something to try"
    return placement


@dataclass(frozen=True, kw_only=True)
class _Placer:
    shape: ModelShape
    config: RuntimeConfig
    budgets: Budgets
    load: Load

    def attempts(self) -> Iterator[Placement]:
        for kv in self._kv_layouts():
            for paging in self._pagings(kv):
                for resident in self._residents(paging):
                    yield self._attempt(frozenset(resident), kv, paging)

    def _kv_layouts(self) -> Iterator[KVLayout]:
        fraction, has_device = self.config.kv.device_fraction, self.budgets.has_device
        beside_cpu = has_device and cpu_attends(self.shape, self.config, has_device=True)
        seen: set[tuple[KVTier, tuple[int, ...]] | None] = set()  # None: nothing travels, in whichever tier
        for tier in kv_tiers(self.shape, self.config, has_device=has_device):
            for share in [0.0] if beside_cpu else KV_FRACTIONS if fraction is None else [fraction]:
                layers = travelling_layers(self.shape, tier, share, has_device=has_device)
                key = (tier, layers) if layers else None
                if key in seen:
                    continue
                seen.add(key)
                yield kv_layout(
                    self.shape,
                    tier,
                    layers,
                    num_pages=self.load.num_kv_pages,
                    slot_pages=min(self.load.lane_pages, self.load.num_kv_pages),
                    num_slots=0 if beside_cpu else self.config.kv.num_slots,
                )

    def _pagings(self, kv: KVLayout) -> list[ExpertPaging]:
        """What to try. `auto` pages where that reads less, and where a whole layer has no room."""
        paging = self.config.offload.expert_paging
        if not pageable_stages(self.shape) or self._keeps_all:
            return [ExpertPaging.off]
        if paging is not ExpertPaging.auto:
            return [paging]
        if_it_fits, if_not = (self._best_paging(layer_fits=layer_fits) for layer_fits in (True, False))
        return [if_it_fits] if if_it_fits is if_not else [if_it_fits, if_not]

    def _best_paging(self, *, layer_fits: bool) -> ExpertPaging:
        stage = self.shape.stages[min(pageable_stages(self.shape))]
        is_batched = self.config.policy.schedule is Order.module_batched
        rows = sum(map(len, self.load.lanes)) if is_batched else self.load.lane_rows
        return choose_paging(
            num_experts=stage.num_experts,
            num_experts_per_token=stage.num_experts_per_token,
            num_tokens=rows,
            num_requests=1 if is_batched else len(self.load.lanes),
            layer_fits=layer_fits,
        )

    @property
    def _keeps_all(self) -> bool:
        tier = self.config.offload.tier
        return tier is Tier.none or (tier is Tier.cpu and not self.budgets.has_device)

    def _residents(self, paging: ExpertPaging) -> Iterator[list[int]]:
        layers = [stage.index for stage in self.shape.stages if stage.kind.is_layer]
        outer = [stage.index for stage in self.shape.stages if not stage.kind.is_layer]
        if self._keeps_all:
            yield [*outer, *layers]
            return
        wanted = self.config.offload.resident_layers
        counts = range(len(layers), -1, -1) if wanted is None else [min(wanted, len(layers))]
        for num_resident in counts:
            yield [*outer, *_kept_layers(self.shape, num_resident)]
        yield _kept_layers(self.shape, counts[-1])

    def _attempt(self, resident: frozenset[int], kv: KVLayout, paging: ExpertPaging) -> Placement:
        streamed = tuple(stage.index for stage in self.shape.stages if stage.index not in resident)
        paged = pageable_stages(self.shape) & {*streamed} if paging is not ExpertPaging.off else frozenset[int]()
        has_device = self.budgets.has_device
        walks = make_walks(self.shape, self.config, streamed, kv, len(self.load.lanes), has_device=has_device)
        placement = Placement(
            resident=resident,
            walk=walks.prefill,
            decode_walk=walks.decode,
            slot_bytes=max((self._slot_bytes(s, paged) for s in streamed), default=0),
            ledgers=(),
            kv=kv,
            exchange=exchange_size(self.shape, kv, walks.decode, self.load),
            paged=paged,
            paging=paging if paged else ExpertPaging.off,
            num_expert_slots=max(2, self.config.prefetch.depth + 1) if paged else 0,
        )
        return replace(placement, ledgers=self._ledgers(placement))

    def _slot_bytes(self, stage: int, paged: frozenset[int]) -> int:
        return (self._dense_bytes if stage in paged else self._whole_bytes)[stage]

    @cached_property
    def _whole_bytes(self) -> tuple[int, ...]:
        return tuple(slot_layout(stage).num_bytes for stage in self.shape.stages)

    @cached_property
    def _dense_bytes(self) -> tuple[int, ...]:
        return tuple(slot_layout(stage.dense).num_bytes for stage in self.shape.stages)

    def _expert_sizes(self, placement: Placement) -> list[ExpertSizes]:
        return [self._sizes_of_experts[stage] for stage in sorted(placement.paged)]

    @cached_property
    def _sizes_of_experts(self) -> dict[int, ExpertSizes]:
        return {stage: ExpertSizes.of(self.shape.stages[stage]) for stage in pageable_stages(self.shape)}

    def _ledgers(self, placement: Placement) -> tuple[Ledger, ...]:
        host_key, device_key = "offload.host_memory_gib", "offload.device_memory_gib"
        compute, host = self._compute_entries(placement), self._host_entries(placement)
        host_bytes, device_bytes = self.budgets.host_bytes, self.budgets.device_bytes
        if device_bytes is None:
            return (Ledger(memory="host", budget_bytes=host_bytes, budget_key=host_key, entries=compute),)
        return (
            Ledger(memory="device", budget_bytes=device_bytes, budget_key=device_key, entries=compute),
            Ledger(memory="host", budget_bytes=host_bytes, budget_key=host_key, entries=host),
        )

    def _compute_entries(self, placement: Placement) -> tuple[Entry, ...]:
        resident, slots, size = placement.resident, placement.walk.num_slots, placement.slot_bytes
        shape, load = self.shape, self.load
        entries = [
            Entry(
                name="resident weights",
                num_bytes=_resident_bytes([shape.stages[s] for s in sorted(resident)]),
                equation=f"{len(resident)} of {len(shape.stages)} stages",
            ),
            Entry(name="slots", num_bytes=slots * size, equation=f"{slots} x {size:,} B"),
        ]
        if placement.paged:
            entries.append(slot_entry(self._expert_sizes(placement), placement.num_expert_slots))
        entries += kv_cost(shape, placement.kv, has_device=self.budgets.has_device).compute
        if placement.host_layers:
            entries.append(device_entry(shape, placement.kv, placement.exchange, load))
        entries += lane_entries(shape, load.lanes, load.chunk_tokens)
        if placement.walk.routing:
            entries += batch_entries(shape, load.lane_tokens)
        return tuple(entries)

    def _host_entries(self, placement: Placement) -> tuple[Entry, ...]:
        """In front of an accelerator."""
        walk, pinned = placement.walk, pinned_bytes(placement.slot_bytes)
        staging = walk.num_staging_slots
        entries = [
            Entry(name="staging slots", num_bytes=staging * pinned, equation=f"{staging} x {pinned:,} B, pinned")
        ]
        if self.config.offload.tier is Tier.cpu:
            num_bytes = sum(pinned_bytes(self._slot_bytes(s, placement.paged)) for s in walk.streamed)
            entries.append(Entry(name="weights", num_bytes=num_bytes, equation=f"{len(walk.streamed)} stages, pinned"))
        if placement.paged:
            entries += host_entries(self._expert_sizes(placement), walk)
        entries += kv_cost(self.shape, placement.kv, has_device=True).host
        if placement.host_layers:
            entries.append(pinned_entry(placement.exchange))
        return tuple(entries)


def _kept_layers(shape: ModelShape, num_resident: int) -> list[int]:
    """The decoder's layers first, which every pass needs; an encoder's are needed once per block."""
    kept: list[int] = []
    for kind in (StageKind.layer, StageKind.encoder):
        stages = shape.of_kind(kind)
        num_kept = min(num_resident - len(kept), len(stages))
        kept += [stages[place].index for place in spread(len(stages), num_kept)]
    return kept


def _resident_bytes(stages: Sequence[Stage]) -> int:
    """Of the buffers that hold the stages: tied weights once, alignment included."""
    return sum(group_layout(group).num_bytes for group in resident_groups(stages))
