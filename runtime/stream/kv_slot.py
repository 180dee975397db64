"""A piece of compute memory that one lane's pages of one layer pass through, on their way from their tier and back."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from ..store.transfer import PendingTransfer
from .device import ComputeDevice, Event


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Pages of a layer on their way back. `written` is done when the file has them; None: `KVSlot.free` tells it."""

    layer: int
    pages: frozenset[int]
    written: Future[PendingTransfer] | None


class KVSlot:
    """`ready`: the pages have arrived. `free`: compute, or the copy that carried them away, has finished. A disk reads
    into `staging` and writes from there: the same memory as `buffer` on a CPU."""

    def __init__(self, buffer: torch.Tensor, staging: torch.Tensor, device: ComputeDevice):
        self.buffer, self.staging = buffer, staging
        self.ready: Event = device.new_event()
        self.free: Event = device.new_event()
        self.free.record(device.compute_stream())  # what lay in this memory before may still be in use
        self.arriving: Future[PendingTransfer] | None = None
        self.departure: Departure | None = None

    @property
    def is_staged(self) -> bool:
        return self.staging is not self.buffer

    def is_carrying(self, layer: int, pages: Sequence[int]) -> bool:
        """Whether any of these is still on its way back from here."""
        left = self.departure
        return left is not None and left.layer == layer and not left.pages.isdisjoint(pages)
