"""Opens a session, and where memory runs out says that rather than fail: the plan had counted too little."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from .config import PolicyKind
from .out_of_memory import first_line, is_out_of_memory, out_of_memory
from .plan.planner import RunPlan
from .session import Session

log = logging.getLogger(__name__)


def opened(
    stack: ExitStack,
    opening: AbstractContextManager[Session],
    confirm: Callable[[Session], None],
    plan: RunPlan,
    kind: PolicyKind,
    *,
    may_fail: bool,
) -> Session | None:
    """`stack` closes it. None where memory has run out as it was opened or as `confirm` tried it, and that `may_fail`:
    nobody holds it then, so that its memory is free as `stack` closes. Raises BudgetError otherwise."""
    try:
        session = stack.enter_context(opening)
        confirm(session)
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if not may_fail:
            raise out_of_memory(plan.placement.ledgers, error) from error
        said = first_line(error)  # a record of the log would keep the error, with all that its frames hold
        log.warning("policy=%s: %s; once more with blocks of half as many sequences", kind.value, said)
        return None
    return session
