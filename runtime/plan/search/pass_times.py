"""The hierarchical roofline over a whole grid of policies: seconds that each resource works in a pass, and the pass.

What works side by side takes as long as the slowest: T = max(link, CPU, compute, disk, host memory), where host memory
has the bytes of disk, link and CPU together. What an order leaves without overlap is added. A schedule's start, its
slots and its barriers are the simulator's business.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...config.settings import Dequantize, ExpertPaging, KVTier, RuntimeConfig
from ...resources import Resource
from ..cost.rates import MachineRates
from ..cost.work import LayerWork, share_of
from ..placement.memory import FEW_ROWS
from .grid import Floats, PolicyGrid
from .workload import Workload


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of one pass, for each policy of a grid."""

    busy: dict[Resource, Floats]
    seconds: Floats


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What a grid's times follow from. `in_host`: of the layers that do not stay, how many are never read."""

    work: LayerWork
    rates: MachineRates
    workload: Workload
    config: RuntimeConfig
    has_device: bool
    in_host: Callable[[PolicyGrid], Floats]
    item_bytes: int
    is_packed: bool = True
    cross_kv_bytes: int = 0  # of one prompt token that an encoder made; the decoder then keeps its answer's alone

    def seconds(self, grid: PolicyGrid) -> Floats:
        """The seconds of the whole workload, by blocks alike."""
        prefill, decode = self.prefill_pass(grid), self.decode_pass(grid)
        per_block = self.prefill_passes(grid) * prefill.seconds + self.decode_passes * decode.seconds
        return grid.num_blocks * per_block

    @property
    def decode_passes(self) -> int:
        """The first new token comes out of the prefill."""
        return max(0, self.workload.max_new_tokens - 1)

    def prefill_passes(self, grid: PolicyGrid) -> Floats:
        return np.maximum(1.0, grid.rows * self._prompt_tokens(grid) / self._chunk(grid))

    def _prompt_tokens(self, grid: PolicyGrid) -> Floats:
        """Computed of each prompt."""
        if self.is_packed:
            return self.workload.mean_prompt_tokens - self._spared_tokens(grid)
        return grid.by_lane_size(self.workload.mean_padded_tokens)

    def _spared_tokens(self, grid: PolicyGrid) -> Floats:
        """The tokens of each prompt that others compute and hold."""
        return self._shared(grid, self.workload.mean_spared_tokens) if self.is_packed else np.zeros_like(grid.rows)

    def _shared(self, grid: PolicyGrid, number_of: Callable[[int], float]) -> Floats:
        return grid.by_sharing_size(number_of, self.has_device)

    def _chunk(self, grid: PolicyGrid) -> Floats:
        """Tokens of a lane in one prefill pass; a padded one takes a column at least. Where nobody says how many, all:
        larger chunks bring fewer bytes, and what they take of memory is for plans to tell."""
        whole, asked = grid.rows * self._prompt_tokens(grid), self.config.policy.prefill_chunk_tokens
        return whole if asked is None else np.minimum(np.maximum(asked, 0 if self.is_packed else grid.rows), whole)

    def decode_pass(self, grid: PolicyGrid) -> PassTimes:
        """The times of a decode pass at half of the answers' length."""
        spared, prompts = self._spared_tokens(grid), self._prompt_tokens(grid)
        held = (0 if self.cross_kv_bytes else prompts) + self.workload.max_new_tokens / 2
        layers, rates, work = self.work.num_layers, self.rates, self.work
        kv_bytes = layers * grid.sequences * (held + spared) * work.kv_bytes
        compute = self._products(grid, grid.rows, np.ones_like(grid.rows), decodes=True)
        compute = compute + grid.sequences * prompts * self.cross_kv_bytes / rates.attention_bytes_per_second
        cpu, device = grid.cpu_attends, ~grid.cpu_attends
        compute = compute + device * kv_bytes / rates.attention_bytes_per_second
        attend = cpu * kv_bytes / rates.cpu_attention_bytes_per_second
        travels = device * (1 - grid.kv_fraction) * layers * grid.sequences * held * work.kv_bytes
        exchanged = cpu * layers * grid.sequences if self.has_device else np.zeros_like(grid.sequences)
        new_kv = layers * grid.sequences * work.kv_bytes * np.where(cpu, float(self.has_device), 1 - grid.kv_fraction)
        return self._times(
            grid,
            tokens=grid.rows,
            compute=compute,
            attend=attend,
            kv_in=travels,
            kv_out=new_kv,
            link_in=exchanged * work.query_bytes,
            link_out=exchanged * work.query_bytes,
        )

    def prefill_pass(self, grid: PolicyGrid) -> PassTimes:
        chunk, work, layers = self._chunk(grid), self.work, self.work.num_layers
        prompts = self._prompt_tokens(grid)
        share = chunk / np.maximum(1e-9, grid.rows * prompts)  # of the block's prompts, in this pass
        pairs = prompts**2
        if self.is_packed:
            pairs = self.workload.mean_squared_tokens - self._shared(grid, self.workload.mean_spared_squares)
        attention = layers * grid.sequences * share * pairs / 2 * work.pair_flops
        compute = self._products(grid, chunk, max(1, self.workload.num_scored) / np.maximum(1.0, prompts))
        kv_bytes = layers * grid.lanes * chunk * work.kv_bytes * (1 - grid.kv_fraction)
        zero = np.zeros_like(chunk)
        return self._times(
            grid,
            tokens=chunk,
            compute=compute + attention / self.rates.prefill_attention_flops_per_second,
            attend=zero,
            kv_in=zero,
            kv_out=kv_bytes,
            link_in=zero,
            link_out=zero,
        )

    def _products(self, grid: PolicyGrid, tokens: Floats, head_share: Floats, *, decodes: bool = False) -> Floats:
        """Compute's seconds in the products of a pass in which each lane has so many `tokens`; logits are made of
        `head_share` of them."""
        work, rates, lanes = self.work, self.rates, grid.lanes
        at_once = np.where(grid.batches_experts, lanes * tokens, tokens)
        turns = np.where(grid.batches_experts, 1.0, lanes)
        dense, experts = rates.gemm_seconds(tokens, work.dense_weights), self._expert_seconds(at_once)
        times = lanes if self.config.offload.dequantize is Dequantize.product else 1.0
        dequantizing = times * rates.dequantize_seconds(work.stored.plus(work.stored_experts), self.item_bytes)
        if decodes and rates.multiplies_codes(self.item_bytes):
            is_few = tokens <= FEW_ROWS
            dequantizing = np.where(is_few, 0.0, dequantizing)
            plain = max(0.0, 1 - work.stored.num_numbers / max(1.0, work.dense_weights))
            dense = np.where(is_few, plain * dense + rates.codes_seconds(work.stored, tokens), dense)
            if work.stored_experts.num_numbers:
                hits = work.hits(at_once)
                each = at_once * work.num_experts_per_token / hits  # rows of an expert that is hit
                codes = hits / work.num_experts * rates.codes_seconds(work.stored_experts, each)
                experts = np.where(is_few, codes, experts)
        experts = turns * experts * (1 - self._streamed(grid) * self._cpu_share(grid, tokens))
        exchanged = rates.exchanged_seconds(tokens * work.hidden_bytes)
        layer = lanes * (dense + rates.turn_seconds + exchanged) + experts + dequantizing
        head = lanes * rates.gemm_seconds(tokens * head_share, work.head_weights)
        return work.num_layers * layer + head + rates.pass_seconds

    def _expert_seconds(self, tokens: Floats) -> Floats:
        """Each expert that is hit multiplies its share of the tokens."""
        if not self.work.num_experts:
            return np.zeros_like(tokens)
        visits = tokens * self.work.num_experts_per_token
        return self.rates.experts_seconds(self.work.hits(tokens), visits, self.work.expert_weights)

    def _streamed(self, grid: PolicyGrid) -> Floats:
        return 1 - grid.resident / max(1, self.work.num_layers)

    def weight_bytes(self, grid: PolicyGrid, tokens: Floats) -> Floats:
        """That come in during a pass; of experts read one by one those that are hit, once for each lane that asks."""
        work = self.work
        share = np.ones_like(tokens)
        if work.is_pageable and self.config.offload.expert_paging is not ExpertPaging.off:
            is_batched = grid.batches_experts
            at_once = np.where(is_batched, grid.lanes * tokens, tokens)
            asked = np.where(is_batched, 1.0, grid.lanes) * work.hits(at_once) / work.num_experts
            share = np.minimum(share, asked)
        layer = work.dense_bytes + share * work.num_experts * work.expert_bytes
        return work.num_layers * self._streamed(grid) * layer

    def _times(
        self,
        grid: PolicyGrid,
        *,
        tokens: Floats,
        compute: Floats,
        attend: Floats,
        kv_in: Floats,
        kv_out: Floats,
        link_in: Floats,
        link_out: Floats,
    ) -> PassTimes:
        """Bytes go over the links that exist: weights that no memory holds come from the disk, everything goes over the
        link in front of an accelerator, keys and values from and to their tier."""
        rates, weights = self.rates, self.weight_bytes(grid, tokens)
        layers = self.work.num_layers - grid.resident
        reads = 1 - self.in_host(grid) / np.maximum(1.0, layers)
        kv_on_disk = not self.has_device or self.config.kv.tier is KVTier.nvme
        disk = (weights * reads + (kv_in + kv_out) * kv_on_disk) / rates.disk_bytes_per_second
        on_cpu, cpu_seconds = self._experts_on_cpu(grid, tokens)
        weights = weights - on_cpu
        brought = weights / rates.weights_in_bytes_per_second + (kv_in + link_in) / rates.link_in_bytes_per_second
        came = brought if self.has_device else 0 * weights
        left = (kv_out + link_out) / rates.link_out_bytes_per_second if self.has_device else 0 * weights
        busy = {
            Resource.disk: disk,
            Resource.host_to_device: came,
            Resource.device_to_host: left,
            Resource.compute: compute,
            Resource.cpu_attention: attend,
        }
        host = self._host_seconds(busy, on_cpu)
        seconds = np.maximum(self._together(grid, busy, cpu_seconds), host)
        busy = {**busy, Resource.cpu_attention: attend + cpu_seconds, Resource.host_memory: host}
        return PassTimes(busy=busy, seconds=seconds)

    def _host_seconds(self, busy: dict[Resource, Floats], num_expert_bytes: Floats) -> Floats:
        """The seconds in which host memory hands on all that goes through it: what the disk and the link move, keys and
        values that the CPU looks at, and experts that it multiplies."""
        rates, found = self.rates, num_expert_bytes / self.rates.host_memory_bytes_per_second
        for resource, share in rates.host_shares.items():
            found = found + share * busy[resource]
        return found

    def _together(self, grid: PolicyGrid, busy: dict[Resource, Floats], beside: Floats) -> Floats:
        """The seconds of a pass, in which the CPU multiplies experts for `beside`: shared ones come when their layer's
        tokens are routed, so all else is behind by then. Elsewhere links work beside compute and the CPU's attention,
        which take what they take together. Without an accelerator the CPU is compute. With
        one, attention on the CPU is behind compute's back but for one lane in each layer; for none where a lane may go
        on to the next layer, and there is another lane; or for all where none is ahead."""
        compute, attend = busy[Resource.compute], busy[Resource.cpu_attention]
        alone = np.where(grid.crosses_stages & (grid.lanes > 1), 0.0, attend / grid.lanes)
        alone = np.where((grid.num_ahead == 0) | (not self.has_device), np.minimum(compute, attend), alone)
        together = np.minimum(np.maximum(compute, attend) + alone, compute + attend)
        links = np.maximum.reduce([busy[Resource.disk], busy[Resource.host_to_device], busy[Resource.device_to_host]])
        return np.where(grid.shares, together + np.maximum(links, beside), np.maximum(links, together))

    def _cpu_share(self, grid: PolicyGrid, tokens: Floats) -> Floats:
        """The CPU's share of the experts that are hit in layers that do not stay, each of about as many visits: as many
        as it multiplies while the link brings the others. Prompts have too many tokens."""
        work = self.work
        if not grid.shares.any() or not work.num_experts:
            return np.zeros_like(tokens)
        at_once = np.where(grid.batches_experts, grid.lanes * tokens, tokens)
        cost = self._cpu_cost(at_once * work.num_experts_per_token / work.hits(at_once))
        decodes = at_once <= np.where(grid.batches_experts, grid.sequences, grid.rows) + 1
        in_host = self.in_host(grid) / np.maximum(1.0, work.num_layers - grid.resident)
        return (grid.shares & decodes) * in_host / (1 + cost)

    def _cpu_cost(self, visits: Floats) -> Floats:
        """How long the CPU takes at an expert of so many visits, where the link takes 1."""
        work = self.work
        share = share_of(work.expert_bytes, work.expert_weights, self.rates, 0)
        return np.maximum(share.reading, visits * share.multiplying)

    def _experts_on_cpu(self, grid: PolicyGrid, tokens: Floats) -> tuple[Floats, Floats]:
        """The bytes of experts that the CPU multiplies in a pass, and for how long it does."""
        work, share = self.work, self._cpu_share(grid, tokens)
        if not share.any():
            return share, share
        at_once = np.where(grid.batches_experts, grid.lanes * tokens, tokens)
        hits = np.where(grid.batches_experts, 1.0, grid.lanes) * work.hits(at_once)
        num_bytes = share * work.num_layers * self._streamed(grid) * hits * work.expert_bytes
        cost = self._cpu_cost(at_once * work.num_experts_per_token / work.hits(at_once))
        return num_bytes, num_bytes * cost / self.rates.link_in_bytes_per_second
