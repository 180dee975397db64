"""Copies inputs of CPU attention and CPU experts to host memory, and outputs back to compute memory. There is one
stream for each direction.

A round trip serves one lane (micro-batch) in one layer. The CPU worker waits only for the inputs of its round trip;
compute waits for the output when the lane continues.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType

import torch

from ..plan.placement.kv import PART_ALIGNMENT_BYTES, STORES_IN_FLIGHT, ExchangeSize
from ..resources import Resource
from ..trace import Trace
from ..units import round_up
from .clock import StreamCounters
from .device import ComputeDevice, CopyPart, Event


class RoundTripMemory:
    """Pinned memory of one round trip at a time. Events: `produced` (compute has written the inputs), `arrived` (the
    inputs are in host memory), `returned` (the output is in compute memory)."""

    def __init__(self, device: ComputeDevice, num_bytes: int):
        self.buffer = device.host_pages(num_bytes)
        self.produced, self.arrived, self.returned = (device.new_event() for _ in range(3))

    def views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns views of the buffer, one after another, with the shapes and dtypes of `tensors`."""
        views, begin = [], 0
        for tensor in tensors:
            end = begin + tensor.nbytes
            assert end <= len(self.buffer), f"a round trip of {end:,} B has {len(self.buffer):,} B of pinned memory"
            views.append(self.buffer[begin:end].view(tensor.dtype).view(tensor.shape))
            begin = round_up(end, PART_ALIGNMENT_BYTES)
        return views


class RoundTrip:
    """One round trip: inputs to the host, then the output to compute memory. Any thread may call `wait_for_inputs` and
    `send_output`."""

    def __init__(
        self,
        exchange: "HostExchange",
        layer: int,
        memory: RoundTripMemory,
        sources: Sequence[torch.Tensor],
        out: torch.Tensor,
    ):
        self._exchange, self._layer, self._memory = exchange, layer, memory
        self._sources = sources  # kept alive: the copy to the host may still read it
        *self._inputs, self._output = memory.views([*sources, out])
        self.out = out

    def wait_for_inputs(self) -> list[torch.Tensor]:
        """Waits for the inputs. Returns them in host memory, valid until `receive`."""
        self._memory.arrived.synchronize()
        return self._inputs

    def send_output(self, output: torch.Tensor) -> None:
        """Queues the copy of the output to `out`. Call it after `wait_for_inputs`."""
        # No copy reads the pinned memory now: `receive` of its previous round trip made compute wait for that copy
        # before compute produced the inputs of this round trip.
        self._output.copy_(output)
        self._exchange.send_output(self._layer, CopyPart(self._output, self.out), self._memory)

    def receive(self) -> torch.Tensor:
        """Returns the output, which compute queued from now on may use. Call it once, on the engine's thread, after
        `send_output`."""
        self._exchange.receive_output(self._memory, self.out.nbytes)
        return self.out


class HostExchange:
    """Round trips, and copies of keys and values, between compute and host memory; one per run. Not thread-safe, except
    `send_output`. Arguments `layer` are decoder layers, from 0 on."""

    def __init__(
        self,
        size: ExchangeSize,
        device: ComputeDevice,
        *,
        first_stage: int = 0,
        trace: Trace | None = None,
        label: str = "",
    ):
        """`first_stage`: stage index of decoder layer 0. `label`: name of the data in traces."""
        self._size, self._device, self._label = size, device, label and f" {label}"
        self._first_stage, self._trace = first_stage, trace
        self._to_host, self._to_device = device.new_stream(), device.new_stream()
        self._free = [RoundTripMemory(device, size.round_trip_bytes) for _ in range(size.num_round_trips)]
        self._queued, self._loaded = device.new_event(), device.new_event()
        self._pending_stores: deque[tuple[Event, Sequence[CopyPart]]] = deque()  # (event at the end, copies)
        self._counters = StreamCounters()

    def __enter__(self) -> "HostExchange":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for stream in (self._to_host, self._to_device):
            if stream is not None:
                stream.synchronize()  # copies in flight use memory that is freed next

    def new_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a new, uninitialized tensor in compute memory."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._device.compute_buffer(num_bytes)[:num_bytes].view(dtype).view(*shape)

    def send(self, layer: int, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> RoundTrip:
        """Starts a round trip: queues copies of contiguous tensors to host memory. `out`: compute memory for the
        output; nothing else may use it until `receive`."""
        assert self._free, f"more than {self._size.num_round_trips} lanes attend on the CPU"
        memory = self._free.pop()
        round_trip = RoundTrip(self, layer, memory, tensors, out)
        memory.produced.record(self._device.compute_stream())
        copies = [CopyPart(source, target) for source, target in zip(tensors, memory.views(tensors), strict=True)]
        self._counters.bytes_returned += self._copy(Resource.device_to_host, "send", layer, copies, memory.produced)
        memory.arrived.record(self._to_host)
        return round_trip

    def send_output(self, layer: int, output: CopyPart, memory: RoundTripMemory) -> None:
        """Queues the copy of an output to compute memory. Any thread may call it."""
        self._copy(Resource.host_to_device, "answer", layer, [output], memory.produced)
        memory.returned.record(self._to_device)

    def receive_output(self, memory: RoundTripMemory, output_bytes: int) -> None:
        """Makes compute wait for an output, and frees the round trip's memory."""
        self._device.compute_waits_for(memory.returned)
        self._counters.bytes_copied += output_bytes
        self._free.append(memory)  # reused for inputs that compute produces after this wait

    def store(self, layer: int, copies: Sequence[CopyPart]) -> None:
        """Queues copies from compute memory to host memory. The sources must not change until the copies are done."""
        while len(self._pending_stores) >= STORES_IN_FLIGHT:  # limits the sources that must stay alive
            self._device.compute_waits_for(self._pending_stores.popleft()[0])
        self._queued.record(self._device.compute_stream())
        self._counters.bytes_returned += self._copy(Resource.device_to_host, "store", layer, copies, self._queued)
        stored = self._device.new_event()
        stored.record(self._to_host)
        self._pending_stores.append((stored, copies))

    def load(self, layer: int, copies: Iterable[CopyPart]) -> None:
        """Queues copies from host memory to compute memory, which begin after all earlier stores. Compute queued from
        now on waits for them."""
        self._queued.record(self._device.compute_stream())
        if self._to_device is not None and self._pending_stores:
            self._device.wait(self._to_device, self._pending_stores[-1][0])  # the host bytes may be still on their way
        self._counters.bytes_copied += self._copy(Resource.host_to_device, "load", layer, copies, self._queued)
        self._loaded.record(self._to_device)
        self._device.compute_waits_for(self._loaded)

    def take_counters(self) -> StreamCounters:
        """Returns the counters since the last call."""
        counters, self._counters = self._counters, StreamCounters()
        return counters

    def _copy(self, row: Resource, verb: str, layer: int, copies: Iterable[CopyPart], after: Event) -> int:
        """Queues copies, which are timed together. Returns their bytes."""
        parts = list(copies)
        num_bytes = sum(part.source.nbytes for part in parts)
        on = self._to_host if row is Resource.device_to_host else self._to_device
        self._device.copy_all(parts, on=on, after=after, then=partial(self._count_copy, row, verb, layer, num_bytes))
        return num_bytes

    def _count_copy(self, row: Resource, verb: str, layer: int, num_bytes: int, begin: float, end: float) -> None:
        stage = self._first_stage + layer
        self._counters.copies[stage] += end - begin
        if self._trace is not None and end > begin:
            self._trace.span(row, f"{verb} {stage}{self._label}", begin, end, num_bytes=num_bytes)
