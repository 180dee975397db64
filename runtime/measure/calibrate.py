"""Measures, in about a second, what predictions and `prefetch=cost_aware` need of this machine for this run.

With the run's own reader, on layers that the run streams, with the model's own matrices, lanes and code, at the sizes
that its passes have: whatever slows the run slows the measurement.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..attention.even_rows import EvenRows, attend_prompt
from ..cache.pages import KVPages
from ..engine.experts import BatchedExperts
from ..events import NeedExperts, Weights
from ..model.experts import Visits, bound_matrices, is_experts, mixed
from ..model.loading import LoadedModel
from ..model.stages import StreamedModule
from ..origin.net import class_refused
from ..plan.cost.calibration import anchored, with_overheads
from ..plan.cost.lane_work import packed_work
from ..plan.cost.rates import UNLIMITED, MachineRates
from ..plan.cost.stage_work import INNER_TRIPS, stage_works
from ..plan.cost.typical_load import Usual
from ..plan.placement.memory import GATED_ROWS, PAGE_TOKENS
from ..plan.shape.extents import device_layout, slot_layout
from ..plan.shape.model import ModelShape
from ..plan.shape.shapes import Stage
from ..store.reader import Reader
from ..stream.device import ComputeDevice
from ..units import MIB
from ..weights.stage_weights import stage_weights
from .rehearsal import Rehearsal

NUM_READS = 3  # layers, one behind the other
NUM_REPEATS = 5
CACHED_BYTES = 1 << 30  # that a processor may hold in its caches
LONG_SECONDS = 0.1  # what takes so long is done once: it is its own average
KV_BYTES = 64 * MIB  # that decode attention goes over in turns, or the run's own if it has less


@torch.inference_mode()
def measure_rates(
    loaded: LoadedModel, reader: Reader, device: ComputeDevice, usual: Usual, paged: Collection[int] = ()
) -> MachineRates:
    """Reads a few layers, of those that are `paged` an expert beside the dense part, and computes with them.

    Allocates what two slots take, at another time 64 MiB of keys and values, all freed on return. Raises
    CheckpointError where a read fails.
    """
    bench = _Bench(loaded=loaded, reader=reader, device=device, usual=usual, paged=frozenset(paged))
    found = bench.layer()
    gemm, experts = bench.products(found.weights), bench.experts(found)
    disk, links = bench.disk(found.host), bench.links(found.host)
    beside = bench.decode_attention(ComputeDevice("cpu"))
    rates = MachineRates(
        disk_bytes_per_second=disk,
        link_in_bytes_per_second=links[0],
        link_out_bytes_per_second=links[1],
        gemm_flops_per_second=gemm,
        expert_flops_per_second=experts,
        memory_bytes_per_second=bench.memory(),
        attention_bytes_per_second=bench.decode_attention(device) if device.is_accelerator else beside,
        cpu_attention_bytes_per_second=beside,
        prefill_attention_flops_per_second=bench.prompt_attention(),
    )
    return bench.rehearsed(rates)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """`host` holds the bytes as read; `weights` are in compute memory."""

    stage: Stage
    host: torch.Tensor
    weights: Weights
    expert: Weights  # of expert 0, where experts are paged


@dataclass(frozen=True, kw_only=True)
class _Bench:
    loaded: LoadedModel
    reader: Reader
    device: ComputeDevice
    usual: Usual
    paged: frozenset[int]

    @property
    def shape(self) -> ModelShape:
        return self.loaded.shape

    def _typical(self) -> Stage:
        """In the middle: the first layers of a mixture may have no experts."""
        layers = self.shape.layers
        return layers[len(layers) // 2]

    def _whole(self, stage: Stage) -> Stage:
        """What is read of it at once."""
        return stage.dense if stage.index in self.paged else stage

    def layer(self, stage: Stage | None = None) -> _Layer:
        """The typical one."""
        stage = stage or self._typical()
        host, weights = self._read(self._whole(stage))
        expert = self._read(stage.expert(0))[1] if stage.index in self.paged else {}
        return _Layer(stage=stage, host=host, weights=weights, expert=expert)

    def _read(self, stage: Stage) -> tuple[torch.Tensor, Weights]:
        layout = slot_layout(stage)
        host = self.device.host_buffer(layout.num_bytes)
        self.reader.submit(layout.extents, host.numpy().data).wait()
        if not self.device.is_accelerator:
            return host, stage_weights(stage, host, layout.tensor_offsets, self.loaded.dtypes)
        placed, buffer = device_layout([stage], layout), self.device.compute_buffer(layout.num_bytes)
        for move in placed.moves:
            buffer[move.target : move.target + move.num_bytes].copy_(host[move.begin : move.end])
        return host, stage_weights(stage, buffer, placed.tensor_offsets, self.loaded.dtypes)

    def disk(self, buffer: torch.Tensor) -> float:
        """Bytes per second of layers one behind the other, as in a run; all into `buffer`, as nobody looks at them.
        Those that do not fit are left out: layers of one size lie differently to the disk's blocks, so that some take a
        block more than the one that `buffer` was made for."""
        layouts = [slot_layout(self._whole(stage)) for stage in self.shape.layers]
        fitting = [layout for layout in layouts if layout.num_bytes <= buffer.numel()]
        layouts = fitting[:: max(1, len(fitting) // NUM_READS)]
        target = buffer.numpy().data
        begin = time.perf_counter()
        for pending in [self.reader.submit(layout.extents, target) for layout in layouts]:
            pending.wait()
        return sum(layout.num_bytes for layout in layouts) / (time.perf_counter() - begin)

    def links(self, host: torch.Tensor) -> tuple[float, float]:
        if not self.device.is_accelerator:
            return UNLIMITED, UNLIMITED
        there = self.device.compute_buffer(host.numel())
        size = min(host.numel(), there.numel())
        come = self._seconds(lambda: there[:size].copy_(host[:size]))
        leave = self._seconds(lambda: host[:size].copy_(there[:size]))
        return size / come, size / leave

    def products(self, weights: Weights) -> dict[int, float]:
        """By rows; of the matrices of a layer, one after the other as in a run."""
        matrices = [weight for weight in weights.values() if weight.dim() == 2 and min(weight.shape) > 1]
        size = sum(weight.numel() for weight in matrices)
        return {rows: 2.0 * rows * size / self._product_seconds(matrices, rows) for rows in self.usual.product_rows}

    def _product_seconds(self, matrices: Sequence[torch.Tensor], num_rows: int) -> float:
        widths = {weight.shape[1]: weight.dtype for weight in matrices}
        place = self.device.torch_device
        inputs = {width: torch.ones(num_rows, width, dtype=dtype, device=place) for width, dtype in widths.items()}

        def sweep() -> None:
            for weight in matrices:
                F.linear(inputs[weight.shape[1]], weight)

        return self._seconds(sweep)

    def experts(self, layer: _Layer) -> dict[int, float]:
        """By rows of one expert, through the function that runs them; empty where the layer's code runs its own."""
        streamed = self._streamed(layer.stage)
        module = next((m for m in streamed.inner.modules() if is_experts(m)), None)
        if module is None:
            return {}
        prefix = next(f"{streamed.name}.{path}." for path, m in streamed.inner.named_modules() if m is module)
        paged = {name.removeprefix(prefix): weight[0] for name, weight in layer.expert.items()}
        work = stage_works(self.shape, frozenset())[layer.stage.index]
        bound = {name.removeprefix(f"{streamed.name}."): weight for name, weight in layer.weights.items()}
        found: dict[int, float] = {}
        with streamed.binding.bound(bound):
            for num_tokens in self.usual.product_rows:
                rows = max(1, round(num_tokens * work.num_experts_per_token / work.hits(num_tokens)))
                if paged:
                    num_visits, seconds = rows, self._expert_seconds(module, paged, rows)
                else:
                    num_visits = num_tokens * work.num_experts_per_token
                    seconds = self._routed_seconds(module, layer, num_tokens)
                found[rows] = 2.0 * num_visits * work.expert_weights / seconds
        return found

    def _routed_seconds(self, module: torch.nn.Module, layer: _Layer, num_tokens: int) -> float:
        """Of tokens that choose among all experts of the layer at random, and so unevenly."""
        stage, place = layer.stage, self.device.torch_device
        order = torch.rand(num_tokens, stage.num_experts, generator=torch.Generator().manual_seed(num_tokens))
        weights_TK, experts_TK = order.topk(stage.num_experts_per_token)
        hidden_TD = torch.ones(num_tokens, self.shape.hidden_size, dtype=self.loaded.compute_dtype, device=place)
        event = NeedExperts(module, hidden_TD, experts_TK.to(place), weights_TK.to(hidden_TD))
        batched = BatchedExperts(self.loaded, frozenset(), None, is_together=self.device.is_accelerator)
        return self._seconds(lambda: batched.run(stage.index, [event]))

    def _expert_seconds(self, module: torch.nn.Module, paged: Weights, num_rows: int) -> float:
        """Of expert 0, which all tokens visit."""
        place = self.device.torch_device
        hidden_TD = torch.ones(num_rows, self.shape.hidden_size, dtype=self.loaded.compute_dtype, device=place)
        visits = Visits(
            tokens_V=torch.arange(num_rows, device=place),
            experts_V=torch.zeros(num_rows, dtype=torch.int64, device=place),
            weights_V=torch.ones(num_rows, dtype=hidden_TD.dtype, device=place),
            ends=[num_rows],
        )
        return self._seconds(lambda: mixed(module, hidden_TD, visits, [(0, bound_matrices(module, 0, paged))]))

    def _streamed(self, stage: Stage) -> StreamedModule:
        return next(module for module in self.loaded.staged.modules if module.stage == stage.index)

    def memory(self) -> float:
        """As the activation between two products streams through it."""
        most = GATED_ROWS if self.shape.has_joined_gates else self.usual.chunk_tokens
        shape = (min(most, self.usual.chunk_tokens), self.shape.intermediate_size)
        gate, up = torch.ones(2, *shape, dtype=self.loaded.compute_dtype, device=self.device.torch_device)
        seconds = self._seconds(lambda: F.silu(gate) * up)
        return INNER_TRIPS * gate.nbytes / seconds

    def decode_attention(self, device: ComputeDevice) -> float:
        """Bytes of keys and values per second: rows of a lane over pages of their own, layer after layer."""
        shape, place = self.shape, device.torch_device
        position_bytes = 2 * shape.num_kv_heads * shape.head_dim * self.loaded.compute_dtype.itemsize
        num_positions = min(self.usual.num_positions, max(PAGE_TOKENS, KV_BYTES // position_bytes))
        num_row_pages = -(-num_positions // PAGE_TOKENS)
        most_rows = max(1, KV_BYTES // (num_row_pages * PAGE_TOKENS * position_bytes))
        num_rows = min(self.usual.num_rows, most_rows)
        num_pages = num_rows * num_row_pages
        pages = KVPages(num_pages, device)
        token = torch.ones(1, shape.num_kv_heads, 1, shape.head_dim, dtype=self.loaded.compute_dtype)
        num_layers = max(1, min(most_rows // num_rows, len(shape.layers)))
        layers = [pages.layer(index, token, token) for index in range(num_layers)]
        for part in (part for layer in layers for part in layer):
            part.fill_(0.5)
        q_BHD = torch.ones(num_rows, shape.num_heads, shape.head_dim, dtype=token.dtype, device=place)
        tables = [range(begin, begin + num_row_pages) for begin in range(0, num_pages, num_row_pages)]
        rows = EvenRows(tables, num_positions, device)

        def sweep() -> None:
            for k_NPHD, v_NPHD in layers:
                rows.attend(q_BHD, k_NPHD, v_NPHD)

        num_bytes = len(layers) * num_rows * num_positions * position_bytes
        return num_bytes / self._seconds(sweep)

    def prompt_attention(self) -> float:
        """FLOPs per second of the pairs that see each other, of a prompt by itself."""
        shape, num_tokens = self.shape, min(self.usual.num_prompt_tokens, self.usual.chunk_tokens)
        q, k, v = (
            torch.ones(
                1, heads, num_tokens, shape.head_dim,
                dtype=self.loaded.compute_dtype, device=self.device.torch_device,
            )
            for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        )  # fmt: skip
        seconds = self._seconds(lambda: attend_prompt(q, k, v, self.device))
        return 2.0 * shape.num_heads * shape.head_dim * num_tokens * (num_tokens + 1) / seconds

    def rehearsed(self, rates: MachineRates) -> MachineRates:
        """With what passing the first layer shows. Each time its weights are pushed out of the processor's caches,
        where they would be faster than any model's: by others that are read from memory, since cores that have waited
        for a disk are slow at first."""
        stage = next(stage for stage in self.shape.stages if stage.kind.is_layer)
        work, layer = stage_works(self.shape, self.paged)[stage.index], self.layer(stage)
        fits_caches = layer.host.nbytes <= CACHED_BYTES and not self.device.is_accelerator
        others = torch.ones_like(layer.host[: layer.host.numel() // 8 * 8]).view(torch.int64) if fits_caches else None

        def forget() -> None:
            if others is not None:
                others.sum()

        rehearsal = Rehearsal(
            loaded=self.loaded,
            device=self.device,
            stage=stage.index,
            weights=layer.weights,
            forget=forget,
        )
        with class_refused(type(self.loaded.staged.model).__name__):
            single = rehearsal.single()
        rates = with_overheads(rates, work, single)
        if not self.shape.is_packed or len(self.shape.layers) == 1:  # the last layer leaves tokens out
            return rates
        passes = self.usual.passes(max(1, work.kv_bytes), KV_BYTES)
        return anchored(rates, self.shape, work, [(packed_work(pieces), rehearsal.packed(pieces)) for pieces in passes])

    def _seconds(self, act: Callable[[], object]) -> float:
        """The median; the first time, which compiles and takes up memory, is not counted, unless it is long."""
        seconds: list[float] = []
        for turn in range(NUM_REPEATS + 1):
            begin = time.perf_counter()
            act()
            self.device.finish()
            seconds.append(time.perf_counter() - begin)
            if turn and seconds[-1] > LONG_SECONDS:
                return seconds[-1]
        return sorted(seconds[1:])[NUM_REPEATS // 2]
