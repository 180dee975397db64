"""The text of a run's schedules reads back as what the engine plays."""

import pytest

from runtime.config.settings import Attention, OffloadConfig, Order, PolicyConfig, PolicyKind, RuntimeConfig, Tier
from runtime.plan.placement.placement import Budgets
from runtime.plan.planner import RunPlan, plan_run
from runtime.plan.schedule.actions import Action, parse_action
from runtime.plan.schedule.schedule import make_schedule
from runtime.plan.timeline import MAX_ACTIONS, schedule_text
from runtime.units import GIB
from tests.toy import sizes_of, toy_shape


def plan(order: Order = Order.zigzag, *, num_encoder_layers: int = 0, num_requests: int = 9) -> RunPlan:
    attention = Attention.cpu if order is Order.cgopipe else Attention.device
    config = RuntimeConfig(
        offload=OffloadConfig(tier=Tier.nvme, resident_layers=2),
        policy=PolicyConfig(
            kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=3, schedule=order, attention=attention
        ),
    )
    shape = toy_shape(num_encoder_layers=num_encoder_layers)
    return plan_run(shape, config, Budgets(host_bytes=GIB), sizes_of([20] * num_requests))


def actions_of(text: str) -> list[Action]:
    return [parse_action(line) for line in text.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("order", Order)
def test_every_line_reads_back_and_nothing_is_missing(order: Order) -> None:
    found = plan(order)
    assert [len(block.micro_batches) for block in found.blocks] == [3, 2], "the first block is not like the last"
    prefill, decode = (make_schedule(walk, 3) for walk in (found.placement.walk, found.placement.decode_walk))
    first = [] if prefill.prologue == decode.prologue else decode.prologue
    assert actions_of(schedule_text(found)) == [*prefill.prologue, *prefill.cycle, *first, *decode.cycle]


@pytest.mark.parametrize(("num_encoder_layers", "num_headings"), [(0, 3), (2, 4)])
def test_passes_that_begin_elsewhere_have_a_beginning_of_their_own(num_encoder_layers: int, num_headings: int) -> None:
    text = schedule_text(plan(num_encoder_layers=num_encoder_layers))
    assert sum(line.startswith("# ") for line in text.splitlines()) == num_headings


@pytest.mark.parametrize("max_actions", [0, 1, 10, 50])
def test_a_long_one_is_cut_and_says_so(max_actions: int) -> None:
    whole = actions_of(schedule_text(plan()))
    assert len(whole) < MAX_ACTIONS
    text = schedule_text(plan(), max_actions=max_actions)
    assert actions_of(text) == whole[:max_actions]
    assert text.splitlines()[-1] == f"# {len(whole) - max_actions:,} of {len(whole):,} actions are omitted"
    assert schedule_text(plan(), max_actions=len(whole)) == schedule_text(plan())
