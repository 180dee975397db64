"""A piece of memory that stages pass through."""

import torch

from ..store.transfer import PendingTransfer
from .device import ComputeDevice, Event


class Slot:
    """`free`: its last user has finished; `ready`: its bytes have arrived; `is_fresh`: no lane has asked for them.
    `reads`: those in flight, by page."""

    def __init__(self, buffer: torch.Tensor, device: ComputeDevice):
        self.buffer = buffer
        self.free: Event = device.new_event()
        self.free.record(device.compute_stream())  # what lay in this memory before may still be in use
        self.ready: Event = device.new_event()
        self.reads: dict[int, PendingTransfer] = {}
        self.is_fresh = False
