"""Memory of a run against its budget, term by term; checked before the first weight is read."""

from dataclasses import dataclass

from ...errors import BudgetError
from ...units import MIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str
    num_bytes: int
    equation: str


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Terms of one memory and its budget."""

    memory: str  # host or device
    budget_bytes: int
    budget_key: str  # in the config
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
        if not self.fits:
            missing = format_bytes(self.total_bytes - self.budget_bytes)
            raise BudgetError(f"the run needs {missing} more {self.memory} memory than its budget\n{self}\n{advice}")


PINNED_SHARE = 0.75  # of host memory with an accelerator: pinned memory cannot be swapped out
# Allowances for the libraries of a device, which a plan cannot count.
KERNELS_BYTES = 256 * MIB  # modules of torch and its libraries, loaded on first use, outside of torch's allocator
WORKSPACE_BYTES = 64 * MIB  # of cuBLAS and cuBLASLt; torch gives each 32 MiB on Hopper, less elsewhere
BLOCKS_BYTES = 64 * MIB  # reserved by torch's allocator beyond its tensors, in blocks of 2 to 20 MiB
LIBRARY_BYTES = KERNELS_BYTES + WORKSPACE_BYTES + BLOCKS_BYTES


def library_entry(num_bytes: int) -> Entry:
    """Returns the entry for the libraries of one device or several."""
    parts = f"kernels {KERNELS_BYTES // MIB} MiB + BLAS workspaces {WORKSPACE_BYTES // MIB} MiB"
    parts += f" + allocator blocks {BLOCKS_BYTES // MIB} MiB"
    count = num_bytes // LIBRARY_BYTES
    return Entry(name="libraries", num_bytes=num_bytes, equation=parts if count == 1 else f"{count} x ({parts})")
