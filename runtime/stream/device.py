"""The compute device: memory, streams and events. One code path serves every accelerator through `torch.Stream` and
`torch.Event`; on a CPU, streams are None and events do nothing.

Compute memory is memory that the device's operators use: the accelerator's memory, or on a CPU host memory. torch's
allocators cache freed device and pinned memory; the driver and the system still count this memory as used.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch

from ..errors import ConfigError
from ..out_of_memory import first_line
from ..plan.placement.ledger import LIBRARY_BYTES
from ..plan.shape.extents import ALIGNMENT_BYTES, Extent
from ..units import round_up
from .clock import DeviceClock, TimingCallback
from .pinned import HUGE_PAGE_BYTES, allocate_anonymous, allocate_pinned
from .shared_weights import SharedWeights

log = logging.getLogger(__name__)
T = TypeVar("T")

# Environment variables that configure torch's allocator.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE_SEGMENTS = "expandable_segments"


def choose_device(name: str) -> torch.device:
    """Returns the torch device for the setting `machine.device`; `auto` uses the CPU if no accelerator is suitable.
    Raises ConfigError."""
    try:
        device = None if name == "auto" else torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"machine.device={name}: not a device torch knows; use auto, cpu or cuda") from error
    if device is not None and device.type == "cpu":
        return device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        missing = None if accelerator is None else _missing_feature(accelerator)
        if accelerator is not None and missing is not None:
            log.warning("machine.device=auto: using the CPU, since torch has no %s on %s", missing, accelerator.type)
        if accelerator is None or missing is not None:
            return torch.device("cpu")
        device = accelerator
    elif accelerator is None:
        raise ConfigError(f"machine.device={name}: torch {torch.__version__} finds no accelerator; use machine=cpu")
    elif accelerator.type != device.type:
        raise ConfigError(
            f"machine.device={name}: this torch {torch.__version__} supports only {accelerator.type} and cpu"
        )
    elif (missing := _missing_feature(device)) is not None:
        raise ConfigError(
            f"machine.device={name}: torch has no {missing} on {device.type}, which streaming weights requires; "
            "use machine=cpu"
        )
    index, count = device.index, torch.accelerator.device_count()
    if index is None:  # set it: without one, tensors would be on the current device, which differs by thread
        index = torch.accelerator.current_device_index()
    if index >= count:
        names = f"{device.type}:0 to {device.type}:{count - 1}"
        raise ConfigError(f"machine.device={name}: no such device; torch finds {count}: {names}")
    return torch.device(device.type, index)


def _missing_feature(device: torch.device) -> str | None:
    """Returns the name of a required feature that torch lacks on this device; None if it has all."""
    if not hasattr(torch.get_device_module(device), "mem_get_info"):
        return "memory statistics"
    try:
        torch.Stream(device=device)
    except RuntimeError:
        return "streams"
    return None


def has_bfloat16_units(device: torch.device) -> bool:
    """True if the device computes bfloat16 natively (NVIDIA: compute capability 8.0 or higher). Otherwise torch
    emulates it."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.get_device_module(device).get_device_capability(device) >= (8, 0)


class DeviceMemory(NamedTuple):
    """Device memory in bytes."""

    unreserved: int  # free for all processes
    reserved: int  # by torch's allocator in this process
    allocated: int  # of `reserved`: used by tensors

    @property
    def free_bytes(self) -> int:
        """Bytes that this process can allocate."""
        return self.unreserved + self.reserved - self.allocated


def enable_expandable_segments(device: torch.device) -> None:
    """Turns on torch's expandable segments, which prevent fragmentation. Does nothing if the user configured the
    allocator by environment variables. Logs a warning if the device does not support them."""
    if device.type != "cuda" or torch.version.hip is not None or any(map(os.environ.get, ALLOCATOR_VARIABLES)):
        return
    _configure(f"{EXPANDABLE_SEGMENTS}:True")
    try:
        torch.empty(1, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        _configure(f"{EXPANDABLE_SEGMENTS}:False")
        log.warning(
            "%s does not support expandable segments, so its memory may fragment: %s", device, first_line(error)
        )


def _configure(settings: str) -> None:
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (configure or torch.cuda.memory._set_allocator_settings)(settings)


class Event(Protocol):
    """Interface of `torch.Event`. A stream can wait only for events of its own device."""

    def record(self, stream: torch.Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...


class NullEvent:
    """An event on a CPU. It does nothing, since work is done when the call returns."""

    def record(self, stream: torch.Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CopyPart(NamedTuple):
    """One of several tensors to copy; both sides have the same number of bytes."""

    source: torch.Tensor
    target: torch.Tensor


class ComputeDevice:
    """Memory, streams and copies of one device. `is_accelerator`: compute memory is separate from host memory.

    Copies are asynchronous on an accelerator: they are queued on a stream, and the call returns at once."""

    _shared: SharedWeights | None = None
    _graph_pool: tuple[Any, torch.cuda.Stream] | None = None  # memory and capture stream of all live CUDA graphs

    def __init__(self, name: str, shared: SharedWeights | None = None):
        """`shared`: host memory for weights that other processes use too."""
        self.torch_device, self._shared = choose_device(name), shared
        self.is_accelerator = self.torch_device.type != "cpu"
        self.library_bytes = LIBRARY_BYTES if self.is_accelerator else 0  # reserved by plans for CUDA libraries
        if self.is_accelerator:
            enable_expandable_segments(self.torch_device)
        self.copy_stream = self.new_stream()
        new_event = (lambda: torch.Event(device=self.torch_device, enable_timing=True)) if self.is_accelerator else None
        self.clock = DeviceClock(new_event, self.compute_stream)
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # live ones

    def new_stream(self) -> torch.Stream | None:
        """Returns a new stream, for copies that must not wait for copies on other streams; None on a CPU."""
        return torch.Stream(device=self.torch_device) if self.is_accelerator else None

    def new_event(self) -> Event:
        return torch.Event(device=self.torch_device) if self.is_accelerator else NullEvent()

    def host_pages(self, num_bytes: int) -> torch.Tensor:
        """Returns uint8 host memory for copies to and from the device: pinned, but not aligned for direct disk
        reads."""
        if not self.is_accelerator:
            return self.host_buffer(num_bytes)
        return allocate_pinned(num_bytes, is_aligned=False)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns page-aligned uint8 host memory for weights, pinned if there is an accelerator. On a CPU it uses huge
        pages if possible, since a direct disk read must look up every page that it fills."""
        size = round_up(max(num_bytes, 1), ALIGNMENT_BYTES)
        if not self.is_accelerator:
            return allocate_anonymous(size, huge=size >= HUGE_PAGE_BYTES)
        return allocate_pinned(size, is_aligned=True)

    @property
    def num_sharers(self) -> int:
        """Number of processes that share the weights in host memory."""
        return 1 if self._shared is None else self._shared.num_sharers

    def load_host_weights(
        self, extents: Sequence[Extent], num_bytes: int, read: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Returns a read-only host buffer of `num_bytes` with the weights in `extents`. `read` fills the buffer, unless
        another process that shares the weights has filled it."""
        if self._shared is None:
            buffer = self.host_buffer(num_bytes)
            read(buffer)
            return buffer
        size = round_up(max(num_bytes, 1), ALIGNMENT_BYTES)
        return self._shared.get_or_fill(extents, size, read, is_pinned=self.is_accelerator)

    def compute_buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns uninitialized uint8 compute memory."""
        if not self.is_accelerator:
            return self.host_buffer(num_bytes)
        return torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self.torch_device)

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Returns zeroed uint8 compute memory for long-lived data."""
        if self.is_accelerator:
            return self.compute_buffer(num_bytes).zero_()
        return allocate_anonymous(num_bytes, huge=False)  # not from the heap, which it would fragment

    def copy_ahead(self, parts: Sequence[CopyPart], *, after: Event, then: TimingCallback | None = None) -> None:
        """Same as `copy_all` on the copy stream, for copies from host to device."""
        assert self.copy_stream is not None, "only an accelerator has a copy stream"
        self.copy_all(parts, on=self.copy_stream, after=after, then=then)

    def copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        on: torch.Stream | None,
        after: Event,
        then: TimingCallback | None = None,
    ) -> None:
        """Same as `copy_all` for a single copy."""
        self.copy_all([CopyPart(source, target)], on=on, after=after, then=then)

    def copy_all(
        self, parts: Sequence[CopyPart], *, on: torch.Stream | None, after: Event, then: TimingCallback | None = None
    ) -> None:
        """Queues copies between host and device on stream `on`; they begin after the event `after`. `then` is called
        with the begin of the first copy and the end of the last. Sources and targets must stay alive and unchanged
        until the copies are done."""
        if on is not None:
            self.wait(on, after)  # the stream waits, not the host
        begin = self.clock.begin(on) if then is not None else 0.0
        with self.on_stream(on):
            for part in parts:
                part.target.copy_(part.source, non_blocking=on is not None)  # host memory is pinned
        if then is not None:
            self.clock.end(begin, then, on)

    def clear_all(self, targets: Sequence[torch.Tensor], *, on: torch.Stream | None, after: Event) -> None:
        """Queues the zeroing of tensors on stream `on`; it begins after the event `after`."""
        if on is not None:
            self.wait(on, after)
        with self.on_stream(on):
            for target in targets:
                target.zero_()

    def on_stream(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Returns a context in which `stream` is this thread's current stream."""
        if stream is None:
            return nullcontext()
        # A new object for each context: it stores the stream to restore, and several threads may use this stream.
        return torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def wait(self, stream: torch.Stream, event: Event) -> None:
        """Makes work queued on the stream from now on wait for `event`."""
        stream.wait_event(event)  # pyright: ignore[reportArgumentType] - a torch.Event, since there is a stream

    @property
    def can_record(self) -> bool:
        """True if the device supports `record_graph`."""
        return self.torch_device.type == "cuda"

    def record_graph(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Captures the operators that `work` queues in a CUDA graph, without running them.

        Returns the result of `work` and a function that replays the graph. Each replay is asynchronous, and fills the
        tensors in the result again. All graphs of a device share memory, so a result is valid until another graph is
        replayed. Raises RuntimeError if `work` synchronizes with the device or memory runs out."""
        graph, previous_stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.torch_device)
        if self._graph_pool is None or not self._graphs:  # torch refuses a pool whose graphs have all been freed
            self._graph_pool = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.torch_device)
        pool, stream = self._graph_pool
        try:
            with (
                torch.cuda.device(self.torch_device),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                result = work()
        finally:
            torch.cuda.set_stream(previous_stream)  # a failed capture leaves its own stream current
        self._graphs.add(graph)
        return result, graph.replay

    def compute_stream(self) -> torch.Stream | None:
        """The stream on which the model's operators are queued; None on a CPU."""
        return torch.accelerator.current_stream(self.torch_device) if self.is_accelerator else None

    def compute_waits_for(self, event: Event) -> None:
        """Makes compute that is queued from now on wait for `event`."""
        stream = self.compute_stream()
        if stream is not None:
            self.wait(stream, event)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns tensors of one dtype, copied to host memory in one transfer. Waits for all queued compute."""
        if not self.is_accelerator:
            return list(tensors)
        joined = torch.cat([tensor.flatten() for tensor in tensors])
        on_host = self.host_pages(max(1, joined.nbytes))[: joined.nbytes].view(joined.dtype)
        on_host.copy_(joined, non_blocking=True)
        self.wait_for_compute()  # includes the copy: the host may read `on_host` only now
        parts = on_host.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def wait_for_compute(self) -> None:
        """Blocks the host until all queued compute is done. Call it once per pass, when the host needs the tokens."""
        stream = self.compute_stream()
        if stream is not None:
            self.clock.wait(stream)

    def synchronize(self) -> None:
        """Blocks the host until all streams are done, and reports their timed work. Call it before memory that their
        work uses is freed."""
        if self.is_accelerator:
            torch.accelerator.synchronize(self.torch_device)
            self.clock.resolve()

    def memory(self) -> DeviceMemory:
        assert self.is_accelerator, "a CPU's memory is the host's"
        return DeviceMemory(
            unreserved=torch.get_device_module(self.torch_device).mem_get_info(self.torch_device)[0],
            reserved=torch.accelerator.memory_reserved(self.torch_device),
            allocated=torch.accelerator.memory_allocated(self.torch_device),
        )

    def free_bytes(self) -> int:
        """Free device memory, including memory that torch's allocator caches."""
        return self.memory().free_bytes

    def set_memory_limit(self, num_bytes: int | None) -> None:
        """Limits the device memory of torch's allocator in this process; beyond the limit, it raises OutOfMemoryError.
        None removes the limit."""
        if self.is_accelerator:
            module = torch.get_device_module(self.torch_device)
            share = 1.0 if num_bytes is None else min(1.0, num_bytes / module.mem_get_info(self.torch_device)[1])
            module.set_per_process_memory_fraction(share, self.torch_device)

    def empty_caches(self) -> None:
        """Returns torch's cached device and pinned memory to the system. Waits for the device."""
        if not self.is_accelerator:
            return
        torch.accelerator.empty_cache()
        empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)  # not before torch 2.12
        if empty_host_cache is not None:
            empty_host_cache()
        elif torch.cuda.is_available():
            torch._C._host_emptyCache()

    def peak_reserved_bytes(self) -> int:
        """Peak memory reserved by torch's allocator since the process started; 0 on a CPU."""
        return torch.accelerator.max_memory_reserved(self.torch_device) if self.is_accelerator else 0

    def used_bytes(self) -> int:
        """Device memory that tensors use now; 0 on a CPU."""
        return torch.accelerator.memory_allocated(self.torch_device) if self.is_accelerator else 0

    def peak_bytes(self) -> int:
        """Peak device memory of tensors since the process started; 0 on a CPU, where tensors are host memory."""
        return torch.accelerator.max_memory_allocated(self.torch_device) if self.is_accelerator else 0
