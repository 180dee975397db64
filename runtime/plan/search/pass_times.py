"""The hierarchical roofline over a grid of policies: busy seconds of each resource in a pass, and seconds of the pass.

Concurrent resources take as long as the slowest: T = max(link, CPU, compute, disk, host memory); host memory carries
the bytes of disk, link and CPU together. Work that an order does not overlap is added. Only the simulator models
startup, slots and barriers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...config.settings import Dequantize, ExpertPaging, KVTier, RuntimeConfig
from ...resources import Resource
from ..cost.rates import MachineRates
from ..cost.work import LayerWork, make_cpu_share
from ..placement.memory import FEW_ROWS
from .grid import Floats, PolicyGrid
from .workload import Workload


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of one pass, for each policy of a grid."""

    busy: dict[Resource, Floats]
    seconds: Floats

    def busy_at(self, index: int) -> dict[Resource, float]:
        """Returns the busy seconds of one policy."""
        return {resource: float(seconds[index]) for resource, seconds in self.busy.items()}


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Computes pass times for a grid. `in_host`: number of streamed layers that stay in host memory, per policy."""

    work: LayerWork
    rates: MachineRates
    workload: Workload
    config: RuntimeConfig
    has_device: bool
    in_host: Callable[[PolicyGrid], Floats]
    item_bytes: int
    is_packed: bool = True
    cross_kv_bytes: int = 0  # per encoder position; above 0, the decoder's own KV cache holds no prompt

    def seconds(self, grid: PolicyGrid) -> Floats:
        """Returns the seconds of the whole workload, with equal blocks."""
        prefill, decode = self.prefill_pass(grid), self.decode_pass(grid)
        num_decodes = max(0, self.workload.max_new_tokens - 1)  # the first new token comes out of the prefill
        return grid.num_blocks * (self.prefill_passes(grid) * prefill.seconds + num_decodes * decode.seconds)

    def prefill_passes(self, grid: PolicyGrid) -> Floats:
        return np.maximum(1.0, grid.rows * self._prompt_tokens(grid) / self._chunk(grid))

    def _prompt_tokens(self, grid: PolicyGrid) -> Floats:
        """Returns the computed tokens per prompt."""
        if self.is_packed:
            return self.workload.mean_prompt_tokens - self._spared_tokens(grid)
        return grid.by_lane_size(self.workload.mean_padded_tokens)

    def _spared_tokens(self, grid: PolicyGrid) -> Floats:
        """Returns the tokens per prompt saved by prefix sharing."""
        if not self.is_packed:
            return np.zeros_like(grid.rows)
        return grid.by_sharing_size(self.workload.mean_spared_tokens, self.has_device)

    def _chunk(self, grid: PolicyGrid) -> Floats:
        """Returns the tokens of a lane in one prefill pass: the configured chunk, at least one column if padded, or
        else the whole prompts. Larger chunks move fewer bytes; memory is checked later."""
        whole, configured = grid.rows * self._prompt_tokens(grid), self.config.policy.prefill_chunk_tokens
        if configured is None:
            return whole
        return np.minimum(np.maximum(configured, 0 if self.is_packed else grid.rows), whole)

    def decode_pass(self, grid: PolicyGrid) -> PassTimes:
        """Returns the times of a decode pass halfway through the outputs."""
        spared, prompts = self._spared_tokens(grid), self._prompt_tokens(grid)
        cached = (0 if self.cross_kv_bytes else prompts) + self.workload.max_new_tokens / 2
        layers, rates, work = self.work.num_layers, self.rates, self.work
        kv_bytes = layers * grid.sequences * (cached + spared) * work.kv_bytes
        compute = self._products(grid, grid.rows, np.ones_like(grid.rows), decodes=True)
        compute = compute + grid.sequences * prompts * self.cross_kv_bytes / rates.attention_bytes_per_second
        cpu, device = grid.cpu_attends, ~grid.cpu_attends
        exchanged = cpu * layers * grid.sequences if self.has_device else np.zeros_like(grid.sequences)
        new_kv = layers * grid.sequences * work.kv_bytes * np.where(cpu, float(self.has_device), 1 - grid.kv_fraction)
        return self._pass_times(
            grid,
            tokens=grid.rows,
            compute=compute + device * kv_bytes / rates.attention_bytes_per_second,
            attend=cpu * kv_bytes / rates.cpu_attention_bytes_per_second,
            kv_in=device * (1 - grid.kv_fraction) * layers * grid.sequences * cached * work.kv_bytes,
            kv_out=new_kv,
            exchanged=exchanged * work.query_bytes,
        )

    def prefill_pass(self, grid: PolicyGrid) -> PassTimes:
        chunk, work, layers = self._chunk(grid), self.work, self.work.num_layers
        prompts = self._prompt_tokens(grid)
        share = chunk / np.maximum(1e-9, grid.rows * prompts)  # of the block's prompts, in this pass
        pairs = prompts**2
        if self.is_packed:
            spared = grid.by_sharing_size(self.workload.mean_spared_squares, self.has_device)
            pairs = self.workload.mean_squared_tokens - spared
        attention = layers * grid.sequences * share * pairs / 2 * work.pair_flops
        compute = self._products(grid, chunk, max(1, self.workload.num_scored) / np.maximum(1.0, prompts))
        zero = np.zeros_like(chunk)
        return self._pass_times(
            grid,
            tokens=chunk,
            compute=compute + attention / self.rates.prefill_attention_flops_per_second,
            attend=zero,
            kv_in=zero,
            kv_out=layers * grid.lanes * chunk * work.kv_bytes * (1 - grid.kv_fraction),
            exchanged=zero,
        )

    def _products(self, grid: PolicyGrid, tokens: Floats, head_share: Floats, *, decodes: bool = False) -> Floats:
        """Returns the compute seconds of the matrix products in a pass with `tokens` per lane; `head_share` of them
        need logits."""
        work, rates, lanes = self.work, self.rates, grid.lanes
        at_once, turns = grid.tokens_at_once(tokens)
        dense, experts = rates.gemm_seconds(tokens, work.dense_weights), np.zeros_like(tokens)
        visits = at_once * work.num_experts_per_token
        if work.num_experts:
            experts = rates.experts_seconds(work.hits(at_once), visits, work.expert_weights)
        num_times = lanes if self.config.offload.dequantize is Dequantize.product else 1.0
        dequantizing = num_times * rates.dequantize_seconds(work.stored.plus(work.stored_experts), self.item_bytes)
        if decodes and rates.has_code_kernels(self.item_bytes):
            is_few = lanes * tokens <= FEW_ROWS
            dequantizing = np.where(is_few, 0.0, dequantizing)
            unquantized = max(0.0, 1 - work.stored.num_elements / max(1.0, work.dense_weights))
            dense = np.where(is_few, unquantized * dense + rates.codes_seconds(work.stored, tokens), dense)
            if work.stored_experts.num_elements:
                hits = work.hits(at_once)
                codes = hits / work.num_experts * rates.codes_seconds(work.stored_experts, visits / hits)
                experts = np.where(is_few, codes, experts)
        experts = turns * experts * (1 - self._streamed_share(grid) * self._cpu_share(grid, tokens)[0])
        exchanged = rates.layer_exchange_seconds(tokens * work.hidden_bytes)
        layer = lanes * (dense + rates.turn_seconds + exchanged) + experts + dequantizing
        head = lanes * rates.gemm_seconds(tokens * head_share, work.head_weights)
        return work.num_layers * layer + head + rates.pass_seconds

    def _streamed_share(self, grid: PolicyGrid) -> Floats:
        return 1 - grid.resident / max(1, self.work.num_layers)

    def _pass_times(
        self,
        grid: PolicyGrid,
        *,
        tokens: Floats,
        compute: Floats,
        attend: Floats,
        kv_in: Floats,
        kv_out: Floats,
        exchanged: Floats,
    ) -> PassTimes:
        """Returns the times of a pass. Streamed weights outside of host memory come from disk. With an accelerator, all
        of them and the KV transfers cross the link, and `exchanged` bytes cross it both ways."""
        rates, work = self.rates, self.work
        layers, hits = work.num_layers * self._streamed_share(grid), np.zeros_like(tokens)
        loaded_share, (cpu_share, cpu_cost) = np.ones_like(tokens), self._cpu_share(grid, tokens)
        if work.num_experts:
            at_once, turns = grid.tokens_at_once(tokens)
            hits = turns * work.hits(at_once)  # experts loaded per layer
        if work.is_pageable and self.config.offload.expert_paging is not ExpertPaging.off:
            loaded_share = np.minimum(loaded_share, hits / work.num_experts)
        weights = layers * (work.dense_bytes + loaded_share * work.num_experts * work.expert_bytes)
        disk_share = 1 - self.in_host(grid) / np.maximum(1.0, work.num_layers - grid.resident)
        kv_on_disk = not self.has_device or self.config.kv.tier is KVTier.nvme
        cpu_bytes = cpu_share * work.num_layers * self._streamed_share(grid) * hits * work.expert_bytes
        cpu_expert_seconds = cpu_bytes * cpu_cost / rates.link_in_bytes_per_second
        link_seconds = (weights - cpu_bytes) / rates.weights_in_bytes_per_second
        link_seconds = link_seconds + (kv_in + exchanged) / rates.link_in_bytes_per_second
        busy = {
            Resource.disk: (weights * disk_share + (kv_in + kv_out) * kv_on_disk) / rates.disk_bytes_per_second,
            Resource.host_to_device: self.has_device * link_seconds,
            Resource.device_to_host: self.has_device * (kv_out + exchanged) / rates.link_out_bytes_per_second,
            Resource.compute: compute,
            Resource.cpu_attention: attend,
        }
        host = cpu_bytes / rates.host_memory_bytes_per_second
        for resource, part in rates.host_shares.items():
            host = host + part * busy[resource]
        seconds = np.maximum(self._pass_seconds(grid, busy, cpu_expert_seconds), host)
        busy = {**busy, Resource.cpu_attention: attend + cpu_expert_seconds, Resource.host_memory: host}
        return PassTimes(busy=busy, seconds=seconds)

    def _pass_seconds(self, grid: PolicyGrid, busy: dict[Resource, Floats], cpu_expert_seconds: Floats) -> Floats:
        """Returns the seconds of a pass.

        Experts shared with the CPU are loaded after routing, so their copies do not overlap other work. Otherwise links
        overlap compute and CPU attention. Without an accelerator the CPU is compute. With one, CPU attention overlaps
        compute except for one lane per layer. It overlaps fully if lanes cross layers and there is more than one, and
        not at all if no lane runs ahead.
        """
        compute, attend = busy[Resource.compute], busy[Resource.cpu_attention]
        not_overlapped = np.where(grid.crosses_stages & (grid.lanes > 1), 0.0, attend / grid.lanes)
        not_overlapped = np.where(
            (grid.num_ahead == 0) | (not self.has_device), np.minimum(compute, attend), not_overlapped
        )
        compute_and_attention = np.minimum(np.maximum(compute, attend) + not_overlapped, compute + attend)
        links = np.maximum.reduce([busy[Resource.disk], busy[Resource.host_to_device], busy[Resource.device_to_host]])
        return np.where(
            grid.shares_experts,
            compute_and_attention + np.maximum(links, cpu_expert_seconds),
            np.maximum(links, compute_and_attention),
        )

    def _cpu_share(self, grid: PolicyGrid, tokens: Floats) -> tuple[Floats, Floats]:
        """Returns the CPU's share of the hit experts in streamed layers, and its time per expert relative to a copy
        over the link. Assumes even visits. The share is 0 in prefill passes, which have too many tokens."""
        work, zero = self.work, np.zeros_like(tokens)
        if not grid.shares_experts.any() or not work.num_experts:
            return zero, zero
        at_once, _ = grid.tokens_at_once(tokens)
        cpu = make_cpu_share(work.expert_bytes, work.expert_weights, self.rates, 0)
        cost = cpu.cost(at_once * work.num_experts_per_token / work.hits(at_once))
        decodes = at_once <= np.where(grid.batches_experts, grid.sequences, grid.rows) + 1
        in_host = self.in_host(grid) / np.maximum(1.0, work.num_layers - grid.resident)
        return (grid.shares_experts & decodes) * in_host / (1 + cost), cost
