"""Seconds of a phase by resource: those of both directions of a link are copying."""

from jobs.record.passes import PhaseTimes
from runtime.plan.cost.simulator import PhaseTime
from runtime.resources import Resource

BUSY = {
    Resource.disk: 1.0,
    Resource.host_to_device: 2.0,
    Resource.device_to_host: 4.0,
    Resource.compute: 8.0,
    Resource.cpu_attention: 16.0,
}


def test_each_resource_is_counted_where_it_belongs() -> None:
    times = PhaseTimes.from_phase(PhaseTime(num_passes=2, seconds=32.0, stall_seconds=64.0, busy_seconds=BUSY))
    assert times == PhaseTimes(
        seconds=32.0,
        compute_seconds=8.0,
        load_seconds=1.0,
        copy_seconds=6.0,
        attention_seconds=16.0,
        stall_seconds=64.0,
    )
    assert times.scale(0.5).add(times.scale(0.5)) == times
