"""A ledger adds up, and refuses with the equation and the config key."""

import pytest

from runtime.errors import BudgetError
from runtime.plan.placement.ledger import Entry, Ledger
from runtime.units import GIB, MIB


def ledger(budget_bytes: int) -> Ledger:
    return Ledger(
        memory="host",
        budget_bytes=budget_bytes,
        budget_key="offload.host_memory_gib",
        entries=(
            Entry(name="slots", num_bytes=2 * GIB, equation="2 x 1,073,741,824 B"),
            Entry(name="KV cache", num_bytes=512 * MIB, equation="1,024 positions x 524,288 B"),
        ),
    )


TOTAL = 2 * GIB + 512 * MIB


@pytest.mark.parametrize(("budget", "fits"), [(TOTAL - 1, False), (TOTAL, True), (TOTAL + 1, True)])
def test_it_fits_exactly_when_the_sum_is_within_the_budget(budget: int, fits: bool) -> None:
    assert ledger(budget).total_bytes == TOTAL
    assert ledger(budget).fits is fits
    assert ledger(budget).left_bytes == budget - TOTAL
    if fits:
        ledger(budget).require_fit("advice")
    else:
        with pytest.raises(BudgetError):
            ledger(budget).require_fit("advice")


def test_the_refusal_has_the_shortfall_every_term_the_key_and_the_advice() -> None:
    with pytest.raises(BudgetError) as error:
        ledger(2 * GIB).require_fit("lower policy.micro_batch_size")
    assert str(error.value).splitlines() == [
        "the run needs 512 MiB more host memory than its budget",
        "host memory:",
        "  slots         2 GiB  = 2 x 1,073,741,824 B",
        "  KV cache    512 MiB  = 1,024 positions x 524,288 B",
        "  total       2.5 GiB  > 2 GiB (offload.host_memory_gib)",
        "lower policy.micro_batch_size",
    ]
