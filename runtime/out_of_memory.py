"""Memory that ran out although the plan fits its budget."""

import torch

from .errors import BudgetError
from .plan.planner import RunPlan


def is_out_of_memory(error: Exception) -> bool:
    """torch reports a failed host allocation as a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def out_of_memory(plan: RunPlan) -> BudgetError:
    ledgers = "\n".join(map(str, plan.placement.ledgers))
    return BudgetError(
        f"memory ran out although the plan fits its budget:\n{ledgers}\n"
        "lower offload.host_memory_gib / offload.device_memory_gib or policy.micro_batch_size"
    )
