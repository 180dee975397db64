"""A piece of memory that stages pass through."""

import torch

from ..store.transfer import PendingTransfer
from .device import ComputeDevice, Event


class Slot:
    """`free`: its last user has finished; `ready`: its bytes have arrived; `is_fresh`: no lane has asked for them."""

    def __init__(self, buffer: torch.Tensor, device: ComputeDevice):
        self.buffer = buffer
        self.free: Event = device.new_event()
        self.ready: Event = device.new_event()
        self.pending: PendingTransfer | None = None
        self.is_fresh = False
