"""Estimates the memory of every policy of a grid, from the entries of a ledger for requests of the mean length.

Longer requests may take more memory, and experts that are read one by one ("paged") less. So the placement checks the
promising policies exactly. A lane is a micro-batch.
"""

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from ...config.settings import Dequantize, KVTier, RuntimeConfig, Tier
from ...units import round_up
from ..cost.work import LayerWork
from ..placement.defaults import chunk_tokens
from ..placement.dequantized import DequantizedSize
from ..placement.experts import NUM_STAGING_SLOTS, batch_entries, visit_entries
from ..placement.kv import ROUND_TRIP_PARTS, SEGMENT_BYTES, STORES_IN_FLIGHT
from ..placement.ledger import Entry
from ..placement.memory import ALLOCATOR_SLACK_BYTES, PAGE_TOKENS, SequenceSize, lane_entries, pass_tokens
from ..placement.placement import Budgets
from ..shape.extents import (
    ALIGNMENT_BYTES,
    LOADING_BYTES,
    REGISTERED_BYTES,
    pinned_bytes,
    slot_layout,
)
from ..shape.model import ModelShape
from .grid import Bools, Floats, PolicyGrid, by_size
from .workload import Workload


class MemoryEstimate:
    """Memory of each policy. `is_paged`: experts are read one by one, so weight slots hold layers without experts."""

    def __init__(
        self,
        shape: ModelShape,
        config: RuntimeConfig,
        workload: Workload,
        grid: PolicyGrid,
        budgets: Budgets,
        *,
        is_paged: bool,
    ):
        self._shape, self._config, self._workload, self._grid = shape, config, workload, grid
        self._has_device, self._num_sharers, self._is_paged = budgets.has_device, budgets.num_sharers, is_paged
        self._work, self._slots = LayerWork.from_shape(shape), grid.num_slots(config.prefetch)
        layer_bytes = [slot_layout(layer.dense if is_paged else layer).num_bytes for layer in shape.layers]
        self._layer_bytes = float(max(layer_bytes))  # size of a weight slot
        # Mean bytes of a layer in host memory. Sizes differ if the first layers have no experts.
        experts = self._work.num_experts * is_paged * pinned_bytes(int(self._work.expert_bytes))
        self._host_layer_bytes = (
            sum(map(pinned_bytes, layer_bytes)) / len(layer_bytes) + experts
        ) / budgets.num_sharers
        self._kv_in_host = self._has_device & grid.cpu_attends  # policies with all KV in host memory, without slots
        paged = {layer.index for layer in shape.layers} if is_paged else frozenset[int]()
        size, mode = DequantizedSize.from_shape(shape, paged, 1), config.offload.dequantize
        # The area for whole dequantized layers. With `auto` it must not take more than half of the device.
        scratch_bytes = 0 if size is None or mode is Dequantize.product else size.entry.num_bytes
        has_scratch = mode is Dequantize.stage or scratch_bytes <= (budgets.device_bytes or 0) // 2
        self._dequantize_bytes = scratch_bytes if has_scratch else 0

    def fits(self, budgets: Budgets) -> Bools:
        """Returns whether each policy fits the budgets."""
        if budgets.device_bytes is None:
            return self.compute_bytes <= budgets.host_bytes
        outside_bytes = max(0, budgets.library_bytes - ALLOCATOR_SLACK_BYTES)  # `compute_bytes` includes the slack
        return (self.compute_bytes + outside_bytes <= budgets.device_bytes) & (self.host_bytes <= budgets.host_bytes)

    @cached_property
    def compute_bytes(self) -> Floats:
        """Bytes of each policy in device memory, or without a device in host memory."""
        work, grid, shape = self._work, self._grid, self._shape
        is_streamed = grid.resident < work.num_layers
        paged_bytes = self._is_paged * max(2, self._config.prefetch.depth + 1) * work.expert_bytes
        resident_bytes = (work.outer_bytes + grid.resident * work.num_bytes) / (
            1 if self._has_device else self._num_sharers
        )
        resident_bytes += is_streamed * (self._slots * self._layer_bytes + paged_bytes)  # slots for other layers
        streamed_bytes = self._slots * max(self._layer_bytes, work.widest_outer_bytes) + paged_bytes
        # Without resident layers, embeddings and head may be streamed too, if that takes less memory.
        weights = np.where(grid.resident == 0, np.minimum(resident_bytes, streamed_bytes), resident_bytes)
        is_batched = grid.batches_experts
        batch_bytes = is_batched * grid.lanes * self._tokens * _total_bytes(batch_entries(shape, 1))
        device_only = 0.0  # areas for dequantizing, and experts in grouped products
        if self._has_device:
            device_only = self._dequantize_bytes + np.where(
                is_batched,
                self._visit_bytes(grid.lanes * self._tokens, is_batched=True),
                self._visit_bytes(self._tokens, is_batched=False),
            )
        chunk = chunk_tokens(self._config.policy)
        one_lane = self._per_lane(lambda lane: _total_bytes(lane_entries(shape, [lane], chunk)))
        two_lanes = self._per_lane(lambda lane: _total_bytes(lane_entries(shape, [lane, lane], chunk)))
        lane_bytes = one_lane + (grid.lanes - 1) * (two_lanes - one_lane)  # linear in the number of lanes
        return weights + self._kv() + lane_bytes + batch_bytes + device_only

    @cached_property
    def host_bytes(self) -> Floats:
        """Bytes of each policy in the host memory next to a device; 0 without a device.

        Pinned layers and KV segments are rounded up one by one. Resident weights need a buffer while they are loaded.
        """
        work, grid = self._work, self._grid
        if not self._has_device:
            return np.zeros_like(grid.sequences)
        layer = pinned_bytes(int(self._layer_bytes))
        expert = pinned_bytes(int(work.expert_bytes)) * self._is_paged
        streamed = work.num_layers - grid.resident
        weights = streamed * self._host_layer_bytes * (self._config.tier is Tier.cpu)
        # Staging slots between disk and device.
        slots = np.minimum(streamed, NUM_STAGING_SLOTS) * layer + (streamed > 0) * NUM_STAGING_SLOTS * expert
        staging = slots * (self._config.tier in (Tier.nvme, Tier.auto))
        resident = work.outer_bytes + grid.resident * work.num_bytes
        loading = (grid.resident > 0) * _pinned(np.minimum(resident, LOADING_BYTES))
        # KV of a layer: in one pinned segment for CPU attention, else in segments of limited size, for offloaded
        # layers.
        page_bytes = self._positions * work.kv_bytes
        segments = np.floor(page_bytes / SEGMENT_BYTES) * SEGMENT_BYTES + _pinned(page_bytes % SEGMENT_BYTES)
        offloaded = segments * (1 - grid.kv_fraction) * (self._config.kv.tier is not KVTier.nvme)
        kv = work.num_layers * np.where(self._kv_in_host, _pinned(page_bytes), offloaded)
        return weights + staging + loading + kv

    def layers_in_host(self, host_bytes: int) -> Floats:
        """Returns how many streamed layers fit into `host_bytes` next to all other host memory, for each policy."""
        streamed, spare = self._work.num_layers - self._grid.resident, host_bytes - self.host_bytes
        return np.clip(np.floor(spare / self._host_layer_bytes), 0, streamed)

    @cached_property
    def _positions(self) -> Floats:
        """The KV positions of a block."""
        grid, workload = self._grid, self._workload
        if self._shape.is_packed:
            spared = grid.by_sharing_size(workload.mean_spared_tokens, self._has_device)
            per_sequence = workload.mean_capacity_tokens - spared
        elif self._shape.has_encoder:
            per_sequence = round_up(max(workload.max_new_tokens, workload.num_scored), PAGE_TOKENS)
        else:
            per_sequence = round_up(workload.prompt_tokens[-1] + workload.max_new_tokens, PAGE_TOKENS)
        return np.ceil(grid.sequences) * per_sequence

    def _kv(self) -> Floats:
        """Returns the KV bytes in compute memory.

        They are those of layers whose KV stays there, plus slots for offloaded KV, or buffers for CPU attention.
        """
        work, grid, in_host = self._work, self._grid, self._kv_in_host
        resident = work.num_layers * self._positions * work.kv_bytes * np.where(in_host, 0.0, grid.kv_fraction)
        is_offloaded = (grid.kv_fraction < 1) & ~in_host
        slots = self._config.kv.num_slots * self._positions / grid.lanes * work.kv_bytes
        round_trips = (
            2 * np.ceil(grid.rows) * (work.kv_bytes + 2 * work.query_bytes) + ROUND_TRIP_PARTS * ALIGNMENT_BYTES
        )
        in_flight = STORES_IN_FLIGHT * self._tokens * work.kv_bytes + round_trips
        return resident + is_offloaded * slots + in_host * in_flight

    @cached_property
    def _tokens(self) -> Floats:
        """The maximum tokens of a lane in a pass."""
        chunk = chunk_tokens(self._config.policy)
        return self._per_lane(lambda lane: pass_tokens(self._shape, lane, chunk))

    def _visit_bytes(self, tokens: Floats, *, is_batched: bool) -> Floats:
        """Returns the bytes of experts in grouped products, see `visit_entries`."""
        return by_size(tokens, lambda count: _total_bytes(visit_entries(self._shape, count, is_batched=is_batched)))

    def _per_lane(self, function: Callable[[list[SequenceSize]], float]) -> Floats:
        """Returns `function` of the largest lane, for each policy."""
        num_rows = np.minimum(self._grid.micro_batch, self._workload.num_requests)
        return by_size(num_rows, lambda each: function(self._workload.sizes(each)))


def layers_in_host(
    shape: ModelShape, config: RuntimeConfig, workload: Workload, grid: PolicyGrid, budgets: Budgets
) -> Floats:
    """Returns the number of streamed layers that stay in host memory, for each policy."""
    streamed = len(shape.layers) - grid.resident
    if not budgets.has_device or config.tier is not Tier.auto:
        return streamed * (config.tier is Tier.cpu)
    needs = (MemoryEstimate(shape, config, workload, grid, budgets, is_paged=is_paged) for is_paged in (False, True))
    return np.maximum(*(estimate.layers_in_host(budgets.host_bytes) for estimate in needs))


def _total_bytes(entries: Iterable[Entry]) -> float:
    return float(sum(entry.num_bytes for entry in entries))


def _pinned(num_bytes: Floats) -> Floats:
    """Returns `pinned_bytes(n, is_aligned=False)` for each element n."""
    small = 2.0 ** np.ceil(np.log2(np.maximum(1.0, num_bytes)))
    rounded = np.where(num_bytes < REGISTERED_BYTES, small, np.ceil(num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return np.where(num_bytes > 0, rounded, 0.0)
