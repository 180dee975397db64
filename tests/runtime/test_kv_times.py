"""Copies of keys and values count for their stage, and each way has its row in the trace."""

from runtime.config.settings import KVTier
from runtime.plan.placement.kv import KVLayout
from runtime.resources import Resource
from runtime.stream.device import ComputeDevice
from runtime.stream.kv import KVStream
from runtime.trace import Trace

LAYOUT = KVLayout(tier=KVTier.cpu, page_bytes={0: 4096, 2: 4096}, num_pages=8, slot_pages=4, num_slots=2)


def test_a_fetch_and_a_store_are_spans_and_seconds_of_their_stage() -> None:
    trace = Trace()
    with KVStream(LAYOUT, ComputeDevice("cpu"), first_stage=1, trace=trace) as stream:
        for _ in range(2):  # what was never stored is not copied
            stream.fetch(2, 0, [0, 1])
            stream.acquire(2, 0)
            stream.store(2, 0, [0, 1])
        counters = stream.take_counters()
    spans = trace.take()
    expected = [
        (Resource.device_to_host, "store 3"),
        (Resource.host_to_device, "fetch 3"),
        (Resource.device_to_host, "store 3"),
    ]
    assert [(span.resource, span.name) for span in spans] == expected
    assert dict(counters.copies) == {3: sum(span.end - span.begin for span in spans)}
    assert (counters.bytes_copied, counters.bytes_returned) == (2 * 4096, 4 * 4096)
