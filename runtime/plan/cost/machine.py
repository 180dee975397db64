"""The machine that a plan is made for: memories and rates, measured or from a data sheet."""

from dataclasses import dataclass

from ..placement.placement import Budgets
from .rates import MachineRates


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`device_bytes` is None where compute happens in host memory. Memories are what a run may use, those of
    `num_devices` devices together. Without `has_bfloat16` units, products of it are made of others."""

    name: str
    host_bytes: int
    device_bytes: int | None
    rates: MachineRates
    num_devices: int = 1
    library_bytes: int = 0  # of device_bytes, as in `Budgets`
    num_sharers: int = 1  # of weights in host memory, as in `Budgets`
    has_bfloat16: bool = True

    @property
    def budgets(self) -> Budgets:
        return Budgets(
            host_bytes=self.host_bytes,
            device_bytes=self.device_bytes,
            library_bytes=self.library_bytes,
            num_sharers=self.num_sharers,
        )
