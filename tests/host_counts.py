"""What was counted of the host's work for a device."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LinkCopy:
    """One memory copy between host and device."""

    num_bytes: int
    is_down: bool
    where: str


@dataclass(kw_only=True)
class HostCounts:
    """`syncs` and `launches` by what and where, as `nonzero runtime/attention/host_attention.py:32`; `batches`: calls
    of `ComputeDevice.copy_all`, as tuples of the copies that each holds; `timed`: spans that events measure."""

    syncs: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    copies: list[LinkCopy] = field(default_factory=list)
    batches: list[tuple[LinkCopy, ...]] = field(default_factory=list)
    timed: Counter[str] = field(default_factory=Counter)

    @property
    def num_syncs(self) -> int:
        return self.syncs.total()

    @property
    def num_launches(self) -> int:
        return self.launches.total()

    def syncs_but(self, *allowed: str) -> dict[str, int]:
        """Those that no word in `allowed` names."""
        return {what: n for what, n in self.syncs.items() if not any(word in what for word in allowed)}
