"""In front of an accelerator many experts run over all micro-batches together, where nobody says otherwise."""

from dataclasses import replace

import pytest

from runtime.config.settings import OffloadConfig, Order, PolicyConfig, RuntimeConfig, Tier
from runtime.errors import BudgetError
from runtime.plan.placement.defaults import MANY_EXPERTS
from runtime.plan.placement.ledger import LIBRARY_BYTES
from runtime.plan.placement.placement import Budgets
from runtime.plan.planner import RunPlan, plan_run
from runtime.plan.shape.model import ModelShape
from runtime.units import GIB, MIB
from tests.toy import sizes_of, toy_mixture, toy_shape

MANY, FEW, DENSE = toy_mixture(num_experts=MANY_EXPERTS), toy_mixture(num_experts=MANY_EXPERTS // 2), toy_shape()
HERE = Budgets(host_bytes=GIB, device_bytes=None)
WITH_DEVICE = Budgets(host_bytes=GIB, device_bytes=GIB)


def planned(shape: ModelShape, budgets: Budgets, order: Order | None = None) -> RunPlan:
    return plan_run(
        shape,
        RuntimeConfig(offload=OffloadConfig(tier=Tier.none), policy=PolicyConfig(schedule=order)),
        budgets,
        sizes_of([30] * 256),
    )


@pytest.mark.parametrize(
    ("shape", "budgets", "said", "expected"),
    [
        (MANY, WITH_DEVICE, None, Order.module_batched),
        (MANY, WITH_DEVICE, Order.zigzag, Order.zigzag),
        (MANY, HERE, None, Order.zigzag),
        (FEW, WITH_DEVICE, None, Order.zigzag),
        (FEW, WITH_DEVICE, Order.module_batched, Order.module_batched),
        (DENSE, WITH_DEVICE, None, Order.zigzag),
    ],
)
def test_many_experts_in_front_of_a_device_are_asked_once_for_all(
    shape: ModelShape, budgets: Budgets, said: Order | None, expected: Order
) -> None:
    plan = planned(shape, budgets, said)
    assert plan.policy.schedule is expected
    for walk in (plan.placement.walk, plan.placement.decode_walk):
        assert walk.order is expected
        assert bool(walk.batched_experts) is (expected is Order.module_batched)


def test_what_fits_only_with_each_micro_batch_by_itself_is_not_refused() -> None:
    """Lanes that wait at their experts take memory."""
    shape, found = replace(MANY, hidden_size=64 * MANY.hidden_size), list[tuple[bool, Order | None]]()
    for mib in range(112, 124, 2):
        budgets = Budgets(host_bytes=GIB, device_bytes=LIBRARY_BYTES + mib * MIB)
        try:
            planned(shape, budgets, Order.module_batched)
            fits = True
        except BudgetError:
            fits = False
        try:
            found.append((fits, planned(shape, budgets).policy.schedule))
        except BudgetError:
            assert not fits
    assert (False, Order.zigzag) in found
    assert (True, Order.module_batched) in found
    assert (True, Order.zigzag) not in found


def test_where_it_lets_in_fewer_sequences_each_micro_batch_is_by_itself() -> None:
    shape, budgets = replace(MANY, hidden_size=64 * MANY.hidden_size), WITH_DEVICE
    together, apart, usual = (planned(shape, budgets, order) for order in (Order.module_batched, Order.zigzag, None))
    assert together.block_size < apart.block_size == usual.block_size
    assert usual.policy.schedule is Order.zigzag
