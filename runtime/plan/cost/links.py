"""The links between ranks: between devices of one host, and between hosts; and how long an exchange takes over them.

A ring goes over all of them, so the slowest hop says how fast it is (Patarasuk and Yuan 2009): of what all ranks have
in the end, each sends and receives (n - 1) / n.
"""

from dataclasses import dataclass

from ...config.profiles import DeviceLink
from ...errors import ConfigError
from .rates import UNLIMITED, between

HOP_SECONDS = 10e-6  # of a ring of devices: a copy out, a flag, a copy in, and a launch
NODE_HOP_SECONDS = 50e-6  # between hosts, by TCP; an estimate until one is measured
# Layer bytes that gloo gathers between processes of one host in a second, by their number: measured in pieces of 64
# MiB, with two cores for all of them. With more than four each has its share of what four have.
GLOO_BYTES_PER_SECOND = [(2, 1.23e9), (4, 0.64e9)]


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The links of `num_devices` devices in each of `num_nodes` hosts. Rates are what is attained in one direction: of
    one device's link to the others, of a host's memory, of one host's link to the others. `device` None: ranks compute
    in host memory, and gloo carries what they exchange."""

    num_devices: int = 1
    num_nodes: int = 1
    device: DeviceLink | None = None
    device_bytes_per_second: float = UNLIMITED
    host_bytes_per_second: float = UNLIMITED
    node_bytes_per_second: float = UNLIMITED

    def num_per_node(self, num_ranks: int) -> int:
        """Ranks of each host; as few hosts as can be take part. Raises ConfigError where the machine has no such
        number."""
        if num_ranks <= self.num_devices or (self.device is None and self.num_nodes == 1):
            return num_ranks
        most = self.num_devices * self.num_nodes
        if num_ranks > most or num_ranks % self.num_devices:
            hosts = f"{self.num_nodes} hosts of {self.num_devices}" if self.num_nodes > 1 else "one host"
            raise ConfigError(
                f"plan.num_ranks={num_ranks} does not go onto {hosts}: up to {self.num_devices}"
                + (f", or a multiple of it up to {most}" if self.num_nodes > 1 else " of its devices")
            )
        return self.num_devices

    def gather_bytes_per_second(self, num_ranks: int) -> float:
        """The rate at which each rank gets what all have, its own part included."""
        if num_ranks == 1:
            return UNLIMITED
        per_node, sent = self.num_per_node(num_ranks), (num_ranks - 1) / num_ranks
        rates = [self._within(per_node, sent)] if per_node > 1 else []
        if per_node < num_ranks:
            rates.append(self.node_bytes_per_second / sent)
        return min(rates)

    def gather_seconds(self, num_ranks: int) -> float:
        """What a gather takes beside its bytes."""
        per_node = self.num_per_node(num_ranks)
        across = num_ranks // per_node if per_node < num_ranks else 0
        return (num_ranks - 1 - across) * HOP_SECONDS + across * NODE_HOP_SECONDS

    def send_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """The seconds in which one rank hands bytes to the next one; the slowest of them."""
        per_node, twofold = self.num_per_node(num_ranks), 2 if self.device is DeviceLink.host else 1
        within = num_bytes * twofold / self._pair if per_node > 1 else 0.0
        across = num_bytes / self.node_bytes_per_second + NODE_HOP_SECONDS if per_node < num_ranks else 0.0
        return max(within + HOP_SECONDS, across)

    @property
    def _pair(self) -> float:
        return GLOO_BYTES_PER_SECOND[0][1] if self.device is None else self.device_bytes_per_second

    def _within(self, num_ranks: int, sent: float) -> float:
        """The rate of a gather within a host, of which each rank sends a share. What has no other way is written to the
        host's memory once and read once."""
        if self.device is None:
            last, rate = GLOO_BYTES_PER_SECOND[-1]
            return between(GLOO_BYTES_PER_SECOND, num_ranks) if num_ranks <= last else rate * last / num_ranks
        seconds = sent / self.device_bytes_per_second
        if self.device is DeviceLink.host:
            seconds = max(seconds, 2 * num_ranks * sent / self.host_bytes_per_second)
        return 1 / seconds
