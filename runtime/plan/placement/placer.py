"""Searches the placement with the most KV cache, then the most layers, in compute memory; and its memory needs.

A **resident** stage stays in compute memory. All other stages are **streamed** through slots, from host memory or disk.
A lane is a micro-batch in execution.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...config.orders import PLAIN
from ...config.settings import Dequantize, ExpertPaging, KVDType, KVTier, Prefetch, RuntimeConfig, Tier
from ...errors import ConfigError
from ..shape.extents import LOADING_BYTES, pinned_bytes
from ..shape.model import ModelShape
from ..shape.stage_sizes import evenly_spaced
from . import feedforward
from .dequantized import DequantizedSize
from .experts import (
    EXPERT_SLOTS,
    EXPERT_SLOTS_BYTES,
    ExpertPhase,
    batch_entries,
    choose_paging,
    host_entries,
    kept_entry,
    pageable_stages,
    slot_entry,
    visit_entries,
)
from .feedforward import CpuShare, cpu_multiplies, require_cpu_experts
from .kv import (
    KVCost,
    KVLayout,
    exchange_device_entry,
    exchange_host_entry,
    exchange_size,
    kv_cost,
    kv_layout,
    offloaded_kv_layers,
)
from .ledger import Entry, Ledger, library_entry
from .load import Load
from .memory import lane_entries, recordings_entry
from .placement import Budgets, Placement
from .walks import cpu_attends, make_walk

HOST_KEY, DEVICE_KEY = "offload.host_memory_gib", "offload.device_memory_gib"


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Memory needs that placements with the same KV layout have in common, and their ledgers."""

    shape: ModelShape
    config: RuntimeConfig
    budgets: Budgets
    load: Load
    kv: KVLayout

    def can_hold(self, resident_bytes: int) -> bool:
        """True if `resident_bytes` of weights fit in compute memory, next to the fixed entries but without slots."""
        compute, host = self.budgets.device_bytes, self.budgets.host_bytes
        fixed = sum(entry.num_bytes for entry in self._fixed_entries)
        if compute is None:
            return self.budgets.shared_bytes(resident_bytes) + fixed <= host
        return resident_bytes * self.budgets.num_devices + fixed <= compute

    def ledgers(self, placement: Placement) -> tuple[Ledger, ...]:
        compute, budgets = self._compute_entries(placement), self.budgets
        if budgets.device_bytes is None:
            return (Ledger(memory="host", budget_bytes=budgets.host_bytes, budget_key=HOST_KEY, entries=compute),)
        host = self._host_entries(placement)
        return (
            Ledger(memory="device", budget_bytes=budgets.device_bytes, budget_key=DEVICE_KEY, entries=compute),
            Ledger(memory="host", budget_bytes=budgets.host_bytes, budget_key=HOST_KEY, entries=host),
        )

    @cached_property
    def _fixed_entries(self) -> tuple[Entry, ...]:
        """The compute memory that does not depend on the resident weights: KV cache, lanes, libraries."""
        lanes, chunk, libraries = self.load.lanes, self.load.chunk_tokens, self.budgets.library_bytes
        if not libraries:
            return (*self._kv_cost.compute, *lane_entries(self.shape, lanes, chunk))
        entries = lane_entries(self.shape, lanes, chunk, slack_bytes=0)
        return (*self._kv_cost.compute, *entries, self.budgets.count_per_device(library_entry(libraries)))

    @cached_property
    def _kv_cost(self) -> KVCost:
        return kv_cost(self.shape, self.kv, has_device=self.budgets.has_device)

    def _compute_entries(self, placement: Placement) -> tuple[Entry, ...]:
        resident, slots, size = placement.resident, placement.walk.num_slots, placement.slot_bytes
        budgets, num_bytes = self.budgets, self.shape.sizes.resident_bytes(resident, placement.paged)
        equation = f"{len(resident)} of {len(self.shape.stages)} stages"
        weights = Entry(name="resident weights", num_bytes=num_bytes, equation=equation)
        weight_slots = Entry(name="weight slots", num_bytes=slots * size, equation=f"{slots} x {size:,} B")
        entries = [
            budgets.count_per_device(weights) if budgets.has_device else budgets.count_shared(weights),
            budgets.count_per_device(weight_slots),
        ]
        if placement.paged:
            experts = [self.shape.sizes.experts[stage] for stage in placement.paged]
            entries.append(slot_entry(experts, placement.num_expert_slots))
            if placement.num_kept_experts:
                entries.append(kept_entry(experts, placement.num_kept_experts))
        if placement.dequantized is not None:
            entries.append(self.budgets.count_per_device(placement.dequantized.entry))
        entries += self._fixed_entries
        if self.config.model.graphs and self.budgets.has_device:
            entries.append(self.budgets.count_per_device(recordings_entry(self.shape, self.load.lanes)))
        misaligned = 0 if self.budgets.has_device else max(self.shape.sizes.misaligned_bytes)
        if misaligned:
            entry = Entry(name="aligned copy", num_bytes=misaligned, equation="of the computed stage")
            entries.append(self.budgets.count_per_process(entry))
        if placement.host_layers:
            entries.append(exchange_device_entry(self.shape, self.kv, placement.exchange, self.load))
        entries += feedforward.device_entries(self.shape, placement.cpu_share)
        is_batched = bool(placement.walk.batched_experts)
        if is_batched:
            entries += batch_entries(self.shape, self.load.block_tokens)
        if self.budgets.has_device:
            num_tokens = self.load.block_tokens if is_batched else self.load.max_tokens
            entries += visit_entries(self.shape, num_tokens, is_batched=is_batched)
        return tuple(entries)

    def _host_entries(self, placement: Placement) -> tuple[Entry, ...]:
        """Returns the host memory that a run with an accelerator uses."""
        walk, pinned = placement.walk, pinned_bytes(placement.slot_bytes)
        count = walk.num_staging_slots
        staging = Entry(name="staging slots", num_bytes=count * pinned, equation=f"{count} x {pinned:,} B, pinned")
        entries = [self.budgets.count_per_process(staging)]
        if placement.resident:
            num_bytes = self.shape.sizes.resident_bytes(placement.resident, placement.paged)
            loading = pinned_bytes(min(num_bytes, LOADING_BYTES))
            entry = Entry(name="load buffer", num_bytes=loading, equation="for resident weights, pinned")
            entries.append(self.budgets.count_per_process(entry))
        if walk.in_host:
            sizes = self.shape.sizes.slot_bytes(placement.paged)
            num_bytes = sum(pinned_bytes(sizes[stage]) for stage in walk.in_host)
            entry = Entry(name="weights", num_bytes=num_bytes, equation=f"{len(walk.in_host)} stages, pinned")
            entries.append(self.budgets.count_shared(entry))
        if placement.paged:
            experts = {stage: self.shape.sizes.experts[stage] for stage in placement.paged}
            entries += host_entries(experts, walk, self.budgets.count_shared)
        entries += feedforward.host_entries(self.shape, placement.cpu_share)
        entries += self._kv_cost.host
        if placement.host_layers:
            entries.append(exchange_host_entry(placement.exchange))
        return tuple(entries)


KV_FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.0)  # candidates if kv.device_fraction is null


def cpu_attention_obstacle(shape: ModelShape, config: RuntimeConfig) -> str | None:
    """Returns the reason why the CPU next to an accelerator cannot compute attention; None if it can."""
    tier = config.kv.tier
    if tier not in (KVTier.auto, KVTier.cpu):
        return (
            f"policy.attention=cpu with an accelerator needs the KV cache in host memory, not kv={tier.value}: "
            "set kv=cpu"
        )
    if shape.kv_dtype is not KVDType.auto:
        return (
            f"policy.attention=cpu with an accelerator does not support kv.dtype={shape.kv_dtype.value}: "
            "set kv.dtype=auto, or policy.attention=device"
        )
    return None


def kv_tiers(shape: ModelShape, config: RuntimeConfig, *, has_device: bool) -> tuple[KVTier, ...]:
    """Returns the candidate tiers for the KV cache, the fastest first.

    Raises ConfigError if the configured tier does not support `policy.attention=cpu`.
    """
    tier = config.kv.tier
    if has_device and cpu_attends(shape, config, has_device=True):
        if (obstacle := cpu_attention_obstacle(shape, config)) is not None:
            raise ConfigError(obstacle)
        return (KVTier.cpu,)
    if tier is not KVTier.auto:
        return (tier,)
    return (KVTier.device, KVTier.cpu, KVTier.nvme) if has_device else (KVTier.device, KVTier.nvme)


def can_offload_kv(shape: ModelShape, config: RuntimeConfig, tier: KVTier, *, has_device: bool) -> bool:
    """True if the KV of some layers may be loaded from `tier` in each pass, and stored back."""
    layers = offloaded_kv_layers(shape, tier, config.kv.device_fraction or 0.0, has_device=has_device)
    return bool(layers) and not (has_device and cpu_attends(shape, config, has_device=True))


def choose_placement(
    shape: ModelShape, config: RuntimeConfig, budgets: Budgets, load: Load, *, keeps_experts: bool = False
) -> Placement:
    """Returns the first placement that fits, or the last and smallest one if none fits.

    Placements are tried in the order of their KV cache in compute memory, most first, then of their resident layers.
    Embeddings and head stay resident if they fit, and are streamed like layers otherwise. What is left of the memory
    keeps single experts of paged stages. With `keeps_experts`, all layers are paged and layers stay resident without
    their experts, so that most of the memory keeps experts. Raises ConfigError if the CPU does not support the
    configured attention or experts.
    """
    require_cpu_experts(shape, config, has_device=budgets.has_device)
    placer = _Placer(shape=shape, config=config, budgets=budgets, load=load, keeps_experts=keeps_experts)
    candidate = None
    for candidate in placer.candidates():
        if candidate.may_fit and (placement := candidate.make_placement()).fits:
            return placement
    assert candidate is not None, "there is always a candidate"
    return candidate.make_placement()


@dataclass(frozen=True, kw_only=True)
class _PlacementCandidate:
    """The choices that determine a placement: KV layout, resident stages, expert paging, area for dequantizing."""

    needs: Requirements  # with the KV layout
    paging: ExpertPaging
    resident: frozenset[int]
    resident_bytes: int  # tied weights count once
    has_dequantize_area: bool = False  # stages are dequantized as a whole, once for all lanes
    keeps_experts: bool = False  # resident stages are paged too

    @property
    def may_fit(self) -> bool:
        """False if the candidate cannot fit. A quick test, which a few candidates pass that do not fit either."""
        return self.needs.can_hold(self.resident_bytes)

    def make_placement(self) -> Placement:
        """Returns the placement, with as many streamed stages in host memory as the tier allows."""
        stages = self.needs.shape.stages
        streamed = [stage.index for stage in stages if stage.parameters and stage.index not in self.resident]
        tier, has_device = self.needs.config.tier, self.needs.budgets.has_device
        if not has_device or tier is Tier.nvme or not streamed:
            return self._make(streamed, frozenset())
        all_in_host = self._make(streamed, frozenset(streamed))
        if tier is Tier.cpu or all_in_host.fits:
            return all_in_host
        none_in_host = self._make(streamed, frozenset())
        if not none_in_host.fits:
            return none_in_host
        host_stages = self._choose_host_stages(none_in_host, streamed)
        return self._make(streamed, host_stages) if host_stages else none_in_host

    def _choose_host_stages(self, placement: Placement, streamed: Sequence[int]) -> frozenset[int]:
        """Returns the streamed stages to keep in host memory, as many as fit in the memory that `placement` leaves.

        They are evenly spaced over the depth: while one of them is computed, the disk reads a later stage.
        """
        ledger = placement.ledgers[-1]
        cpu_entries = feedforward.host_entries(self.needs.shape, self._cpu_share) if placement.paged else ()
        spare = ledger.budget_bytes - ledger.total_bytes - sum(entry.num_bytes for entry in cpu_entries)
        sizes, experts = self.needs.shape.sizes.slot_bytes(placement.paged), self.needs.shape.sizes.experts
        stage_bytes = {
            stage: self.needs.budgets.shared_bytes(
                pinned_bytes(sizes[stage]) + (experts[stage].pinned_bytes if stage in placement.paged else 0)
            )
            for stage in streamed
        }
        for num_chosen in range(len(streamed) - 1, 0, -1):
            chosen = [streamed[index] for index in evenly_spaced(len(streamed), num_chosen)]
            if sum(stage_bytes[stage] for stage in chosen) <= spare:
                return frozenset(chosen)
        return frozenset()

    @property
    def _cpu_share(self) -> CpuShare | None:
        """The rule for experts on the CPU, in decode passes only: prefill has too many tokens per expert."""
        config, load = self.needs.config, self.needs.load
        if not cpu_multiplies(config):
            return None
        is_batched = (config.policy.schedule or PLAIN).style.batches_experts
        return CpuShare(max_tokens=load.block_rows if is_batched else load.max_rows)

    def _make(self, streamed: Sequence[int], in_host: frozenset[int]) -> Placement:
        """Returns the placement with `in_host` as the streamed stages in host memory."""
        shape, config, load, kv = self.needs.shape, self.needs.config, self.needs.load, self.needs.kv
        paging = self.paging
        paged = frozenset[int]()
        if paging is not ExpertPaging.off:
            paged = pageable_stages(shape) & {*streamed, *(self.resident if self.keeps_experts else ())}
        prefill, decode = (
            make_walk(
                shape,
                config,
                streamed,
                kv,
                len(load.lanes),
                in_host=in_host,
                is_decode=is_decode,
                has_device=self.needs.budgets.has_device,
                is_paged=bool(paged),
            )
            for is_decode in (False, True)
        )
        sizes = shape.sizes.slot_bytes(paged)
        num_open = max(walk.order.style.num_open for walk in (prefill, decode))
        placement = Placement(
            resident=self.resident,
            walk=prefill,
            decode_walk=decode,
            slot_bytes=max((sizes[stage] for stage in streamed), default=0),
            ledgers=(),
            kv=kv,
            exchange=exchange_size(shape, kv, decode, load),
            paged=paged,
            paging=paging if paged else ExpertPaging.off,
            num_expert_slots=max(2, config.prefetch.depth + 1) if paged else 0,
            cpu_share=self._cpu_share if paged & in_host else None,
            dequantized=DequantizedSize.from_shape(shape, paged, num_open) if self.has_dequantize_area else None,
            keys_at_minimum=load.keys_at_minimum,
        )
        placement = replace(placement, ledgers=self.needs.ledgers(placement))
        return self._with_spare_experts(placement) if paged else placement

    def _with_spare_experts(self, placement: Placement) -> Placement:
        """Returns the placement with experts in what is left of compute memory.

        On a CPU, further slots let reads of small experts go on while others are computed. Then as many experts stay in
        memory as configured, or as fit. None do if experts come from host memory, for which the memory of an
        accelerator is not measured against its link, or if several processes or ranks share the budgets.
        """
        shape, budgets, offload = self.needs.shape, self.needs.budgets, self.needs.config.offload
        is_alone = shape.num_parts == 1 and shape.rank_stages is None
        is_alone &= budgets.num_copies == budgets.num_sharers == budgets.num_devices == 1
        if not is_alone:
            return placement
        experts = [shape.sizes.experts[stage] for stage in placement.paged]
        num_experts, size = sum(each.num_experts for each in experts), max(each.slot_bytes for each in experts)
        configured = 0 if offload.kept_experts is None and offload.resident_layers is not None else offload.kept_experts
        if placement.paging is not ExpertPaging.hit or placement.walk.in_host:
            configured = 0
        num_fitting, num_slots = max(0, placement.compute_ledger.left_bytes) // size, 0
        if not budgets.has_device and self.needs.config.prefetch.kind is not Prefetch.off:
            wanted = min(EXPERT_SLOTS, EXPERT_SLOTS_BYTES // size) - placement.num_expert_slots
            num_slots = max(0, min(wanted, num_fitting - (configured or 0)))
        num_kept = min(num_fitting - num_slots if configured is None else configured, num_experts)
        if not num_slots and not num_kept:
            return placement
        num_slots += placement.num_expert_slots
        placement = replace(placement, num_expert_slots=num_slots, num_kept_experts=num_kept)
        return replace(placement, ledgers=self.needs.ledgers(placement))


@dataclass(frozen=True, kw_only=True)
class _Placer:
    """Enumerates the candidate placements of a load."""

    shape: ModelShape
    config: RuntimeConfig
    budgets: Budgets
    load: Load
    keeps_experts: bool = False

    def candidates(self) -> Iterator[_PlacementCandidate]:
        """Yields all candidates, the preferred ones first.

        Every number of resident layers is a candidate. More resident layers can take less memory: they need no slots,
        and with an accelerator no host memory.
        """
        residents, areas = list(self._resident_sets()), [False]
        if self.budgets.has_device and DequantizedSize.from_shape(self.shape, frozenset(), 1) is not None:
            # Prefer an area for whole dequantized stages: without it, every lane dequantizes the weights again.
            by_choice = {Dequantize.auto: [True, False], Dequantize.stage: [True], Dequantize.product: [False]}
            areas = by_choice[self.config.offload.dequantize]
        for has_area in areas:
            for kv in self._kv_layouts():
                needs = Requirements(shape=self.shape, config=self.config, budgets=self.budgets, load=self.load, kv=kv)
                for paging in self._paging_modes():
                    for resident, num_bytes in residents:
                        yield _PlacementCandidate(
                            needs=needs,
                            paging=paging,
                            resident=resident,
                            resident_bytes=num_bytes,
                            has_dequantize_area=has_area,
                            keeps_experts=self.keeps_experts,
                        )

    def _kv_layouts(self) -> Iterator[KVLayout]:
        """Yields the distinct KV layouts, the one with most KV in compute memory first."""
        fraction, has_device = self.config.kv.device_fraction, self.budgets.has_device
        attends_on_cpu = has_device and cpu_attends(self.shape, self.config, has_device=True)
        fractions = KV_FRACTIONS if fraction is None else (fraction,)
        if attends_on_cpu:
            fractions = (0.0,)
        # Tier and offloaded layers of earlier layouts; None: nothing is offloaded, whatever the tier.
        seen: set[tuple[KVTier, tuple[int, ...]] | None] = set()
        for tier in kv_tiers(self.shape, self.config, has_device=has_device):
            for share in fractions:
                layers = offloaded_kv_layers(self.shape, tier, share, has_device=has_device)
                key = (tier, layers) if layers else None
                if key in seen:
                    continue
                seen.add(key)
                num_slots = 0 if attends_on_cpu else self.config.kv.num_slots
                spared = 0 if layers and num_slots else self.load.num_spared_pages
                yield kv_layout(
                    self.shape,
                    tier,
                    layers,
                    num_pages=self.load.num_kv_pages - spared,
                    slot_pages=min(self.load.max_pages, self.load.num_kv_pages),
                    num_slots=num_slots,
                )

    def _paging_modes(self) -> list[ExpertPaging]:
        """Returns the candidate modes of expert paging.

        `auto` reads experts one by one if that reads fewer bytes, or if a whole layer does not fit into slots.
        """
        paging = self.config.offload.expert_paging
        if not pageable_stages(self.shape) or self._keeps_all:
            return [ExpertPaging.off]
        if cpu_multiplies(self.config) or self.keeps_experts:
            return [ExpertPaging.hit]
        if paging is not ExpertPaging.auto:
            return [paging]
        load, is_batched = self.load, (self.config.policy.schedule or PLAIN).style.batches_experts
        prefill, decode = load.lane_tokens, [len(lane) for lane in load.lanes]  # tokens per pass, by lane
        tokens = [sum(lanes) if is_batched else max(lanes, default=0) for lanes in (prefill, decode)]
        num_runs = 1 if is_batched else len(load.lanes)
        # Both phases use the same mode: prefill hits nearly all experts, but most passes are decode passes.
        phases = (
            ExpertPhase(num_passes=load.num_prefill_passes, runs_per_pass=num_runs, num_tokens=tokens[0]),
            ExpertPhase(num_passes=load.num_decode_passes, runs_per_pass=num_runs, num_tokens=tokens[1]),
        )
        stage = self.shape.stages[min(pageable_stages(self.shape))]
        if_it_fits, if_not = (
            choose_paging(
                num_experts=stage.num_experts,
                num_experts_per_token=stage.num_experts_per_token,
                phases=phases,
                layer_fits=layer_fits,
            )
            for layer_fits in (True, False)
        )
        return [if_it_fits] if if_it_fits is if_not else [if_it_fits, if_not]

    @property
    def _keeps_all(self) -> bool:
        """True if the configured tier requires that all stages stay in compute memory."""
        tier = self.config.tier
        return tier is Tier.none or (tier is Tier.cpu and not self.budgets.has_device)

    def _resident_sets(self) -> Iterator[tuple[frozenset[int], int]]:
        """Yields candidate sets of resident stages, each with its bytes: those with embeddings and head first, and of
        those the ones with most layers."""
        sizes, configured = self.shape.sizes, self.config.offload.resident_layers
        num_layers = sizes.num_layers
        if self._keeps_all:
            yield sizes.choose_resident(num_layers, has_outer=True)
            return
        counts = range(num_layers, -1, -1) if configured is None else [min(configured, num_layers)]
        for has_outer in (True, False):
            for num_resident in counts:
                yield sizes.choose_resident(num_resident, has_outer=has_outer, is_paged=self.keeps_experts)
