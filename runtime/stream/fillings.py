"""Chooses who fills memory with weights, by what ranks have in common. It stands alone as each of them is of a module
that knows nothing of the others.
"""

from typing import TypeAlias

from ..ranks.collectives import Collectives, Gathering
from ..ranks.shared_memory import SharedMemory
from ..store.reader import Reader
from .device import ComputeDevice
from .filling import Filling, OwnFilling, SharedFilling
from .gathered_filling import GatheredFilling

Together: TypeAlias = SharedMemory | Collectives | Gathering


def filling_of(
    together: Together | None,
    device: ComputeDevice,
    reader: Reader,
    *,
    count: int,
) -> Filling:
    """Who fills memory of `count` numbers. None, or a part of the model: this process reads alone."""
    if together is None or isinstance(together, Gathering):
        return OwnFilling(device, reader)
    if isinstance(together, Collectives):
        return GatheredFilling(together, device, reader)
    return SharedFilling(together, device, reader, count=count)
