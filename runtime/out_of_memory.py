"""Recognizes out-of-memory errors, and explains those of a run whose plan fits its memory budget."""

import errno
from collections.abc import Sequence

from .errors import BudgetError, MemoryShortage
from .plan.placement.ledger import Ledger

PHRASES = (  # parts of messages that report exhausted memory
    "annot allocate memory",  # with "C" or "c"
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
    """The process uses more host memory than its budget, even if the machine has more."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error` reports exhausted memory. Not only MemoryError does: torch raises RuntimeError for a failed host
    allocation, the dynamic linker raises ImportError, and cuBLAS on a full device says that it is not initialized."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    may_report_memory = isinstance(error, (RuntimeError, ImportError, OSError))
    return may_report_memory and any(phrase in str(error) for phrase in PHRASES)


def plan_memory_error(ledgers: Sequence[Ledger], error: BaseException) -> BudgetError:
    """Makes the error for a shortage before or in the first pass: the plan is too large, and a restart would fail
    again. `ledgers`: the plan's memory tables."""
    return BudgetError(_shortage_message(ledgers, error))


def run_memory_error(ledgers: Sequence[Ledger], error: BaseException) -> MemoryShortage:
    """Makes the error for a shortage after the first pass: a restart resumes the run."""
    return MemoryShortage(_shortage_message(ledgers, error))


def _shortage_message(ledgers: Sequence[Ledger], error: BaseException) -> str:
    equations = "\n".join(map(str, ledgers))
    keys = " or ".join(ledger.budget_key for ledger in ledgers)
    advice = f"raise this process's memory limit, or lower {keys} or policy.micro_batch_size"
    if isinstance(error, OverBudget):
        key = next(ledger.budget_key for ledger in ledgers if ledger.memory == "host")
        advice = f"the plan uses more than estimated: raise {key}, or lower policy.micro_batch_size"
    return f"memory ran out although the plan fits its budget ({first_line(error)}):\n{equations}\n{advice}"


def first_line(error: BaseException) -> str:
    """The first line of an error message; torch appends lines of advice for developers."""
    return str(error).partition("\n")[0] or type(error).__name__
