"""Fills memory of this process with what all ranks have read, each its share of every page, by one collective for a
page.

Shares are of one size, in whole blocks; the few blocks that do not divide by the ranks each of them reads itself. A
slot is this process' own, so it may be filled again once compute here has left it. A thread of its own comes to the
collectives, in the order in which pages are asked for, which is the schedule's and so the same everywhere.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import NamedTuple

import torch

from ..plan.shape.extents import Extent, even_shares_of
from ..ranks.collectives import Collectives
from ..store.reader import Reader
from ..store.transfer import ChunkTiming, PendingTransfer
from .device import ComputeDevice
from .filling import Filling

LOOK_SECONDS = 0.02  # between two looks for a stop, or for one that has ended


class Gathered(NamedTuple):
    """A page that is there: what this rank has read of it, and when it was gathered, by `time.monotonic()`."""

    reading: PendingTransfer
    begin: float
    end: float


class GatheredFilling(Filling):
    """Reads of all ranks, wherever they are."""

    def __init__(self, collectives: Collectives, device: ComputeDevice, reader: Reader):
        self._collectives, self._device, self._reader = collectives, device, reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shares-gathered")

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def abandon(self) -> None:
        self._collectives.abandon()

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return self._device.host_buffer(num_bytes)

    def fill(self, number: int, extents: Sequence[Extent], buffer: torch.Tensor) -> "GatheredTransfer":
        ranks = self._collectives.ranks
        own, begin, end = even_shares_of(extents, ranks.rank, ranks.size)
        reading = self._reader.submit(own, buffer.numpy().data)
        return GatheredTransfer(self._collectives, self._thread.submit(self._gather, reading, buffer[begin:end]))

    def _gather(self, reading: PendingTransfer, pieces: torch.Tensor) -> Gathered:
        try:
            reading.wait()
        except BaseException:
            self._collectives.abandon()  # the next page is not this one
            raise
        begin = time.monotonic()
        if len(pieces):
            self._collectives.gather(pieces)
        return Gathered(reading, begin, time.monotonic())


class GatheredTransfer:
    """A page on its way, of which each rank reads a share; `timing` is of this one's."""

    def __init__(self, collectives: Collectives, told: Future[Gathered]):
        self._ranks, self._told = collectives.ranks, told

    @property
    def is_done(self) -> bool:
        return self._told.done()

    def wait(self) -> None:
        """Returns when all shares are there; raises what this rank's read raised, PeerEnded, and Interrupted."""
        while not wait_for([self._told], LOOK_SECONDS).done:
            self._ranks.require_going()
        self._told.result()

    @property
    def timing(self) -> ChunkTiming:
        return self._told.result().reading.timing

    @property
    def gathered(self) -> Gathered:
        """The page, once it was waited for."""
        return self._told.result()
