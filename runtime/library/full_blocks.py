"""How far some rows are from filling a block, and what that costs; it stands alone, as a question that only those ask
who are given rows piece by piece."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan.placement.memory import SequenceSize
from ..plan.planner import plan_run
from ..planning.planner import Planner

MANY_ROWS = 8_192  # that a block is looked for in
FAR_FEWER, WORTH_SAYING = 2.0, 1.5  # a block's rows by those that there are; its rows a second by theirs


@dataclass(frozen=True, kw_only=True)
class FewRows:
    """Rows that are generated together, how many like them one block takes, and predicted rows a second of both."""

    num_rows: int
    block_rows: int
    rate: float
    block_rate: float

    def __str__(self) -> str:
        at_least = "at least " if self.block_rows >= MANY_ROWS else ""
        return (
            f"{self.num_rows:,} rows are generated together, and one block takes {at_least}{self.block_rows:,} of this "
            f"size: {self.block_rate:,.1f} rows/s are predicted with that many, {self.rate:,.1f} with these; hand over "
            "more rows at a time"
        )


def few_rows(planner: Planner, sizes: Sequence[SequenceSize]) -> FewRows | None:
    """What `sizes` lack of a block; None where they fill one, or more of them would not be clearly faster. Rates are
    measured where none are kept. Raises BudgetError."""
    if not sizes:
        return None
    shape, config, budgets = planner.model.shape, planner.config, planner.budgets
    rates = planner.measured(plan_run(shape, config, budgets, sizes), sizes)
    many = [sizes[place % len(sizes)] for place in range(MANY_ROWS)]
    here, full = (plan_run(shape, config, budgets, each, rates=rates) for each in (sizes, many))
    assert here.prediction is not None, "rates are given"
    assert full.prediction is not None, "rates are given"
    found = FewRows(
        num_rows=len(sizes),
        block_rows=full.block_size,
        rate=len(sizes) / here.prediction.seconds,
        block_rate=len(many) / full.prediction.seconds,
    )
    is_far = found.block_rows >= FAR_FEWER * found.num_rows and found.block_rate >= WORTH_SAYING * found.rate
    return found if is_far else None
