"""The compute device: memory, streams and events. One code path serves every accelerator through `torch.Stream` and
`torch.Event`; the CPU is a null implementation of the same interface and runs the same engine.

An accelerator's memory is counted as torch's allocators hold it. They keep what was freed, on the device and of pinned
memory, and what they keep is taken in the eyes of the driver and of the system.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from ..errors import ConfigError
from ..out_of_memory import first_line
from ..plan.placement.ledger import LIBRARY_BYTES
from ..plan.shape.extents import ALIGNMENT_BYTES, Extent
from ..units import round_up
from .clock import DeviceClock, Then
from .pinned import HUGE_PAGE_BYTES, allocate_anonymous, allocate_pinned
from .shared_weights import SharedWeights

log = logging.getLogger(__name__)
T = TypeVar("T")

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE_SEGMENTS = "expandable_segments"


def choose_device(name: str) -> torch.device:
    """The device of that name, with an index whatever the name says: each thread has a current device of its own, so
    that one without an index would be another to other threads. `auto` is the CPU where nothing else will do. Raises
    ConfigError."""
    try:
        device = None if name == "auto" else torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"machine.device={name}: not a device torch knows; use auto, cpu or cuda") from error
    if device is not None and device.type == "cpu":
        return device
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        missing = None if found is None else _missing_feature(found)
        if found is not None and missing is not None:
            log.warning("machine.device=auto: the CPU, as torch offers no %s on %s", missing, found.type)
        if found is None or missing is not None:
            return torch.device("cpu")
        device = found
    elif found is None:
        raise ConfigError(
            f"machine.device={name}: torch {torch.__version__} finds no accelerator here; use machine=cpu"
        )
    elif found.type != device.type:
        raise ConfigError(f"machine.device={name}: this torch {torch.__version__} computes on {found.type} or the CPU")
    elif (missing := _missing_feature(device)) is not None:
        raise ConfigError(
            f"machine.device={name}: torch offers no {missing} on {device.type}, which streaming weights takes; "
            "use machine=cpu"
        )
    index, count = device.index, torch.accelerator.device_count()
    if index is None:
        index = torch.accelerator.current_device_index()
    if index >= count:
        raise ConfigError(
            f"machine.device={name}: torch finds {count} of {device.type} here, {device.type}:0 to {count - 1}"
        )
    return torch.device(device.type, index)


def _missing_feature(device: torch.device) -> str | None:
    """What of it torch does not offer, as on Apple's devices, where host memory is the device's too."""
    if not hasattr(torch.get_device_module(device), "mem_get_info"):
        return "figure for free memory"
    try:
        torch.Stream(device=device)
    except RuntimeError:
        return "streams"
    return None


def has_bfloat16_units(device: torch.device) -> bool:
    """NVIDIA's have them from Ampere on, compute capability 8.0; torch computes bfloat16 on earlier ones too, by way of
    float32."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.get_device_module(device).get_device_capability(device) >= (8, 0)


class DeviceMemory(NamedTuple):
    """Bytes. `unreserved`: what no process has. Of those that torch reserved, `allocated` are in tensors."""

    unreserved: int
    reserved: int
    allocated: int

    @property
    def free_bytes(self) -> int:
        return self.unreserved + self.reserved - self.allocated


def enable_expandable_segments(device: torch.device) -> None:
    """Has torch map device memory in pages that segments grow by, so that blocks of many sizes, as prompts have, leave
    no holes of their own. Whoever configures the allocator by its environment variables has the last word, and so have
    virtual devices that cannot map pages."""
    if device.type != "cuda" or torch.version.hip is not None or any(map(os.environ.get, ALLOCATOR_VARIABLES)):
        return
    _configure(f"{EXPANDABLE_SEGMENTS}:True")
    try:
        torch.empty(1, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        _configure(f"{EXPANDABLE_SEGMENTS}:False")
        log.warning(
            "memory of %s is allocated in whole segments, as it cannot map pages: %s", device, first_line(error)
        )


def _configure(settings: str) -> None:
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (configure or torch.cuda.memory._set_allocator_settings)(settings)


class Event(Protocol):
    """A point in a stream's work, as `torch.Event` has it. Streams wait for events of their own device alone."""

    def record(self, stream: torch.Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...


class NullEvent:
    """The event of a CPU, where work is done when the call returns."""

    def record(self, stream: torch.Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CopyPart(NamedTuple):
    """One piece of a copy: as many bytes on either side."""

    source: torch.Tensor
    target: torch.Tensor


class ComputeDevice:
    """`is_accelerator` says whether compute memory and host memory are two. Streams are made here, waited on in the
    engine."""

    _shared: SharedWeights | None = None
    _graph_pool: tuple[Any, torch.cuda.Stream] | None = None  # torch's handle of their memory, and where they are made

    def __init__(self, name: str, shared: SharedWeights | None = None):
        """`shared`: where weights lie that stay in host memory, which other processes have too."""
        self.torch_device, self._shared = choose_device(name), shared
        self.is_accelerator = self.torch_device.type != "cpu"
        self.library_bytes = LIBRARY_BYTES if self.is_accelerator else 0  # that plans leave to them
        if self.is_accelerator:
            enable_expandable_segments(self.torch_device)
        self.copy_stream = self.new_stream()
        new_event = (lambda: torch.Event(device=self.torch_device, enable_timing=True)) if self.is_accelerator else None
        self.clock = DeviceClock(new_event, self.compute_stream)

    def new_stream(self) -> torch.Stream | None:
        """A stream for copies that are not to queue behind others; None on a CPU, where a copy is done when the call
        returns."""
        return torch.Stream(device=self.torch_device) if self.is_accelerator else None

    def new_event(self) -> Event:
        return torch.Event(device=self.torch_device) if self.is_accelerator else NullEvent()

    def host_pages(self, num_bytes: int) -> torch.Tensor:
        """uint8 host memory that only the device's copies look at: pinned, and not aligned to the disk's blocks."""
        if not self.is_accelerator:
            return self.host_buffer(num_bytes)
        return allocate_pinned(num_bytes, is_aligned=False)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Page-aligned host memory for weights, uint8, pinned where there is an accelerator. On a CPU in huge pages
        where the kernel has them: a direct read must look up every page that it fills."""
        size = round_up(max(num_bytes, 1), ALIGNMENT_BYTES)
        if not self.is_accelerator:
            return allocate_anonymous(size, huge=size >= HUGE_PAGE_BYTES)
        return allocate_pinned(size, is_aligned=True)

    @property
    def num_sharers(self) -> int:
        """How many processes have the weights that stay in host memory in common."""
        return 1 if self._shared is None else self._shared.num_sharers

    def load_host_weights(
        self, extents: Sequence[Extent], num_bytes: int, read: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """A host buffer with weights that stay, which `read` fills, or has filled in another process that shares them.
        Nobody writes into it afterwards."""
        if self._shared is None:
            buffer = self.host_buffer(num_bytes)
            read(buffer)
            return buffer
        size = round_up(max(num_bytes, 1), ALIGNMENT_BYTES)
        return self._shared.get_or_fill(extents, size, read, is_pinned=self.is_accelerator)

    def compute_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 memory where compute finds its weights."""
        if not self.is_accelerator:
            return self.host_buffer(num_bytes)
        return torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self.torch_device)

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """uint8 compute memory for what lives long. On a CPU it comes from the kernel, zeroed page by page as it is
        touched, and never from the heap: between activations of the heap it would leave holes of their size."""
        return (
            self.compute_buffer(num_bytes).zero_() if self.is_accelerator else allocate_anonymous(num_bytes, huge=False)
        )

    def copy_ahead(self, parts: Sequence[CopyPart], *, after: Event, then: Then | None = None) -> None:
        """Queues host -> device on the copy stream, to begin once `after` has happened. Returns at once; `then`
        is told when all of it ran."""
        assert self.copy_stream is not None, "copies exist only where there is an accelerator"
        self.copy_all(parts, on=self.copy_stream, after=after, then=then)

    def copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        on: torch.Stream | None,
        after: Event,
        then: Then | None = None,
    ) -> None:
        """Queues a copy in either direction on a stream, to begin once `after` has happened. Returns at once; `then`
        is told when it ran."""
        self.copy_all([CopyPart(source, target)], on=on, after=after, then=then)

    def copy_all(
        self, parts: Sequence[CopyPart], *, on: torch.Stream | None, after: Event, then: Then | None = None
    ) -> None:
        """Copies the parts one behind the other, each as `copy` does."""
        if on is not None:
            self.wait(on, after)
        begin = self.clock.begin(on) if then is not None else 0.0
        with self.on_stream(on):
            for part in parts:
                part.target.copy_(part.source, non_blocking=on is not None)
        if then is not None:
            self.clock.end(begin, then, on)

    def clear_all(self, targets: Sequence[torch.Tensor], *, on: torch.Stream | None, after: Event) -> None:
        """Queues zeros, as `copy_all` does copies."""
        if on is not None:
            self.wait(on, after)
        with self.on_stream(on):
            for target in targets:
                target.zero_()

    def on_stream(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """What this thread queues within goes on the stream. An object of its own for each time: one of torch's keeps
        what its thread goes back to, and two threads may be within the same stream."""
        if stream is None:
            return nullcontext()
        return torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def wait(self, stream: torch.Stream, event: Event) -> None:
        """What is queued on the stream from now on begins once `event` has happened."""
        stream.wait_event(event)  # pyright: ignore[reportArgumentType] - `new_event` made it: it is the stream's kind

    @property
    def can_record(self) -> bool:
        """Whether what is queued can be recorded, see `recorded`."""
        return self.torch_device.type == "cuda"

    def record_graph(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Calls `work`, which queues operators on the compute stream and waits for none, and records these in place of
        running them. Returns what `work` has returned, whose tensors are filled each time that the recording is
        replayed, and a function that queues that and returns. Raises RuntimeError where it asks the device something,
        or memory is short. All recordings of a device share memory: what one has made is good until another is
        replayed."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.torch_device)
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.torch_device)
        pool, stream = self._graph_pool
        try:
            with (
                torch.cuda.device(self.torch_device),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                made = work()
        finally:
            torch.cuda.set_stream(before)  # a recording that fails leaves its own behind
        return made, graph.replay

    def compute_stream(self) -> torch.Stream | None:
        return torch.accelerator.current_stream(self.torch_device) if self.is_accelerator else None

    def compute_waits_for(self, event: Event) -> None:
        stream = self.compute_stream()
        if stream is not None:
            self.wait(stream, event)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """These, all of one dtype, in host memory, once all queued compute is done: the one time in a pass that the
        host waits for it, and the one transfer."""
        if not self.is_accelerator:
            return list(tensors)
        whole = torch.cat([tensor.flatten() for tensor in tensors])
        there = self.host_pages(max(1, whole.nbytes))[: whole.nbytes].view(whole.dtype)
        there.copy_(whole, non_blocking=True)
        self.wait_for_compute()
        parts = there.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def wait_for_compute(self) -> None:
        """Host waits for all queued compute: once per pass, when its tokens are needed anyway."""
        stream = self.compute_stream()
        if stream is not None:
            self.clock.wait(stream)

    def synchronize(self) -> None:
        """Host waits for all that is queued on any stream, copies for a pass that never comes included: before their
        memory goes, and so that the clock holds nothing of those who wait to be told of it."""
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
        """Device memory that nobody uses; what torch keeps for later is that."""
        return self.memory().free_bytes

    def set_memory_limit(self, num_bytes: int | None) -> None:
        """Limits what torch's allocator may hold in this process from now on, in bytes; None lifts the limit. Beyond it
        torch is out of memory."""
        if self.is_accelerator:
            module = torch.get_device_module(self.torch_device)
            share = 1.0 if num_bytes is None else min(1.0, num_bytes / module.mem_get_info(self.torch_device)[1])
            module.set_per_process_memory_fraction(share, self.torch_device)

    def empty_caches(self) -> None:
        """What torch keeps for later, pinned host memory too: the system counts it as taken. Waits for the device."""
        if not self.is_accelerator:
            return
        torch.accelerator.empty_cache()
        empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)  # not before torch 2.12
        if empty_host_cache is not None:
            empty_host_cache()
        elif torch.cuda.is_available():
            torch._C._host_emptyCache()

    def peak_reserved_bytes(self) -> int:
        """Most that torch's allocator held since the start of the process, in tensors or not; 0 on a CPU."""
        return torch.accelerator.max_memory_reserved(self.torch_device) if self.is_accelerator else 0

    def used_bytes(self) -> int:
        """Device memory allocated now; 0 on a CPU."""
        return torch.accelerator.memory_allocated(self.torch_device) if self.is_accelerator else 0

    def peak_bytes(self) -> int:
        """Most device memory allocated since the start of the process; 0 on a CPU, whose peak is the process's own."""
        return torch.accelerator.max_memory_allocated(self.torch_device) if self.is_accelerator else 0
