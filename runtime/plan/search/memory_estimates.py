"""Memory estimates for every policy of a grid: the ledger's terms, with all requests of the mean length.

Longer requests may take more memory, and paged experts less. The placement then checks the promising policies exactly.
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
    """Memory of each policy. `is_paged`: slots hold a layer's dense part and single experts, not the whole layer."""

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
        self._layer_bytes = float(max(layer_bytes))  # slot size
        # Mean bytes of a layer in host memory. A mean, as the first layers of a mixture may be dense.
        experts = self._work.num_experts * is_paged * pinned_bytes(int(self._work.expert_bytes))
        self._host_layer_bytes = (
            sum(map(pinned_bytes, layer_bytes)) / len(layer_bytes) + experts
        ) / budgets.num_sharers
        self._kv_in_host = self._has_device & grid.cpu_attends  # all KV, without slots on the device
        paged = {layer.index for layer in shape.layers} if is_paged else frozenset[int]()
        size, mode = DequantizedSize.from_shape(shape, paged, 1), config.offload.dequantize
        scratch_bytes = 0 if size is None or mode is Dequantize.product else size.entry.num_bytes
        has_scratch = mode is Dequantize.stage or scratch_bytes <= (budgets.device_bytes or 0) // 2
        self._dequantize_bytes = scratch_bytes if has_scratch else 0  # scratch area for dequantized weights

    def fits(self, budgets: Budgets) -> Bools:
        if budgets.device_bytes is None:
            return self.compute_bytes <= budgets.host_bytes
        outside_bytes = max(0, budgets.library_bytes - ALLOCATOR_SLACK_BYTES)  # compute_bytes include the slack
        return (self.compute_bytes + outside_bytes <= budgets.device_bytes) & (self.host_bytes <= budgets.host_bytes)

    @cached_property
    def compute_bytes(self) -> Floats:
        """Bytes in device memory, or in host memory without a device."""
        work, grid, shape = self._work, self._grid, self._shape
        is_streamed = grid.resident < work.num_layers
        paged_bytes = self._is_paged * max(2, self._config.prefetch.depth + 1) * work.expert_bytes
        resident_bytes = (work.outer_bytes + grid.resident * work.num_bytes) / (
            1 if self._has_device else self._num_sharers
        )
        resident_bytes += is_streamed * (self._slots * self._layer_bytes + paged_bytes)
        streamed_bytes = self._slots * max(self._layer_bytes, work.widest_outer_bytes) + paged_bytes
        # Without resident layers, embeddings and head may be streamed too.
        weights = np.where(grid.resident == 0, np.minimum(resident_bytes, streamed_bytes), resident_bytes)
        is_batched = grid.batches_experts
        batch_bytes = is_batched * grid.lanes * self._tokens * _total_bytes(batch_entries(shape, 1))
        device_extra = 0.0
        if self._has_device:
            device_extra = self._dequantize_bytes + np.where(
                is_batched,
                self._visit_bytes(grid.lanes * self._tokens, is_batched=True),
                self._visit_bytes(self._tokens, is_batched=False),
            )
        chunk = chunk_tokens(self._config.policy)
        one_lane = self._per_lane(lambda lane: _total_bytes(lane_entries(shape, [lane], chunk)))
        two_lanes = self._per_lane(lambda lane: _total_bytes(lane_entries(shape, [lane, lane], chunk)))
        lanes = one_lane + (grid.lanes - 1) * (two_lanes - one_lane)  # linear in the number of lanes
        return weights + self._kv() + lanes + batch_bytes + device_extra

    @cached_property
    def host_bytes(self) -> Floats:
        """Bytes in host memory with a device. Pinned layers and KV segments are rounded up one by one; resident
        weights need a loading buffer."""
        work, grid = self._work, self._grid
        if not self._has_device:
            return np.zeros_like(grid.sequences)
        layer, expert = (pinned_bytes(int(n)) for n in (self._layer_bytes, work.expert_bytes))
        expert = expert * self._is_paged
        streamed = work.num_layers - grid.resident
        weights = streamed * self._host_layer_bytes * (self._config.tier is Tier.cpu)
        slots = np.minimum(streamed, NUM_STAGING_SLOTS) * layer + (streamed > 0) * NUM_STAGING_SLOTS * expert
        staging = slots * (self._config.tier in (Tier.nvme, Tier.auto))
        resident = work.outer_bytes + grid.resident * work.num_bytes
        loading = (grid.resident > 0) * _pinned(np.minimum(resident, LOADING_BYTES))
        pages = self._positions * work.kv_bytes
        segments = np.floor(pages / SEGMENT_BYTES) * SEGMENT_BYTES + _pinned(pages % SEGMENT_BYTES)
        offloaded = segments * (1 - grid.kv_fraction) * (self._config.kv.tier is not KVTier.nvme)
        kv = work.num_layers * np.where(self._kv_in_host, _pinned(pages), offloaded)
        return weights + staging + loading + kv

    def layers_in_host(self, host_bytes: int) -> Floats:
        """Returns the streamed layers that fit into `host_bytes` in addition to everything else."""
        streamed, spare = self._work.num_layers - self._grid.resident, host_bytes - self.host_bytes
        return np.clip(np.floor(spare / self._host_layer_bytes), 0, streamed)

    @cached_property
    def _positions(self) -> Floats:
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
        """Returns the KV bytes in compute memory: of layers with KV kept there, and of slots or transfers in
        flight for the others."""
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
        """The tokens of a lane in a pass."""
        chunk = chunk_tokens(self._config.policy)
        return self._per_lane(lambda lane: pass_tokens(self._shape, lane, chunk))

    def _visit_bytes(self, tokens: Floats, *, is_batched: bool) -> Floats:
        return by_size(tokens, lambda count: _total_bytes(visit_entries(self._shape, count, is_batched=is_batched)))

    def _per_lane(self, function: Callable[[list[SequenceSize]], float]) -> Floats:
        """Applies `function` to the largest lane of each policy."""
        num_rows = np.minimum(self._grid.micro_batch, self._workload.num_requests)
        return by_size(num_rows, lambda each: function(self._workload.sizes(each)))


def layers_in_host(
    shape: ModelShape, config: RuntimeConfig, workload: Workload, grid: PolicyGrid, budgets: Budgets
) -> Floats:
    """Returns the number of streamed layers held in host memory."""
    streamed = len(shape.layers) - grid.resident
    if not budgets.has_device or config.tier is not Tier.auto:
        return streamed * (config.tier is Tier.cpu)
    needs = (MemoryEstimate(shape, config, workload, grid, budgets, is_paged=is_paged) for is_paged in (False, True))
    return np.maximum(*(estimate.layers_in_host(budgets.host_bytes) for estimate in needs))


def _total_bytes(entries: Iterable[Entry]) -> float:
    return float(sum(entry.num_bytes for entry in entries))


def _pinned(num_bytes: Floats) -> Floats:
    """Elementwise `pinned_bytes` of aligned pieces."""
    small = 2.0 ** np.ceil(np.log2(np.maximum(1.0, num_bytes)))
    rounded = np.where(num_bytes < REGISTERED_BYTES, small, np.ceil(num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return np.where(num_bytes > 0, rounded, 0.0)
