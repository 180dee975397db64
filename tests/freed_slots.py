"""On a double of a device nobody finds what lay in a slot once its last user has let go of it.

It is spoiled as the last work of that user's stream: a copy into the slot that does not wait for it is spoiled too.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch

from runtime.stream.device import ComputeDevice
from runtime.stream.exchange import RoundTripMemory
from runtime.stream.kv import KVSlot, KVStream
from runtime.stream.slots import Slot, StagingSlot
from tests.fake_device import FakeDevice, FakeEvent, FakeStream
from tests.fake_streams import spoil


def when_recorded(event: object, spoiled: torch.Tensor, *, but_on: FakeStream | None = None) -> None:
    if isinstance(event, FakeEvent):
        event.spoils, event.keeps_on = spoiled, but_on


@contextmanager
def freed_slots_are_spoiled() -> Iterator[None]:
    """Of devices that are doubles; others are as they are."""
    slot_made, staging_made = Slot.__init__, StagingSlot.__init__
    kv_slot_made, made_round_trip, stored = KVSlot.__init__, RoundTripMemory.__init__, KVStream.store

    def make_slot(slot: Slot, number: int, buffer: torch.Tensor, device: ComputeDevice) -> None:
        slot_made(slot, number, buffer, device)
        when_recorded(slot.free, buffer)

    def make_staging(slot: StagingSlot, number: int, buffer: torch.Tensor, device: ComputeDevice) -> None:
        staging_made(slot, number, buffer, device)
        when_recorded(slot.free, buffer)

    def make_kv_slot(slot: KVSlot, buffer: torch.Tensor, staging: torch.Tensor, device: ComputeDevice) -> None:
        kv_slot_made(slot, buffer, staging, device)
        if isinstance(device, FakeDevice):  # compute lets go first, then what carries the pages away
            when_recorded(slot.free, buffer, but_on=device.compute_stream())

    def make_round_trip(round_trip: RoundTripMemory, device: ComputeDevice, num_bytes: int) -> None:
        made_round_trip(round_trip, device, num_bytes)
        when_recorded(round_trip.returned, round_trip.buffer)

    def store(stream: KVStream, layer: int, lane: int, changed: Sequence[int]) -> None:
        if not changed and isinstance(stream._device, FakeDevice):  # nothing carries any away
            stream._device.compute(partial(spoil, stream._fetched[layer, lane][0].buffer))
        stored(stream, layer, lane, changed)

    with ExitStack() as stack:
        for owner, name, made in (
            (Slot, "__init__", make_slot),
            (StagingSlot, "__init__", make_staging),
            (KVSlot, "__init__", make_kv_slot),
            (RoundTripMemory, "__init__", make_round_trip),
            (KVStream, "store", store),
        ):
            stack.enter_context(mock.patch.object(owner, name, made))
        yield
