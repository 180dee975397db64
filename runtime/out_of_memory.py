"""Memory that ran out although the plan fits its budget."""

import errno
from collections.abc import Sequence

from .errors import BudgetError, MemoryShortage
from .plan.placement.ledger import Ledger

PHRASES = (
    "annot allocate memory",
    "can't allocate memory",
    "out of memory",
    "std::bad_alloc",
    "can't start new thread",
    "failed to map segment",
    "OUT_OF_DEVICE_MEMORY",
    "OUT_OF_HOST_MEMORY",
    "_STATUS_ALLOC_FAILED",
    "BLAS_STATUS_NOT_INITIALIZED",
)


class OverBudget(MemoryError):
    """The process holds more of host memory than its budget, whatever the machine has."""


def is_out_of_memory(error: BaseException) -> bool:
    """Torch reports a failed host allocation as a plain RuntimeError, the dynamic linker as an ImportError.
    Accelerators' libraries have names of their own for it; on a full device cuBLAS says that it is not initialised."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    may_report_memory = isinstance(error, (RuntimeError, ImportError, OSError))
    return may_report_memory and any(phrase in str(error) for phrase in PHRASES)


def plan_memory_error(ledgers: Sequence[Ledger], error: BaseException) -> BudgetError:
    """The error before the first pass: the plan is at fault, and the next start would end in the same way."""
    return BudgetError(_shortage_message(ledgers, error))


def run_memory_error(ledgers: Sequence[Ledger], error: BaseException) -> MemoryShortage:
    """The error of a run that has begun: a later start goes on."""
    return MemoryShortage(_shortage_message(ledgers, error))


def _shortage_message(ledgers: Sequence[Ledger], error: BaseException) -> str:
    equations = "\n".join(map(str, ledgers))
    keys = " or ".join(ledger.budget_key for ledger in ledgers)
    advice = f"raise what limits this process, or lower {keys} or policy.micro_batch_size: the plan is then smaller"
    if isinstance(error, OverBudget):
        key = next(ledger.budget_key for ledger in ledgers if ledger.memory == "host")
        advice = f"raise {key}, as this plan takes more than it counts, or lower policy.micro_batch_size"
    return f"memory ran out although the plan fits its budget ({first_line(error)}):\n{equations}\n{advice}"


def first_line(error: BaseException) -> str:
    """Torch's errors go on with advice for programmers."""
    return str(error).partition("\n")[0] or type(error).__name__
