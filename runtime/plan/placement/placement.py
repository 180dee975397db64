"""Where each stage's weights and each layer's keys and values live, how many slots the others pass through, and what
that takes of each memory.
"""

from dataclasses import dataclass

from ...config import ExpertPaging
from ..schedule.walk import Walk
from .exchange import ExchangeSize
from .kv import KVLayout
from .ledger import Ledger
from .refusal import ways_to_fit


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes that a run may use. `device_bytes` is None where compute happens in host memory; `library_bytes` of them
    are what the device's libraries take."""

    host_bytes: int
    device_bytes: int | None = None
    library_bytes: int = 0

    @property
    def has_device(self) -> bool:
        return self.device_bytes is not None


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`resident` stages stay in compute memory; the others follow `walk`, or in decode passes `decode_walk`, through
    slots of `slot_bytes`. Of `paged` stages, all streamed, only the dense part follows the walk; their experts have
    `num_expert_slots` of their own. `host_layers` keep their KV in host memory, where the CPU attends to it, through
    `exchange`."""

    resident: frozenset[int]
    walk: Walk
    decode_walk: Walk
    slot_bytes: int
    ledgers: tuple[Ledger, ...]
    kv: KVLayout
    exchange: ExchangeSize
    paged: frozenset[int] = frozenset()
    paging: ExpertPaging = ExpertPaging.off
    num_expert_slots: int = 0

    @property
    def host_layers(self) -> frozenset[int]:
        return frozenset(self.kv.page_bytes) if self.kv.stays_in_host else frozenset()

    @property
    def stays_whole(self) -> bool:
        """Neither weights nor keys and values travel."""
        return not (self.walk.streamed or self.kv.page_bytes)

    @property
    def has_device(self) -> bool:
        """Compute has a memory of its own."""
        return any(ledger.memory == "device" for ledger in self.ledgers)

    @property
    def fits(self) -> bool:
        return all(ledger.fits for ledger in self.ledgers)

    def require_fit(self) -> None:
        """Raises BudgetError, with the equation and the keys that can make it true."""
        for ledger in self.ledgers:
            ledger.require_fit(ways_to_fit(ledger, self.walk, self.kv))
