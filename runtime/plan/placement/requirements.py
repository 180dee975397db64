"""What a placement needs of each memory, term by term."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...config.settings import RuntimeConfig
from ..shape.extents import LOADING_BYTES, pinned_bytes
from ..shape.model import ModelShape
from ..shape.stage_sizes import ExpertSizes
from . import feedforward
from .exchange import device_entry, pinned_entry
from .experts import batch_entries, host_entries, slot_entry, visit_entries
from .kv import KVCost, KVLayout, kv_cost
from .ledger import Entry, Ledger, library_entry
from .load import Load
from .memory import lane_entries
from .placement import Budgets, Placement
from .recordings import recordings_entry

HOST_KEY, DEVICE_KEY = "offload.host_memory_gib", "offload.device_memory_gib"


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """The needs of every placement with the keys and values of `kv`."""

    shape: ModelShape
    config: RuntimeConfig
    budgets: Budgets
    load: Load
    kv: KVLayout

    def may_hold(self, resident_bytes: int) -> bool:
        """False where compute memory has no room for these weights, even if no other passed through a slot."""
        compute, host = self.budgets.device_bytes, self.budgets.host_bytes
        fixed = sum(entry.num_bytes for entry in self._fixed)
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
    def _fixed(self) -> tuple[Entry, ...]:
        """What compute memory holds, whichever weights stay there."""
        lanes, chunk, libraries = self.load.lanes, self.load.chunk_tokens, self.budgets.library_bytes
        if not libraries:
            return (*self._kv_cost.compute, *lane_entries(self.shape, lanes, chunk))
        entries = lane_entries(self.shape, lanes, chunk, slack_bytes=0)
        return (*self._kv_cost.compute, *entries, self.budgets.computed(library_entry(libraries)))

    @cached_property
    def _kv_cost(self) -> KVCost:
        return kv_cost(self.shape, self.kv, has_device=self.budgets.has_device)

    def _compute_entries(self, placement: Placement) -> tuple[Entry, ...]:
        resident, slots, size = placement.resident, placement.walk.num_slots, placement.slot_bytes
        staying = Entry(
            name="resident weights",
            num_bytes=self.shape.sizes.resident_bytes(resident),
            equation=f"{len(resident)} of {len(self.shape.stages)} stages",
        )
        entries = [
            self.budgets.computed(staying) if self.budgets.has_device else self.budgets.share(staying),
            self.budgets.computed(Entry(name="slots", num_bytes=slots * size, equation=f"{slots} x {size:,} B")),
        ]
        if placement.paged:
            entries.append(slot_entry(self._expert_sizes(placement), placement.num_expert_slots))
        if placement.dequantized is not None:
            entries.append(self.budgets.computed(placement.dequantized.entry))
        entries += self._fixed
        if self.config.model.graphs and self.budgets.has_device:
            entries.append(self.budgets.computed(recordings_entry(self.shape, self.load.lanes)))
        copied = 0 if self.budgets.has_device else max(self.shape.sizes.misaligned_bytes)
        if copied:
            entry = Entry(name="aligned copy", num_bytes=copied, equation="of the stage that is computed")
            entries.append(self.budgets.copied(entry))
        if placement.host_layers:
            entries.append(device_entry(self.shape, self.kv, placement.exchange, self.load))
        entries += feedforward.device_entries(self.shape, placement.cpu_share)
        is_batched = bool(placement.walk.routing)
        if is_batched:
            entries += batch_entries(self.shape, self.load.all_tokens)
        if self.budgets.has_device:
            num_tokens = self.load.all_tokens if is_batched else self.load.most_tokens
            entries += visit_entries(self.shape, num_tokens, is_batched=is_batched)
        return tuple(entries)

    def _host_entries(self, placement: Placement) -> tuple[Entry, ...]:
        """What host memory holds in front of an accelerator."""
        walk, pinned = placement.walk, pinned_bytes(placement.slot_bytes)
        staging = walk.num_staging_slots
        entries = [
            self.budgets.copied(
                Entry(name="staging slots", num_bytes=staging * pinned, equation=f"{staging} x {pinned:,} B, pinned")
            )
        ]
        if placement.resident:
            loading = pinned_bytes(min(self.shape.sizes.resident_bytes(placement.resident), LOADING_BYTES))
            entry = Entry(name="loading", num_bytes=loading, equation="what stays passes through it, pinned")
            entries.append(self.budgets.copied(entry))
        if walk.in_host:
            sizes = self.shape.sizes.slot_bytes(placement.paged)
            num_bytes = sum(pinned_bytes(sizes[stage]) for stage in walk.in_host)
            entry = Entry(name="weights", num_bytes=num_bytes, equation=f"{len(walk.in_host)} stages, pinned")
            entries.append(self.budgets.share(entry))
        if placement.paged:
            experts = {stage: self.shape.sizes.experts[stage] for stage in placement.paged}
            entries += host_entries(experts, walk, self.budgets.share)
        entries += feedforward.host_entries(self.shape, placement.cpu_share)
        entries += self._kv_cost.host
        if placement.host_layers:
            entries.append(pinned_entry(placement.exchange))
        return tuple(entries)

    def _expert_sizes(self, placement: Placement) -> Sequence[ExpertSizes]:
        return [self.shape.sizes.experts[stage] for stage in sorted(placement.paged)]
