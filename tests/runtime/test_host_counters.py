"""The counters see what torch waits for, and nothing else."""

from collections.abc import Callable

import pytest
import torch

from runtime.stream.device import CopyPart
from tests.host_counters import CountedDevice, counting, mark
from tests.host_counts import HostCounts

Act = Callable[[torch.Tensor], object]


def counted(act: Act) -> HostCounts:
    with counting() as counter, torch.inference_mode():
        held = mark(torch.tensor([1.0, 2.0, 3.0]))
        counter.take()
        act(held)
        return counter.take()


WAITS: dict[str, Act] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0] + 1),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "index": lambda x: [7, 8, 9][x.long()[0]],
    "tolist": lambda x: (x + 1).tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: torch.nonzero(x),
    "where": lambda x: torch.where(x > 1),
    "boolean mask": lambda x: x[x > 1],
    "boolean mask that is written to": lambda x: x.index_put_((x > 1,), x[:2] * 2),
    "list of rows": lambda x: x[[0, 2]],
    "list of rows that is written to": lambda x: x.__setitem__([0, 2], x[:2] * 2),
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x),
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "to": lambda x: torch.ones(3).to(x.device),
    "copy_ up": lambda x: x.copy_(torch.ones(3)),
    "copy_ down": lambda x: torch.ones(3).copy_(x),
}
QUEUED: dict[str, Act] = {
    "operators": lambda x: (x * 2).softmax(0).view(3, 1).sum(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long(), output_size=6),
    "mask that is filled": lambda x: x.masked_fill_(x > 1, 0),
    "scalar under a mask": lambda x: x.__setitem__(x > 1, 0.0),
    "to": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "copy_": lambda x: x.copy_(torch.ones(3), non_blocking=True),
    "host alone": lambda x: torch.tensor([3, 0, 4]).nonzero().tolist(),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_for_the_device_is_counted_with_its_line(what: str) -> None:
    counts = counted(WAITS[what])
    assert counts.num_syncs == 1
    assert "tests/runtime/test_host_counters.py:" in next(iter(counts.syncs))


@pytest.mark.parametrize("what", QUEUED)
def test_what_is_only_queued_is_no_wait(what: str) -> None:
    assert counted(QUEUED[what]).syncs == {}


def test_torch_waits_twice_for_a_draw_and_for_counts_of_numbers() -> None:
    """It asks whether all probabilities are good, and how many counts there will be."""
    assert counted(lambda x: torch.multinomial(x, 1)).num_syncs == 2
    assert counted(lambda x: x.long().bincount()).num_syncs == 2


def test_launches_are_operators_that_are_no_views() -> None:
    launches = counted(lambda x: (x.view(3, 1).t() @ x[None].t()).expand(2, 1) + 1).launches
    assert sorted(what.split()[0] for what in launches) == ["add", "mm"]


def test_the_host_waits_for_events_and_streams_by_name() -> None:
    with counting() as counter:
        device = CountedDevice((False, True))
        event = device.new_event()
        event.record(device.copy_stream)
        device.compute_waits_for(event)
        assert counter.take().syncs == {}
        event.synchronize()
        device.wait_for_compute()
        device.copy_stream.synchronize()
        waits = ["Event.synchronize", "Event.synchronize", "Stream.synchronize"]
        assert [what.split()[0] for what in counter.take().syncs] == waits


def test_copies_are_known_with_their_sizes_and_the_call_that_holds_them() -> None:
    with counting() as counter:
        device = CountedDevice((False, True))
        held, host = device.compute_buffer(6000), device.host_pages(6000)
        stream, event = device.new_stream(), device.new_event()
        parts = [CopyPart(host[:1000], held[:1000]), CopyPart(host[1000:6000], held[1000:6000])]
        device.copy_all(parts, on=stream, after=event)
        device.copy_all([CopyPart(held[:7], host[:7])], on=stream, after=event)
        counts = counter.take()
    found = [[(copy.num_bytes, copy.is_down) for copy in batch] for batch in counts.batches]
    assert found == [[(1000, False), (5000, False)], [(7, True)]]
