"""Whichever way streams race, what goes down has arrived when it is looked at, and so has what comes up."""

import itertools
import weakref

import pytest
import torch

from runtime.config.settings import KVTier
from runtime.plan.placement.kv import STORES_IN_FLIGHT, ExchangeSize, exchange_device_entry, kv_layout
from runtime.plan.placement.load import Load
from runtime.resources import Resource
from runtime.stream.device import CopyPart
from runtime.stream.exchange import HostExchange
from runtime.trace import Trace
from tests.fake_device import Careless, FakeDevice
from tests.toy import sizes_of, toy_shape

COMPUTE, COPIES, DOWN, UP = range(4)  # streams in the order in which the device makes them
RACES = [(compute, True, down, up) for compute, down, up in itertools.product([False, True], repeat=3)]
SIZE = ExchangeSize(num_round_trips=1, round_trip_bytes=4096)


def round_trips(device: FakeDevice, num_round_trips: int = 3) -> list[tuple[float, float]]:
    """What the CPU found of what compute had made for it, and compute of what the CPU answered, one behind the other
    through the same memory."""
    found: list[float] = []
    answers: list[torch.Tensor] = []
    with HostExchange(SIZE, device) as exchange:
        for number in range(num_round_trips):
            made = exchange.new_tensor((2, 3), torch.float32)
            device.compute(lambda made=made, number=number: made.fill_(number))
            round_trip = exchange.send(0, [made, made], exchange.new_tensor((5,), torch.float32))
            arrived = round_trip.wait_for_inputs()
            found.append(float(arrived[1].mean()))
            round_trip.send_output(torch.full((5,), number + 0.5))
            answer = round_trip.receive()
            device.compute(lambda answer=answer: answers.append(answer.clone()))
        device.wait_for_compute()
    return list(zip(found, [float(answer.mean()) for answer in answers], strict=True))


RIGHT = [(number, number + 0.5) for number in range(3)]


@pytest.mark.parametrize("late", RACES, ids=str)
def test_no_race_gives_wrong_numbers(late: tuple[bool, ...]) -> None:
    """True: that stream runs when it is waited for, and no sooner. False: it overtakes what it does not wait for. All
    trips go through the same pinned memory."""
    assert round_trips(FakeDevice(late, defers_compute=True)) == RIGHT


@pytest.mark.parametrize(
    ("forgetful", "late"),
    [
        (COMPUTE, (False, True, True, True)),  # compute does not wait for answers
        (DOWN, (True, True, False, True)),  # queries leave before compute has made them
    ],
)
def test_a_wait_that_is_missing_shows(forgetful: int, late: tuple[bool, ...]) -> None:
    found = round_trips(Careless(late, forgetful=forgetful, defers_compute=True))
    assert found != RIGHT


@pytest.mark.parametrize("late", RACES, ids=str)
def test_what_is_loaded_is_what_was_stored(late: tuple[bool, ...]) -> None:
    assert stored_and_loaded(FakeDevice(late, defers_compute=True)) == [0.0, 1.0, 2.0, 3.0]


def test_a_load_that_overtakes_the_store_shows() -> None:
    device = Careless((False, True, True, False), forgetful=UP, defers_compute=True)
    assert stored_and_loaded(device) != [0.0, 1.0, 2.0, 3.0]


def stored_and_loaded(device: FakeDevice) -> list[float]:
    seen: list[float] = []
    with HostExchange(SIZE, device) as exchange:
        home = device.host_pages(4096).view(torch.float32)
        for number in range(4):
            made, back = exchange.new_tensor((8,), torch.float32), exchange.new_tensor((8,), torch.float32)
            device.compute(lambda made=made, number=number: made.fill_(number))
            exchange.store(0, [CopyPart(made, home[:8])])
            exchange.load(0, [CopyPart(home[:8], back)])
            device.compute(lambda back=back: seen.append(float(back.mean())))
        device.wait_for_compute()
    return seen


def test_stores_that_are_not_done_are_bounded() -> None:
    """So is the compute memory that they keep."""
    device = FakeDevice((False, True, True, True))
    home = device.host_pages(4096).view(torch.float32)[:8].fill_(-1)
    with HostExchange(SIZE, device) as exchange:
        for number in range(8):
            exchange.store(
                0, [CopyPart(exchange.new_tensor((1,), torch.float32).fill_(number), home[number : number + 1])]
            )
        done = [number for number, found in enumerate(home.tolist()) if found == number]
        assert done == [*range(8 - STORES_IN_FLIGHT)]
    assert home.tolist() == [*range(8)]


def test_each_copy_is_a_span_on_the_row_of_its_way() -> None:
    device, trace = FakeDevice((False, True, True, True)), Trace()
    home = device.host_pages(4096).view(torch.float32)[:8]
    with HostExchange(SIZE, device, first_stage=5, trace=trace) as exchange:
        made = exchange.new_tensor((8,), torch.float32)
        exchange.store(0, [CopyPart(made, home)])
        exchange.load(1, [CopyPart(home, made)])
        round_trip = exchange.send(2, [made, made], exchange.new_tensor((4,), torch.float32))
        round_trip.wait_for_inputs()
        round_trip.send_output(torch.zeros(4))
        round_trip.receive()
        device.synchronize()
        counters = exchange.take_counters()
    down, up = Resource.device_to_host, Resource.host_to_device
    spans = trace.take()
    assert [(span.resource, span.name) for span in spans] == [
        (down, "store 5"), (up, "load 6"), (down, "send 7"), (up, "answer 7"),
    ]  # fmt: skip
    assert set(counters.copies) == {5, 6, 7}
    assert sum(counters.copies.values()) == pytest.approx(sum(span.end - span.begin for span in spans))
    assert (counters.bytes_returned, counters.bytes_copied) == (32 + 64, 32 + 16)


def test_more_trips_or_bytes_than_planned_are_our_mistake() -> None:
    device = FakeDevice()
    with HostExchange(SIZE, device) as exchange:
        out = exchange.new_tensor((1,), torch.float32)
        with pytest.raises(AssertionError, match="a round trip of 4,432 B has 4,096 B of pinned"):
            exchange.send(0, [torch.zeros(1000)], exchange.new_tensor((100,), torch.float32))
    with HostExchange(SIZE, device) as exchange:
        exchange.send(0, [torch.zeros(1)], out)
        with pytest.raises(AssertionError, match="more than 1 lanes attend"):
            exchange.send(0, [torch.zeros(1)], out)


def test_prompts_on_their_way_down_are_counted_with_those_made_meanwhile() -> None:
    """Compute waits for the last store but one when it has already made what the next one takes."""
    alive, refs = list[int](), list[weakref.ref[torch.Tensor]]()
    home = torch.zeros(4)
    with HostExchange(SIZE, FakeDevice((False,) * 4)) as exchange:
        for _ in range(6):
            source = exchange.new_tensor((4,), torch.float32)
            refs.append(weakref.ref(source))
            alive.append(sum(ref() is not None for ref in refs))
            exchange.store(0, [CopyPart(source, home)])
            del source
    shape = toy_shape()
    load = Load.from_lanes(shape, [sizes_of([100, 30], max_new_tokens=12)], 64)
    kv = kv_layout(shape, KVTier.cpu, range(8), num_pages=load.num_kv_pages, slot_pages=load.max_pages, num_slots=0)
    entry = exchange_device_entry(shape, kv, SIZE, load)
    assert max(alive) == STORES_IN_FLIGHT + 1 == 3
    assert entry.num_bytes == SIZE.round_trip_bytes + (3 * 64 + 112) * shape.kv_layer_bytes[0]
