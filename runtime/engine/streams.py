"""All that moves bytes beside the engine, opened and closed together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ..config.settings import Attention, KVTier, RuntimeConfig
from ..plan.placement.feedforward import trip_size
from ..plan.placement.kv import KVLayout
from ..store.kv_file import KVFile
from ..store.reader import Reader
from ..stream.counters import StreamCounters
from ..stream.exchange import HostExchange
from ..stream.experts import ExpertStream
from ..stream.kept_weights import KeptWeights
from ..stream.kv import KVStream
from ..stream.weights import WeightStream
from ..units import MIB
from .setup import Setup, prepare_attention, prepare_experts
from .workers import AttentionWorkers


@dataclass(frozen=True, kw_only=True)
class Streams:
    """`experts` are there where experts are paged, `kv` where keys and values travel, `workers` where the CPU attends,
    `exchange` where it does so for an accelerator, `trips` where it multiplies experts for one."""

    weights: WeightStream
    experts: ExpertStream | None
    kv: KVStream | None
    exchange: HostExchange | None
    trips: HostExchange | None
    workers: AttentionWorkers | None

    @property
    def counters(self) -> list[Callable[[], StreamCounters]]:
        found = [self.weights, self.experts, self.kv, self.exchange, self.trips]
        return [stream.take_counters for stream in found if stream is not None]

    def forget(self, pages: Sequence[int]) -> None:
        """Nobody will ask for what these KV pages held."""
        if self.kv is not None and pages:
            self.kv.forget(pages)


@contextmanager
def open_streams(setup: Setup, reader: Reader) -> Iterator[Streams]:
    """Reads the resident weights, of which those that are kept stay where they are. Raises CheckpointError,
    KVFileError."""
    shape, placement, device, trace = setup.model.shape, setup.placement, setup.device, setup.trace
    kept = setup.kept or KeptWeights()
    kept.fit(shape, placement)
    first = shape.layers[0].index
    if placement.host_layers:
        prepare_attention(setup.model)  # a search may have come to it
    with ExitStack() as stack:
        stack.callback(device.settle)  # last, while the streams' memory is still theirs
        experts = None
        if placement.paged:
            slots = placement.num_expert_slots
            paging = placement.paging
            experts = ExpertStream(
                shape, placement, device, reader, paging=paging, num_slots=slots, trace=trace, held=kept.experts
            )
        exchange = None
        if placement.host_layers:
            exchange = stack.enter_context(HostExchange(placement.exchange, device, first_stage=first, trace=trace))
        trips = None
        if placement.cpu_share is not None:
            prepare_experts(setup.model)
            size = trip_size(shape, placement.cpu_share)
            trips = stack.enter_context(
                HostExchange(size, device, first_stage=first, trace=trace, what="tokens of experts")
            )
        layout, pages = placement.kv, None
        if layout.page_bytes and not placement.host_layers:
            file = stack.enter_context(_kv_file(layout, setup.config)) if layout.tier is KVTier.nvme else None
            pages = stack.enter_context(KVStream(layout, device, file, first_stage=first, trace=trace))
        weights = WeightStream(shape, placement, device, reader, trace, held=kept.stages, together=setup.together)
        yield Streams(
            weights=stack.enter_context(weights),
            experts=None if experts is None else stack.enter_context(experts),
            kv=pages,
            exchange=exchange,
            trips=trips,
            workers=stack.enter_context(AttentionWorkers()) if setup.config.policy.attention is Attention.cpu else None,
        )


def _kv_file(layout: KVLayout, config: RuntimeConfig) -> KVFile:
    """Read and written as weights are read."""
    offload = config.offload
    return KVFile(
        layout,
        directory=config.kv.directory,
        num_threads=offload.reader_threads,
        chunk_bytes=offload.read_chunk_mib * MIB,
        direct=offload.direct_io,
    )
