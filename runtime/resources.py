"""Resources of a machine that work in parallel. Runs measure their busy time; the simulator predicts it."""

from enum import Enum


class Resource(Enum):
    """A resource runs one action at a time, in the order of issue. Host memory is an exception: disk, links and CPU use
    its bandwidth together, which is predicted but not measured. `number`: row in a trace."""

    disk = "disk"
    host_to_device = "host-to-device"
    device_to_host = "device-to-host"
    compute = "compute"
    cpu_attention = "CPU attention"
    host_memory = "host memory"

    number: int

    def __init__(self, label: str):
        self.number = len(type(self).__members__)
