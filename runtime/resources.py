"""What a machine has that works side by side: a run measures how long each was busy, the simulator predicts it."""

from enum import Enum


class Resource(Enum):
    """Each but host memory does one thing at a time, in the order in which things are begun; host memory is what disk,
    links and the CPU share in front of an accelerator, predicted and not measured. `number` counts them from 0, in the
    order in which a trace is drawn."""

    disk = "disk"
    host_to_device = "host-to-device"
    device_to_host = "device-to-host"
    compute = "compute"
    cpu_attention = "CPU attention"
    host_memory = "host memory"

    number: int

    def __init__(self, label: str):
        self.number = len(type(self).__members__)
