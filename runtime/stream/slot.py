"""A piece of memory that stages pass through."""

from typing import Protocol

import torch

from ..store.transfer import ChunkTiming
from .device import ComputeDevice, Event


class Transfer(Protocol):
    """Bytes on their way, for the engine's thread to wait for; `timing` is of one that was waited for."""

    @property
    def is_done(self) -> bool: ...

    @property
    def timing(self) -> ChunkTiming: ...

    def wait(self) -> None: ...


class Slot:
    """`free`: its last user has finished; `ready`: its bytes have arrived; `is_fresh`: no lane has asked for them.
    `reads`: those in flight, by page."""

    def __init__(self, buffer: torch.Tensor, device: ComputeDevice):
        self.buffer = buffer
        self.free: Event = device.new_event()
        self.free.record(device.compute_stream())  # what lay in this memory before may still be in use
        self.ready: Event = device.new_event()
        self.reads: dict[int, Transfer] = {}
        self.is_fresh = False
