"""The hierarchical roofline for a grid of policies: the seconds of a pass, and the busy seconds of each resource.

Resources work in parallel, so a pass takes as long as the busiest one: T = max(link, CPU, compute, disk, host memory).
Host memory transfers the bytes of disk, link and CPU together. Work that a compute order does not overlap is added. The
roofline does not model startup, slots and barriers; the simulator does. A lane is a micro-batch of a block.
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

    busy: dict[Resource, Floats]  # busy seconds
    seconds: Floats

    def busy_at(self, index: int) -> dict[Resource, float]:
        """Returns the busy seconds of one policy."""
        return {resource: float(seconds[index]) for resource, seconds in self.busy.items()}


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Computes pass times for the policies of a grid."""

    work: LayerWork
    rates: MachineRates
    workload: Workload
    config: RuntimeConfig
    has_device: bool
    in_host: Callable[[PolicyGrid], Floats]  # number of streamed layers that stay in host memory, for each policy
    item_bytes: int  # element size of the compute dtype
    is_packed: bool = True
    cross_kv_bytes: int = 0  # per encoder position; above 0, prompts are not in the decoder's own KV cache

    def seconds(self, grid: PolicyGrid) -> Floats:
        """Returns the seconds of the whole workload, for each policy."""
        prefill, decode = self.prefill_pass(grid), self.decode_pass(grid)
        num_decodes = max(0, self.workload.max_new_tokens - 1)  # prefill generates the first token
        return grid.num_blocks * (self.prefill_passes(grid) * prefill.seconds + num_decodes * decode.seconds)

    def prefill_passes(self, grid: PolicyGrid) -> Floats:
        """Returns the number of prefill passes of a block."""
        return np.maximum(1.0, grid.rows * self._prompt_tokens(grid) / self._chunk(grid))

    def _prompt_tokens(self, grid: PolicyGrid) -> Floats:
        """Returns the computed tokens per prompt: without shared ones, or with padding."""
        if self.is_packed:
            return self.workload.mean_prompt_tokens - self._spared_tokens(grid)
        return grid.by_lane_size(self.workload.mean_padded_tokens)

    def _spared_tokens(self, grid: PolicyGrid) -> Floats:
        """Returns the tokens per prompt that prefix sharing saves."""
        if not self.is_packed:
            return np.zeros_like(grid.rows)
        return grid.by_sharing_size(self.workload.mean_spared_tokens, self.has_device)

    def _chunk(self, grid: PolicyGrid) -> Floats:
        """Returns the tokens of a lane in one prefill pass.

        They are the configured chunk, but at least one column of a padded lane. Without a configured chunk, a pass has
        whole prompts: larger chunks read the weights less often, and whether they fit is checked later.
        """
        whole, configured = grid.rows * self._prompt_tokens(grid), self.config.policy.prefill_chunk_tokens
        if configured is None:
            return whole
        return np.minimum(np.maximum(configured, 0 if self.is_packed else grid.rows), whole)

    def decode_pass(self, grid: PolicyGrid) -> PassTimes:
        """Returns the times of a decode pass halfway through the outputs."""
        spared, prompts = self._spared_tokens(grid), self._prompt_tokens(grid)
        # Own positions of a sequence. Attention also reads those of shared prefixes (`spared`).
        cached = (0 if self.cross_kv_bytes else prompts) + self.workload.max_new_tokens / 2
        layers, rates, work = self.work.num_layers, self.rates, self.work
        kv_bytes = layers * grid.sequences * (cached + spared) * work.kv_bytes
        compute = self._products(grid, grid.rows, np.ones_like(grid.rows), decodes=True)
        compute = compute + grid.sequences * prompts * self.cross_kv_bytes / rates.attention_bytes_per_second
        cpu, device = grid.cpu_attends, ~grid.cpu_attends  # masks: where attention runs
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
        """Returns the times of an average prefill pass."""
        chunk, work, layers = self._chunk(grid), self.work, self.work.num_layers
        prompts = self._prompt_tokens(grid)
        share = chunk / np.maximum(1e-9, grid.rows * prompts)  # part of the block's prompts that a pass computes
        pairs = prompts**2  # twice the pairs of query and key per prompt
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
        """Returns the compute seconds of a pass with `tokens` per lane, without attention.

        `head_share`: share of these tokens that need logits. `decodes`: device kernels may multiply quantized codes.
        """
        work, rates, lanes = self.work, self.rates, grid.lanes
        at_once, num_runs = grid.tokens_at_once(tokens)
        dense, experts = rates.gemm_seconds(tokens, work.dense_weights), np.zeros_like(tokens)
        visits = at_once * work.num_experts_per_token
        if work.num_experts:
            experts = rates.experts_seconds(work.hits(at_once), visits, work.expert_weights)
        num_times = lanes if self.config.offload.dequantize is Dequantize.product else 1.0
        dequantizing = num_times * rates.dequantize_seconds(work.stored.plus(work.stored_experts), self.item_bytes)
        if decodes and rates.has_code_kernels(self.item_bytes):
            # With few tokens, kernels multiply the codes of quantized weights, and nothing is dequantized.
            is_few = lanes * tokens <= FEW_ROWS
            dequantizing = np.where(is_few, 0.0, dequantizing)
            unquantized = max(0.0, 1 - work.stored.num_elements / max(1.0, work.dense_weights))
            dense = np.where(is_few, unquantized * dense + rates.codes_seconds(work.stored, tokens), dense)
            if work.stored_experts.num_elements:
                hits = work.hits(at_once)
                codes = hits / work.num_experts * rates.codes_seconds(work.stored_experts, visits / hits)
                experts = np.where(is_few, codes, experts)
        experts = num_runs * experts * (1 - self._streamed_share(grid) * self._cpu_share(grid, tokens)[0])
        exchanged = rates.layer_exchange_seconds(tokens * work.hidden_bytes)
        layer = lanes * (dense + rates.turn_seconds + exchanged) + experts + dequantizing
        head = lanes * rates.gemm_seconds(tokens * head_share, work.head_weights)
        return work.num_layers * layer + head + rates.pass_seconds

    def _streamed_share(self, grid: PolicyGrid) -> Floats:
        """Returns the share of layers that are streamed."""
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
        """Returns the times of a pass from the seconds of `compute` and `attend` (CPU attention), and from bytes.

        Streamed weights that do not stay in host memory come from disk. With an accelerator, streamed weights and KV
        transfers cross the link, and `exchanged` bytes cross it in both directions.
        """
        rates, work = self.rates, self.work
        num_streamed, hits = work.num_layers * self._streamed_share(grid), np.zeros_like(tokens)
        loaded_share = np.ones_like(tokens)  # share of a layer's experts that is loaded
        cpu_share, cpu_cost = self._cpu_share(grid, tokens)
        if work.num_experts:
            at_once, num_runs = grid.tokens_at_once(tokens)
            hits = num_runs * work.hits(at_once)  # experts loaded per layer if experts are read one by one
        if work.is_pageable and self.config.offload.expert_paging is not ExpertPaging.off:
            loaded_share = np.minimum(loaded_share, hits / work.num_experts)
        weight_bytes = num_streamed * (work.dense_bytes + loaded_share * work.num_experts * work.expert_bytes)
        disk_share = 1 - self.in_host(grid) / np.maximum(1.0, work.num_layers - grid.resident)
        kv_on_disk = not self.has_device or self.config.kv.tier is KVTier.nvme
        # Experts that the CPU computes do not cross the link.
        cpu_bytes = cpu_share * work.num_layers * self._streamed_share(grid) * hits * work.expert_bytes
        cpu_expert_seconds = cpu_bytes * cpu_cost / rates.link_in_bytes_per_second
        link_seconds = (weight_bytes - cpu_bytes) / rates.weights_in_bytes_per_second
        link_seconds = link_seconds + (kv_in + exchanged) / rates.link_in_bytes_per_second
        busy = {
            Resource.disk: (weight_bytes * disk_share + (kv_in + kv_out) * kv_on_disk) / rates.disk_bytes_per_second,
            Resource.host_to_device: self.has_device * link_seconds,
            Resource.device_to_host: self.has_device * (kv_out + exchanged) / rates.link_out_bytes_per_second,
            Resource.compute: compute,
            Resource.cpu_attention: attend,
        }
        host = cpu_bytes / rates.host_memory_bytes_per_second
        for resource, host_share in rates.host_shares.items():
            host = host + host_share * busy[resource]
        seconds = np.maximum(self._pass_seconds(grid, busy, cpu_expert_seconds), host)
        busy = {**busy, Resource.cpu_attention: attend + cpu_expert_seconds, Resource.host_memory: host}
        return PassTimes(busy=busy, seconds=seconds)

    def _pass_seconds(self, grid: PolicyGrid, busy: dict[Resource, Floats], cpu_expert_seconds: Floats) -> Floats:
        """Returns the seconds of a pass.

        Links overlap compute and CPU attention. Only if the CPU computes some experts, expert copies wait for the
        routing and overlap nothing but these experts.

        Without an accelerator, the CPU computes everything, so attention overlaps nothing. With an accelerator, CPU
        attention overlaps compute except for one lane per layer. If the order lets lanes cross layers and there are
        several lanes, all of it overlaps; if no lane may run ahead, nothing does.
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
        """Returns the share of hit experts in streamed layers that the CPU computes, and its relative time per expert.

        The time is relative to a copy of the expert over the link. Assumes that all hit experts have equally many
        tokens. The share is 0 in prefill passes, which have too many tokens.
        """
        work, zero = self.work, np.zeros_like(tokens)
        if not grid.shares_experts.any() or not work.num_experts:
            return zero, zero
        at_once, _ = grid.tokens_at_once(tokens)
        cpu = make_cpu_share(work.expert_bytes, work.expert_weights, self.rates, 0)
        cost = cpu.cost(at_once * work.num_experts_per_token / work.hits(at_once))
        decodes = at_once <= np.where(grid.batches_experts, grid.sequences, grid.rows) + 1
        in_host = self.in_host(grid) / np.maximum(1.0, work.num_layers - grid.resident)
        return (grid.shares_experts & decodes) * in_host / (1 + cost), cost
