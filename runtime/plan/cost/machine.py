"""The machine that a plan is made for: memories and rates, measured or from a data sheet."""

from dataclasses import dataclass, field

from ..placement.placement import Budgets
from .links import Fabric
from .rates import MachineRates


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device beside all of a host, and the `fabric` that joins it with others; `device_bytes` is None where compute
    happens in host memory. Memories are what a run may use. Without `has_bfloat16` units, products of it are made of
    others."""

    name: str
    host_bytes: int
    device_bytes: int | None
    rates: MachineRates
    fabric: Fabric = field(default_factory=Fabric)
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
