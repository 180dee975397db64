"""Opens and closes the engine's streams, worker threads and compiled kernels together."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Barrier, BoundedSemaphore

import torch

from ..attention.page_codes import stored_dtype
from ..closing import Closing
from ..config.settings import Attention, KVTier, RuntimeConfig
from ..model.fused_ops import DTYPES
from ..model.loading import LoadedModel
from ..plan.placement.feedforward import round_trip_size
from ..plan.placement.placement import Placement
from ..plan.search.drafts import NO_DRAFTS, DraftPlan
from ..plan.shape.shapes import Parameter
from ..store.kv_file import KVFile
from ..store.reader import Reader
from ..stream.clock import StreamCounters
from ..stream.device import ComputeDevice
from ..stream.exchange import HostExchange
from ..stream.experts import ExpertStream
from ..stream.kv import KVStream
from ..stream.weight_cache import WeightCache
from ..stream.weight_reader import SessionResources
from ..stream.weights import WeightStream
from ..trace import Trace
from ..units import MIB
from ..weights.stage_weights import TORCH_DTYPES
from .compiling import HOST_OPS, CompiledKernels, KernelSet, prepare_kernels
from .tables import TableStream


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Model, settings, placement and device of an engine. `trace` records spans; `weight_cache` holds weights read by
    earlier sessions; `resources` are shared by ranks that read weights together."""

    model: LoadedModel
    config: RuntimeConfig
    placement: Placement
    device: ComputeDevice
    trace: Trace | None
    weight_cache: WeightCache | None = None
    resources: SessionResources | None = None
    drafts: DraftPlan = NO_DRAFTS


def prepare_attention(model: LoadedModel) -> None:
    """Compiles the CPU decode attention kernels. Idempotent."""
    for part in attention_kernels(model):
        prepare_kernels(part)


def compiled_kernels(model: LoadedModel) -> CompiledKernels:
    """A model's CPU kernels. Those in the on-disk cache are loaded."""
    parameters = (parameter for stage in model.shape.stages for parameter in stage.parameters)
    kernel_sets = [*attention_kernels(model), product_kernels(parameters, model.compute_dtype)]
    if model.compute_dtype in DTYPES:
        kernel_sets.append(KernelSet(HOST_OPS, _name(model.compute_dtype)))
    return CompiledKernels(kernel_sets)


def attention_kernels(model: LoadedModel) -> list[KernelSet]:
    """The compiled CPU attention kernels for a model's KV pages; empty if it uses none."""
    kv_dtype, computed = model.shape.kv_dtype, model.compute_dtype
    if kv_dtype.is_quantized:
        return [KernelSet("quantized_attention", _name(computed), (kv_dtype.value,))]
    return [KernelSet("attention", _name(stored_dtype(kv_dtype, computed)))] if model.shape.is_packed else []


def product_kernels(parameters: Iterable[Parameter], input_dtype: torch.dtype) -> KernelSet:
    """The compiled kernels that multiply inputs of dtype `inputs` with these weights."""
    slices = [piece for parameter in parameters for piece in parameter.slices]
    stored = {piece.dtype for piece in slices if len(piece.shape) >= 2 and not piece.format}
    dtypes = [_name(TORCH_DTYPES[name]) for name in sorted(stored & TORCH_DTYPES.keys())]
    formats = sorted({piece.format for piece in slices if piece.format})
    return KernelSet("products", _name(input_dtype), tuple(dtypes), tuple(formats))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class AttentionWorkers(Closing):
    """Thread pool for CPU attention. Tasks start in the order of submission. Closing waits for running tasks and
    cancels pending ones. One worker by default: `decode_attention` splits each lane over threads, so the lane that the
    engine needs first ends first."""

    def __init__(self, *, num_workers: int = 1, max_pending: int = 8):
        self._room = BoundedSemaphore(max_pending)
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="attend")
        # torch operators in a worker use one thread, as OpenMP would start a thread team per worker. The limit is per
        # thread, but new threads inherit the last value set by any: workers set theirs, then the old one is restored.
        num_threads = torch.get_num_threads()
        all_started = Barrier(num_workers)

        def limit() -> None:
            torch.get_num_threads()  # initializes this thread's limit, which would overwrite a later one
            torch.set_num_threads(1)
            all_started.wait()  # so that each task runs on another thread

        for started in [self._pool.submit(limit) for _ in range(num_workers)]:
            started.result()
        torch.set_num_threads(num_threads)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, compute: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
        """Queues a task. Blocks while `max_pending` tasks are pending."""
        self._room.acquire()
        try:
            future = self._pool.submit(_run_inference, compute)
        except RuntimeError:  # closed
            self._room.release()
            raise
        future.add_done_callback(lambda _: self._room.release())
        return future


@torch.inference_mode()
def _run_inference(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    return compute()


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The open streams of an engine; None where the placement needs none."""

    weights: WeightStream
    experts: ExpertStream | None  # for paged experts
    kv: KVStream | None  # for offloaded KV
    exchange: HostExchange | None  # for attention that the CPU computes for an accelerator
    round_trips: HostExchange | None  # for experts that the CPU computes for an accelerator
    workers: AttentionWorkers | None  # for attention on the CPU
    tables: TableStream | None = None  # for embedding tables of which passes read rows

    @property
    def counters(self) -> list[Callable[[], StreamCounters]]:
        streams = [self.weights, self.tables, self.experts, self.kv, self.exchange, self.round_trips]
        return [stream.take_counters for stream in streams if stream is not None]

    def discard_pages(self, pages: Sequence[int]) -> None:
        """Drops the stored contents of freed KV pages in every layer. Call before their next owner stores anything."""
        if self.kv is not None and pages:
            self.kv.forget(pages)


@contextmanager
def open_streams(setup: Setup, reader: Reader) -> Iterator[Streams]:
    """Opens the streams and reads the resident weights, reusing those in `setup.weight_cache`. Raises CheckpointError,
    KVFileError."""
    shape, placement, device, trace = setup.model.shape, setup.placement, setup.device, setup.trace
    cache = setup.weight_cache or WeightCache()
    cache.drop_unused(shape, placement)
    if trace is not None:
        trace.stage_names = [stage.name for stage in shape.stages]
    first = shape.layers[0].index
    if placement.host_layers:
        prepare_attention(setup.model)  # a policy search may have chosen host attention
    with ExitStack() as stack:
        stack.callback(device.synchronize)  # runs last: queued device work may still use the streams' memory
        experts = None
        if placement.paged:
            slots = placement.num_expert_slots
            paging = placement.paging
            experts = ExpertStream(
                shape, placement, device, reader, paging=paging, num_slots=slots, trace=trace, loaded=cache.experts
            )
        exchange = None
        if placement.host_layers:
            exchange = stack.enter_context(HostExchange(placement.exchange, device, first_stage=first, trace=trace))
        round_trips = None
        if placement.cpu_share is not None:
            stacks = (parameter for stage in shape.stages for parameter in stage.stacks)
            prepare_kernels(product_kernels(stacks, setup.model.compute_dtype))
            size = round_trip_size(shape, placement.cpu_share)
            round_trips = stack.enter_context(
                HostExchange(size, device, first_stage=first, trace=trace, label="tokens of experts")
            )
        layout, kv = placement.kv, None
        if layout.page_bytes and not placement.host_layers:
            file = None
            if layout.tier is KVTier.nvme:  # I/O settings as for weights
                offload = setup.config.offload
                file = KVFile(
                    layout,
                    directory=setup.config.kv.directory,
                    num_threads=offload.reader_threads,
                    chunk_bytes=offload.read_chunk_mib * MIB,
                    direct=offload.direct_io,
                )
                stack.enter_context(file)
            kv = stack.enter_context(KVStream(layout, device, file, first_stage=first, trace=trace))
        weights = WeightStream(shape, placement, device, reader, trace, loaded=cache.stages, resources=setup.resources)
        tables = None
        if shape.tables:
            tables = TableStream(shape.stages, setup.model.dtypes, device, reader, trace)
        yield Streams(
            weights=stack.enter_context(weights),
            experts=None if experts is None else stack.enter_context(experts),
            kv=kv,
            exchange=exchange,
            round_trips=round_trips,
            workers=stack.enter_context(AttentionWorkers()) if setup.config.policy.attention is Attention.cpu else None,
            tables=tables,
        )
