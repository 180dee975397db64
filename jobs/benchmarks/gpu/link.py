"""What the link between host and device gives: pinned memory in both directions, alone and at once, and pageable."""

from collections.abc import Mapping

from runtime.measure.memory import DEVICE_COPY, HOST_COPY, HOST_READ, LINK_IN, memory_probes
from runtime.stream.device import ComputeDevice
from runtime.units import MIB

COPY_BYTES, NUM_READINGS = 256 * MIB, 4
OTHERS = (HOST_READ, HOST_COPY, DEVICE_COPY)

Link = Mapping[str, float]


def measure_link(device: ComputeDevice) -> dict[str, float]:
    """GB/s by direction, the fastest of some readings; the first, which may be anything, is not counted. Empty on a
    CPU."""
    probes = [probe for probe in memory_probes(device, num_bytes=COPY_BYTES) if probe.name not in OTHERS]
    return {probe.name: max([probe.read() for _ in range(NUM_READINGS)][1:]) for probe in probes}


def peak_bytes_per_second(link: Link) -> float:
    """Of pinned memory to the device."""
    return link[LINK_IN] * 1e9


def described(link: Link) -> str:
    return "Link: " + "; ".join(f"{name} {rate:.1f} GB/s" for name, rate in link.items()) + "." if link else "No link."
