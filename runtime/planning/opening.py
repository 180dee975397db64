"""Opens a session and confirms it by its first pass; where memory runs out although the plan fits its budget, opens it
once more, with blocks of half as many sequences.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from ..config.settings import PolicyKind
from ..engine.session import Session
from ..out_of_memory import first_line, is_out_of_memory, memory_shortage, out_of_memory
from ..plan.cost.rates import MachineRates
from ..plan.planner import RunPlan
from ..stream.host_memory import reset_peak

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """`plan` makes the plan by rates, None where they are to be measured, and by how often memory has run out;
    `session` holds the memory of a plan while it is open; `confirm` raises MemoryError, or what torch raises, where
    that is more than there is. `kind` and `may_back_off` say whose choice the size of blocks is."""

    plan: Callable[[MachineRates | None, int], RunPlan]
    session: Callable[[RunPlan], AbstractContextManager[Session]]
    confirm: Callable[[RunPlan, Session], None]
    kind: PolicyKind
    may_back_off: bool

    @contextmanager
    def confirmed(self, rates: MachineRates | None) -> Iterator[tuple[RunPlan, Session]]:
        """The session of the first plan that memory suffices for, and that plan. Raises BudgetError where it does not
        suffice for the last one either, and MemoryShortage where it runs out later on."""
        for num_halvings in range(2):
            if num_halvings:
                gc.collect()  # the engine of the first try refers to itself
                reset_peak()
            plan = self.plan(rates, num_halvings)
            rates = plan.rates
            with ExitStack() as stack:
                session = self._opened(stack, plan, may_fail=self.may_back_off and not num_halvings)
                if session is None:
                    continue
                try:
                    yield plan, session
                except (MemoryError, OSError, RuntimeError) as error:
                    if is_out_of_memory(error):
                        raise memory_shortage(plan.placement.ledgers, error) from error
                    raise
                return

    def _opened(self, stack: ExitStack, plan: RunPlan, *, may_fail: bool) -> Session | None:
        """A session that `stack` closes. None where memory has run out as it was opened or confirmed, and that
        `may_fail`: nobody holds it then, so that its memory is free as `stack` closes."""
        try:
            session = stack.enter_context(self.session(plan))
            self.confirm(plan, session)
        except (MemoryError, OSError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if not may_fail:
                raise out_of_memory(plan.placement.ledgers, error) from error
            said = first_line(error)  # a record of the log would keep the error, with all that its frames hold
            log.warning("policy=%s: %s; once more with blocks of half as many sequences", self.kind.value, said)
            return None
        return session
