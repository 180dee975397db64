"""The roads of an accelerator, on one whose copies happen as late or as early as the events allow."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from runtime import OffloadConfig, PrefetchConfig, RuntimeConfig
from runtime.config.settings import Order, Prefetch, Tier
from runtime.errors import BrokenModelError
from runtime.plan.placement.load import Load
from runtime.plan.placement.placement import Budgets, Placement
from runtime.plan.placement.placer import choose_placement
from runtime.plan.shape.extents import ALIGNMENT_BYTES
from runtime.plan.shape.model import ModelShape
from runtime.store.reader import Reader
from runtime.stream.weights import WeightStream
from runtime.units import GIB
from tests.fake_device import POISON, Careless, FakeDevice
from tests.runtime.test_beside import beside
from tests.runtime.test_fidelity import config_for, tokens
from tests.runtime.test_weight_stream import shape, tensors
from tests.support import Reference

__all__ = ["shape", "tensors"]  # fixtures

References = Callable[[str], Reference]
COMPUTE, COPIES = 0, 1  # streams in the order in which the device makes them


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("tier", [Tier.cpu, Tier.nvme])
@pytest.mark.parametrize("kind", Prefetch)
@pytest.mark.parametrize(("family", "resident_layers"), [("llama", 0), ("mixtral", 1)])
def test_tokens_equal_transformers(
    family: str, resident_layers: int, kind: Prefetch, tier: Tier, reference: References
) -> None:
    """With copies that are as late as they may be."""
    ref = reference(family)
    prefetch = PrefetchConfig(kind=kind, depth=2, block_layers=2)
    config = config_for(ref, tier=tier, prefetch=prefetch, resident_layers=resident_layers)
    assert tokens(config, ref.prompts, FakeDevice((False, True))) == ref.expected


def test_without_the_wait_for_copies_the_tokens_are_wrong(reference: References) -> None:
    ref = reference("llama")
    try:
        found = tokens(config_for(ref, tier=Tier.cpu), ref.prompts, Careless((False, True), forgetful=COMPUTE))
    except BrokenModelError:  # no numbers at all
        return
    assert found != ref.expected


def device_placement(shape: ModelShape, tier: Tier) -> Placement:
    """Every stage streamed, on a machine with a device."""
    config = RuntimeConfig(offload=OffloadConfig(tier=tier, resident_layers=0))
    return choose_placement(shape, config, Budgets(host_bytes=GIB, device_bytes=GIB), Load.from_lanes(shape, [], 512))


@pytest.fixture
def reader() -> Iterator[Reader]:
    with Reader(num_threads=2) as reader:
        yield reader


def looks(
    stream: WeightStream, device: FakeDevice, placement: Placement, tensors: dict[str, torch.Tensor]
) -> list[bool]:
    """Two walks over the streamed stages, read and copied one ahead; whether late compute saw the file's bytes."""
    seen: list[bool] = []
    order = [*placement.walk.streamed, *placement.walk.streamed]
    for turn in range(len(order) + 1):
        if turn < len(order):
            if order[turn] not in placement.walk.in_host:
                stream.read(order[turn])
            stream.copy(order[turn])
        if turn:
            stage = order[turn - 1]
            placed, wanted = stream.acquire(stage), tensors[f"w{stage}"]
            begin = placed.tensor_offsets[f"w{stage}"]
            held = placed.buffer[begin : begin + wanted.nbytes].view(wanted.dtype).view(wanted.shape)
            device.compute(lambda held=held, wanted=wanted: seen.append(torch.equal(held, wanted)))
            stream.free(stage)
    device.wait_for_compute()
    return seen


@pytest.mark.parametrize("tier", [Tier.cpu, Tier.nvme])
@pytest.mark.parametrize("are_copies_late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("is_compute_late", [False, True], ids=["prompt", "lagging"])
def test_weights_stay_in_their_slot_until_compute_has_seen_them(
    is_compute_late: bool,
    are_copies_late: bool,
    tier: Tier,
    shape: ModelShape,
    tensors: dict[str, torch.Tensor],
    reader: Reader,
) -> None:
    device = FakeDevice((is_compute_late, are_copies_late), defers_compute=True)
    placement = device_placement(shape, tier)
    with WeightStream(shape, placement, device, reader) as stream:
        assert all(looks(stream, device, placement, tensors))


class Remembering(FakeDevice):
    """Knows which of its memory is still held."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []
        super().__init__()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        buffer = super().host_buffer(num_bytes)
        self.made.append(weakref.ref(buffer))
        return buffer

    def compute_buffer(self, num_bytes: int) -> torch.Tensor:
        buffer = super().compute_buffer(num_bytes)
        self.made.append(weakref.ref(buffer))
        return buffer


@pytest.mark.parametrize("tier", [Tier.cpu, Tier.nvme])
def test_no_memory_outlives_its_session(tier: Tier, reference: References) -> None:
    """The copies for a pass that never came would hold all of it, and a second session had no room."""
    ref, device = reference("llama"), Remembering()
    assert tokens(config_for(ref, tier=tier, resident_layers=0), ref.prompts, device) == ref.expected
    gc.collect()
    assert device.made
    assert not [made for made in device.made if made() is not None]


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_what_lives_in_pieces_arrives_whole(
    late: bool,
    shape: ModelShape,
    tensors: dict[str, torch.Tensor],
    reader: Reader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runtime.stream.weights.HOST_PIECE_BYTES", ALIGNMENT_BYTES)
    device = FakeDevice((late, late), defers_compute=True)
    placement = device_placement(shape, Tier.cpu)
    assert max(shape.sizes.whole_bytes) > 2 * ALIGNMENT_BYTES
    with WeightStream(shape, placement, device, reader) as stream:
        assert all(looks(stream, device, placement, tensors))
        assert stream.take_counters().bytes_copied == 2 * sum(
            shape.stages[i].num_bytes for i in placement.walk.streamed
        )


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_pages_of_weights_are_cut_from_pieces_wherever_these_end(
    family: str, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.stream.weights.HOST_PIECE_BYTES", 3 * ALIGNMENT_BYTES)
    ref = reference(family)
    assert tokens(beside(ref, schedule=Order.cgopipe), ref.prompts, FakeDevice()) == ref.expected


@pytest.mark.parametrize("tier", [Tier.cpu, Tier.nvme])
@pytest.mark.parametrize(("forgetful", "late"), [(COMPUTE, (False, True)), (COPIES, (True, False))])
def test_a_wait_that_is_missing_shows(
    forgetful: int,
    late: tuple[bool, ...],
    tier: Tier,
    shape: ModelShape,
    tensors: dict[str, torch.Tensor],
    reader: Reader,
) -> None:
    device = Careless(late, forgetful=forgetful, defers_compute=True)
    placement = device_placement(shape, tier)
    with WeightStream(shape, placement, device, reader) as stream:
        assert not all(looks(stream, device, placement, tensors))


def test_a_new_slot_waits_for_compute_that_used_its_memory_before(shape: ModelShape, reader: Reader) -> None:
    """Copies are as early as they may be."""
    device = FakeDevice((True, False), defers_compute=True)
    device.clock.wait(device.compute_stream())  # its first reference waits for compute
    device.compute(lambda: None)
    placement = device_placement(shape, Tier.cpu)
    with WeightStream(shape, placement, device, reader) as stream:
        stage = placement.walk.streamed[0]
        stream.copy(stage)
        slot = stream._used_slots[stage]
        assert bool((slot.buffer == POISON).all()), "overwritten while compute was still busy"
        device.wait_for_compute()
        assert not bool((slot.buffer == POISON).all())
