"""Measures the rates of this machine for one run, in about a second: for predictions and `prefetch=cost_aware`.

Uses the probes of `jobs.measure` with the run's own reader, layers, micro-batches, code and pass sizes: anything that
slows the run also slows the measurement. A stage is the weights of one part of the forward pass, here of one layer. If
the experts of a layer are paged, a run reads the layer's dense part and only those experts to which tokens are routed.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from ..checkpoint_source.download import as_config_error
from ..engine.dequantized_weights import dequantize_all, dequantized_bytes
from ..events import Weights
from ..linear.backends import WEIGHTS_PER_THREAD
from ..model.loading import LoadedModel
from ..plan.cost.calibration import TypicalLoad, fit_rates, with_overheads
from ..plan.cost.lane_work import packed_work
from ..plan.cost.rates import UNLIMITED, MachineRates, StoredWork
from ..plan.cost.work import stage_works
from ..plan.placement.experts import pageable_stages
from ..plan.placement.memory import GATED_ROWS, PAGE_TOKENS
from ..plan.shape.extents import device_layout, slot_layout
from ..plan.shape.model import ModelShape
from ..plan.shape.shapes import Stage
from ..store.reader import Reader
from ..stream.device import ComputeDevice
from ..units import MIB
from .attention import AttentionShape, decode_timer, prefill_timer
from .bandwidth import copy_timer, gate_timer, read_timer
from .layers import ExpertSeconds, ProfilingPass, cpu_expert_timer, time_experts
from .linear import matmul_timer
from .timing import Timer

NUM_READS = 3  # layers that are read in sequence to measure the disk
CACHED_BYTES = 1 << 30  # upper bound of a processor's caches
KV_BYTES = 64 * MIB  # most KV that a measurement of decode attention reads
EXPERT_BYTES = 64 * MIB  # most paged experts that are read to be multiplied together, unless one has more


@torch.inference_mode()
def measure_rates(
    loaded: LoadedModel,
    reader: Reader,
    device: ComputeDevice,
    typical_load: TypicalLoad,
    paged_stages: Collection[int] = (),
) -> MachineRates:
    """The rates of this machine for a run. Reads a few layers and computes with them; for `paged_stages` (layers with
    paged experts), with the dense part and a few experts. Allocates memory for two layers and then 64 MiB of KV, freed
    on return. Raises CheckpointError if a read fails."""
    run = RunProbes(
        loaded=loaded, reader=reader, device=device, typical_load=typical_load, paged_stages=frozenset(paged_stages)
    )
    layer = run.load_layer(run.typical_layer)
    gemm, experts = run.matmul_rates(layer.weights), layer.time_experts()
    disk = run.disk_timer(layer.host).rate_once()
    link_in, link_out = run.link_rates(layer.host)
    cpu_attention = run.decode_attention_timer(ComputeDevice("cpu")).rate()
    attention = run.decode_attention_timer(device).rate() if device.is_accelerator else cpu_attention
    rates = MachineRates(
        disk_bytes_per_second=disk,
        link_in_bytes_per_second=link_in,
        link_out_bytes_per_second=link_out,
        gemm_flops_per_second=gemm,
        expert_flops_per_second=experts.rates,
        memory_bytes_per_second=run.memory_timer().rate(),
        attention_bytes_per_second=attention,
        cpu_attention_bytes_per_second=cpu_attention,
        cpu_flops_per_second=run.cpu_expert_rate(),
        prefill_attention_flops_per_second=run.prefill_attention_timer().rate(),
        dequantize_bytes_per_second=layer.dequantize_rate(),
        hit_seconds=experts.hit_seconds,
    )
    return run.with_profile(rates)


@dataclass(frozen=True, kw_only=True)
class LoadedLayer:
    """A layer in memory. `host`: its bytes as read, in host memory. `stored`: its weights in compute memory (an
    accelerator's, or the host's), as stored. `weights`: the same, dequantized if compute memory is an accelerator's."""

    run: "RunProbes"
    stage: Stage
    host: torch.Tensor
    weights: Weights
    stored: Weights

    def dequantize_rate(self) -> float:
        """Bytes read plus written per second while the layer's weights are dequantized. UNLIMITED if they are not."""
        run, device, shape = self.run, self.run.device, self.run.shape
        size, part = run.dequantized_size(self.stored), run.streamed_part(self.stage)
        if not size:
            return UNLIMITED
        buffer, work = device.compute_buffer(size), StoredWork.from_parameters(part.parameters, shape.compute_dtype)
        moved = work.num_bytes + work.num_elements * shape.compute_dtype_bytes
        return Timer(moved, lambda: dequantize_all(self.stored, buffer), device.wait_for_compute).rate()

    def time_experts(self) -> ExpertSeconds:
        """See `layers.time_experts`. Reads the first experts if they are paged, and frees them on return."""
        run, load = self.run, self.run.typical_load
        paged = run.read_experts(self.stage) if self.stage.index in run.paged_stages else []
        return time_experts(
            run.loaded, run.device, self.stage, self.weights, paged, load.product_rows, decode_tokens=load.num_rows
        )


@dataclass(frozen=True, kw_only=True)
class RunProbes:
    """Probes with the sizes of one run. Timers and rates have the units of their `MachineRates` field."""

    loaded: LoadedModel
    reader: Reader
    device: ComputeDevice
    typical_load: TypicalLoad
    paged_stages: frozenset[int]

    @property
    def shape(self) -> ModelShape:
        return self.loaded.shape

    @property
    def typical_layer(self) -> Stage:
        """The middle layer, as the first layers of a mixture of experts may be dense."""
        layers = self.shape.layers
        return layers[len(layers) // 2]

    def load_layer(self, stage: Stage) -> LoadedLayer:
        """Reads a layer, and dequantizes it as the run would do."""
        host, stored = self._read(self.streamed_part(stage))
        size = self.dequantized_size(stored)
        weights = {**stored, **dequantize_all(stored, self.device.compute_buffer(size))} if size else stored
        for table in stage.tables:  # zeros that take no memory: the time to read rows is no part of a rate
            zero = torch.zeros(1, dtype=self.loaded.dtypes[table.name], device=self.device.torch_device)
            weights = {**weights, table.name: zero.expand(table.shape)}
        return LoadedLayer(run=self, stage=stage, host=host, weights=weights, stored=stored)

    def dequantized_size(self, stored: Weights) -> int:
        """Bytes of a layer's dequantized weights; 0 if they are used as stored: on a CPU, or for lack of memory."""
        if not self.device.is_accelerator:
            return 0
        size = dequantized_bytes(stored)
        return size if size <= self.device.free_bytes() // 2 else 0

    def streamed_part(self, stage: Stage) -> Stage:
        """The part of a stage that is read at once: all of it, or the dense part if experts are paged."""
        return stage.dense if stage.index in self.paged_stages else stage

    def read_experts(self, stage: Stage) -> list[Weights]:
        """The weights of the first experts of a layer: as many as a CPU multiplies in a group, if they fit
        `EXPERT_BYTES`, but at least one; one for an accelerator, where paged experts run one by one."""
        num_experts = 1
        if not self.device.is_accelerator:
            num_fitting = max(1, EXPERT_BYTES // slot_layout(stage.expert(0)).num_bytes)
            num_experts = min(stage.num_experts, num_fitting, WEIGHTS_PER_THREAD * torch.get_num_threads())
        return [self._read(stage.expert(number))[1] for number in range(num_experts)]

    def _read(self, stage: Stage) -> tuple[torch.Tensor, Weights]:
        """Reads a stage. Returns its bytes in host memory, and its weights in compute memory."""
        layout = slot_layout(stage)
        host = self.device.host_buffer(layout.num_bytes)
        self.reader.submit(layout.extents, host.numpy().data).wait()
        if not self.device.is_accelerator:
            return host, self.loaded.weights_of(stage, host, layout.tensor_offsets)
        placed, buffer = device_layout([stage], layout), self.device.compute_buffer(layout.num_bytes)
        for move in placed.moves:
            buffer[move.target : move.target + move.num_bytes].copy_(host[move.begin : move.end])
        return host, self.loaded.weights_of(stage, buffer, placed.tensor_offsets, on_device=True)

    def disk_timer(self, buffer: torch.Tensor) -> Timer:
        """Times reading a few layers in sequence; each overwrites `buffer`."""
        # Skips layers that do not fit the buffer: equal layers may differ by a disk block, as their alignment differs.
        layouts = [slot_layout(self.streamed_part(stage)) for stage in self.shape.layers]
        fitting = [layout for layout in layouts if layout.num_bytes <= buffer.numel()]
        layouts = fitting[:: max(1, len(fitting) // NUM_READS)]
        return read_timer(self.reader, [layout.extents for layout in layouts], buffer)

    def link_rates(self, host: torch.Tensor) -> tuple[float, float]:
        """Bytes per second to the device, and from the device."""
        if not self.device.is_accelerator:
            return UNLIMITED, UNLIMITED
        on_device = self.device.compute_buffer(host.numel())
        size = min(host.numel(), on_device.numel())
        host, on_device = host[:size], on_device[:size]
        return copy_timer(self.device, host, on_device).rate(), copy_timer(self.device, on_device, host).rate()

    def matmul_rates(self, weights: Weights) -> dict[int, float]:
        """FLOPs per second by number of rows (tokens), over all matrices of a layer in sequence as in a run."""
        matrices = [weight for weight in weights.values() if weight.dim() == 2 and min(weight.shape) > 1]
        device = self.device.torch_device

        def make_timer(num_rows: int) -> Timer:
            inputs = [torch.ones(num_rows, w.shape[1], dtype=w.dtype, device=device) for w in matrices]
            return matmul_timer(inputs, [matrices], self.device)

        return {num_rows: make_timer(num_rows).rate() for num_rows in self.typical_load.product_rows}

    def cpu_expert_rate(self) -> float | None:
        """FLOPs per second of an expert on the CPU of a machine with an accelerator. None without an accelerator, or if
        the model's experts cannot run on the CPU alone."""
        stage = self.typical_layer
        if not self.device.is_accelerator or not self.shape.has_bare_experts:
            return None
        if self.shape.has_encoder or stage.index not in pageable_stages(self.shape):
            return None
        return cpu_expert_timer(self.loaded, stage, self._read(stage.expert(0))[0]).rate()

    def memory_timer(self) -> Timer:
        """Times the gated activation between two products of an MLP, which is limited by memory bandwidth."""
        max_rows = GATED_ROWS if self.shape.has_fused_gates else self.typical_load.chunk_tokens
        num_rows = min(max_rows, self.typical_load.chunk_tokens)
        return gate_timer(num_rows, self.shape.intermediate_size, self.loaded.compute_dtype, self.device)

    @property
    def _attention(self) -> AttentionShape:
        shape = self.shape
        return AttentionShape(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=self.loaded.compute_dtype,
            kv_dtype=shape.kv_dtype,
        )

    def decode_attention_timer(self, device: ComputeDevice) -> Timer:
        """Times decode attention over at most `KV_BYTES`, in several layers in sequence if they fit."""
        position_bytes = self._attention.position_bytes
        num_positions = min(self.typical_load.num_positions, max(PAGE_TOKENS, KV_BYTES // position_bytes))
        row_bytes = -(-num_positions // PAGE_TOKENS) * PAGE_TOKENS * position_bytes
        max_rows = max(1, KV_BYTES // row_bytes)  # of all layers together
        num_rows = min(self.typical_load.num_rows, max_rows)
        num_layers = max(1, min(max_rows // num_rows, len(self.shape.layers)))
        return decode_timer(self._attention, device, num_rows, num_positions, num_layers=num_layers)

    def prefill_attention_timer(self) -> Timer:
        """Times attention of one prompt."""
        num_tokens = min(self.typical_load.num_prompt_tokens, self.typical_load.chunk_tokens)
        return prefill_timer(self._attention, self.device, num_tokens)

    def with_profile(self, rates: MachineRates) -> MachineRates:
        """`rates` adjusted to the times of profiling passes through the model's first layer. The layer's weights are
        evicted from the CPU caches before each pass, as in a run with many layers."""
        stage = next(stage for stage in self.shape.stages if stage.kind.is_layer)
        work, layer = stage_works(self.shape, self.paged_stages)[stage.index], self.load_layer(stage)
        fits_caches = layer.host.nbytes <= CACHED_BYTES and not self.device.is_accelerator
        memory = torch.ones_like(layer.host[: layer.host.numel() // 8 * 8]).view(torch.int64) if fits_caches else None

        def evict_caches() -> None:
            # Reads other memory. Not a file: processor cores that waited for a disk are slow at first.
            if memory is not None:
                memory.sum()

        profiling = ProfilingPass(
            loaded=self.loaded, device=self.device, stage=stage.index, weights=layer.weights, evict_caches=evict_caches
        )
        with as_config_error(type(self.loaded.staged.model).__name__):
            single = profiling.time_single_token()
        rates = with_overheads(rates, work, single)
        if not self.shape.is_packed or len(self.shape.layers) == 1:  # the last layer skips tokens
            return rates
        passes = self.typical_load.profile_passes(max(1, work.kv_bytes), KV_BYTES)
        return fit_rates(
            rates, self.shape, work, [(packed_work(pieces), profiling.time_packed(pieces)) for pieces in passes]
        )
