"""Ledgers: tables of a run's memory use, compared with its memory budget before the first weight is read."""

from dataclasses import dataclass

from ...errors import BudgetError
from ...units import MIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of a ledger."""

    name: str
    num_bytes: int
    equation: str  # how `num_bytes` is computed, as text for users


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The memory use of a run in one memory, and the budget."""

    memory: str  # host or device
    budget_bytes: int
    budget_key: str  # config key that sets the budget
    entries: tuple[Entry, ...]

    @property
    def total_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.budget_bytes

    @property
    def left_bytes(self) -> int:
        return self.budget_bytes - self.total_bytes

    @property
    def headline(self) -> str:
        """`77.4 MiB of 20.3 GiB host memory`."""
        return f"{format_bytes(self.total_bytes)} of {format_bytes(self.budget_bytes)} {self.memory} memory"

    def __str__(self) -> str:
        width = max(len(entry.name) for entry in self.entries)
        lines = [f"  {e.name:<{width}}  {format_bytes(e.num_bytes):>9}  = {e.equation}" for e in self.entries]
        sign = "<=" if self.fits else ">"
        total = f"  {'total':<{width}}  {format_bytes(self.total_bytes):>9}  {sign} {format_bytes(self.budget_bytes)}"
        return "\n".join([f"{self.memory} memory:", *lines, f"{total} ({self.budget_key})"])

    def require_fit(self, advice: str) -> None:
        """Raises BudgetError with the table and `advice` if the run exceeds the budget."""
        if not self.fits:
            missing = format_bytes(self.total_bytes - self.budget_bytes)
            raise BudgetError(f"the run needs {missing} more {self.memory} memory than its budget\n{self}\n{advice}")


# Default budget with an accelerator, as a share of host memory: pinned memory cannot be swapped out.
PINNED_SHARE = 0.75
# Estimates of the device memory of libraries, which a plan cannot compute.
KERNELS_BYTES = 256 * MIB  # kernels of torch and its libraries, loaded on first use, outside of torch's allocator
WORKSPACE_BYTES = 64 * MIB  # workspaces of cuBLAS and cuBLASLt; torch gives each 32 MiB on Hopper, less elsewhere
BLOCKS_BYTES = 64 * MIB  # memory that torch's allocator reserves beyond its tensors, in blocks of 2 to 20 MiB
LIBRARY_BYTES = KERNELS_BYTES + WORKSPACE_BYTES + BLOCKS_BYTES


def library_entry(num_bytes: int) -> Entry:
    """Returns the entry for the libraries of all devices. `num_bytes`: a multiple of `LIBRARY_BYTES`."""
    parts = f"kernels {KERNELS_BYTES // MIB} MiB + BLAS workspaces {WORKSPACE_BYTES // MIB} MiB"
    parts += f" + allocator blocks {BLOCKS_BYTES // MIB} MiB"
    count = num_bytes // LIBRARY_BYTES
    return Entry(name="libraries", num_bytes=num_bytes, equation=parts if count == 1 else f"{count} x ({parts})")
