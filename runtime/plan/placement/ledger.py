"""What a run needs of each memory, term by term, against its budget: checked before the first weight is read."""

from dataclasses import dataclass

from ...errors import BudgetError
from ...units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str
    num_bytes: int
    equation: str


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """One memory: `host` or `device`. `budget_key` is the config key that sets the budget."""

    memory: str
    budget_bytes: int
    budget_key: str
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

    def __str__(self) -> str:
        width = max(len(entry.name) for entry in self.entries)
        lines = [f"  {e.name:<{width}}  {format_bytes(e.num_bytes):>9}  = {e.equation}" for e in self.entries]
        sign = "<=" if self.fits else ">"
        total = f"  {'total':<{width}}  {format_bytes(self.total_bytes):>9}  {sign} {format_bytes(self.budget_bytes)}"
        return "\n".join([f"{self.memory} memory:", *lines, f"{total} ({self.budget_key})"])

    def require_fit(self, advice: str) -> None:
        if not self.fits:
            short = format_bytes(self.total_bytes - self.budget_bytes)
            raise BudgetError(f"the run needs {short} more {self.memory} memory than it may use\n{self}\n{advice}")
