"""On a device that takes time, whatever reads, copies and computes does so side by side, as the simulator says."""

import pytest

from runtime.config.settings import Order, Prefetch, Tier
from tests.overlap import PREFETCHES, RATIOS, Case, Outcome, outcome

MOST = 1 / 0.95  # of what the busiest of disk, link and compute takes alone
NEAR = 0.05
CASES = [(order, prefetch) for order in Order for prefetch in PREFETCHES]


def as_promised(found: Outcome) -> bool:
    return abs(found.measured / found.simulated - 1) <= NEAR


@pytest.mark.dealt
@pytest.mark.parametrize(("order", "prefetch"), CASES, ids=str)
def test_a_pass_takes_as_long_as_disk_link_or_compute_alone(order: Order, prefetch: dict[str, object]) -> None:
    """Whether the host runs ahead of the device or waits for each turn of it."""
    for index, seconds in enumerate((RATIOS[0], *RATIOS)):
        case = Case(order=order, is_in_step=index % 2 == 0, **prefetch)  # type: ignore[arg-type]
        found = outcome(case, seconds)
        assert found.measured <= MOST * found.bound, f"{case}: {found}"
        assert as_promised(found), f"{case}: {found}"


@pytest.mark.parametrize("order", Order)
def test_so_does_one_whose_weights_are_in_host_memory_or_half_of_them_in_the_devices(order: Order) -> None:
    for tier, resident_layers in ((Tier.cpu, 0), (Tier.nvme, 12)):
        case = Case(order=order, kind=Prefetch.lookahead, depth=2, tier=tier, resident_layers=resident_layers)
        found = outcome(case, RATIOS[0])
        assert found.measured <= MOST * found.bound, f"{case}: {found}"
        assert as_promised(found), f"{case}: {found}"
