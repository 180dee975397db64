"""Staging memory in front of a device: what fails there is heard of once, and nothing small waits for a whole layer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.errors import CheckpointError
from runtime.plan.shape.model import ModelShape
from runtime.store.reader import Reader
from runtime.stream.device import CopyPart
from runtime.stream.weights import WeightStream
from tests.fake_device import FakeDevice
from tests.overlap import LAYER_BYTES, RATIOS, Case, placement_of, shape_of, virtual_time
from tests.runtime.test_weight_stream import placement_of as placement_on
from tests.runtime.test_weight_stream import shape, tensors
from tests.timed_device import TimedDevice, TimedReader
from tests.virtual_time import VirtualTime

__all__ = ["shape", "tensors"]  # fixtures
NUM_PIECES = 16


@pytest.fixture
def reader() -> Iterator[Reader]:
    with Reader(num_threads=2) as reader:
        yield reader


@pytest.mark.parametrize("is_asked_for", [True, False], ids=["asked for", "unseen"])
def test_a_read_that_fails_in_front_of_a_device_is_raised_once(
    is_asked_for: bool, shape: ModelShape, reader: Reader, tmp_path: Path
) -> None:
    """Also what waits for the memory that it was to fill comes to an end."""
    device = FakeDevice()
    placement = placement_on(shape, resident_layers=0, device=device)
    first, second, third = placement.walk.streamed[:3]
    with pytest.raises(CheckpointError, match="changed while in use") as error:  # noqa: PT012, SIM117
        with WeightStream(shape, placement, device, reader) as stream:
            (tmp_path / "model").write_bytes(b"")
            stream.read(first)
            stream.copy(first)
            stream.read(second)
            stream.read(third)  # into the memory that the first one's copy would have left
            if is_asked_for:
                stream.acquire(first)
    notes = "".join(getattr(error.value, "__notes__", []))
    assert notes.count("failed too") <= 1, "the one that was to follow has the same cause"


def test_what_is_dropped_in_front_of_a_device_leaves_its_slots_free(
    shape: ModelShape, tensors: dict[str, torch.Tensor], reader: Reader
) -> None:
    device = FakeDevice()
    placement = placement_on(shape, resident_layers=0, device=device)
    first, second, third = placement.walk.streamed[:3]
    with WeightStream(shape, placement, device, reader) as stream:
        stream.read(first)
        stream.copy(first)
        stream.read(second)
        stream.drop()
        for stage in (third, first):
            stream.read(stage)
            stream.copy(stage)
        for stage in (third, first):
            placed, wanted = stream.acquire(stage), tensors[f"w{stage}"]
            begin = placed.tensor_offsets[f"w{stage}"]
            held = placed.buffer[begin : begin + wanted.nbytes].view(wanted.dtype).view(wanted.shape)
            assert torch.equal(held, wanted)


def waited(clock: VirtualTime) -> float:
    """Seconds of a copy of a sixteenth of a layer, asked for when half of one that takes a second has crossed."""
    shape, device = shape_of(is_mixture=False), TimedDevice(clock, 1 / LAYER_BYTES)
    placement, urgent = placement_of(shape, Case(), RATIOS[0]), device.new_stream()
    stage, size = placement.walk.streamed[0], LAYER_BYTES // NUM_PIECES
    part = CopyPart(device.host_buffer(size), device.compute_buffer(size))
    with (
        TimedReader(clock, 0.0, chunk_bytes=LAYER_BYTES) as reader,
        WeightStream(shape, placement, device, reader) as stream,
    ):
        stream.read(stage)
        stream.copy(stage)
        clock.sleep(0.5)
        begin = clock.now
        device.copy_all([part], on=urgent, after=device.new_event())
        urgent.synchronize()
        return clock.now - begin


def test_a_small_copy_waits_for_a_piece_of_a_staged_layer_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.stream.weights.HOST_PIECE_BYTES", LAYER_BYTES // NUM_PIECES)
    with virtual_time() as clock:
        assert clock.run(lambda: waited(clock)) <= 2 / NUM_PIECES + 1e-9
