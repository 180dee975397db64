"""Memory that ran out although the plan fits its budget."""

import errno
from collections.abc import Sequence

from .errors import BudgetError, MemoryShortage
from .plan.ledger import Ledger

PHRASES = (
    "annot allocate memory",
    "can't allocate memory",
    "out of memory",
    "std::bad_alloc",
    "can't start new thread",
    "failed to map segment",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Torch reports a failed host allocation as a plain RuntimeError, the dynamic linker as an ImportError."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    is_of_a_kind = isinstance(error, (RuntimeError, ImportError, OSError))
    return is_of_a_kind and any(phrase in str(error) for phrase in PHRASES)


def out_of_memory(ledgers: Sequence[Ledger]) -> BudgetError:
    """Before the first pass: the plan is at fault, and the next start would end in the same way."""
    return BudgetError(_shortage(ledgers))


def memory_shortage(ledgers: Sequence[Ledger]) -> MemoryShortage:
    """Of a run that has begun: a later start goes on."""
    return MemoryShortage(_shortage(ledgers))


def _shortage(ledgers: Sequence[Ledger]) -> str:
    equations = "\n".join(map(str, ledgers))
    return (
        f"memory ran out although the plan fits its budget:\n{equations}\n"
        "lower offload.host_memory_gib / offload.device_memory_gib or policy.micro_batch_size"
    )
