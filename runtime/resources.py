"""What a machine has that works side by side: a run measures how long each was busy, the simulator predicts it."""

from enum import Enum


class Resource(Enum):
    """Each does one thing at a time, in the order in which things are begun; `number` counts them from 0, in the order
    in which a trace is drawn."""

    disk = "disk"
    host_to_device = "host-to-device"
    device_to_host = "device-to-host"
    compute = "compute"
    cpu_attention = "CPU attention"

    number: int

    def __init__(self, label: str):
        self.number = len(type(self).__members__)
