"""Each order is that of the paper it comes from, written down by hand."""

import pytest

from runtime.config.settings import Order
from runtime.plan.schedule.actions import Op
from runtime.plan.schedule.schedule import Schedule, make_schedule
from runtime.plan.schedule.walk import Walk


def lines(schedule: Schedule) -> str:
    return ", ".join(map(str, schedule.cycle))


CGOPIPE = """
# prologue
read 0#0
read 0#1
read 0#2
read 1#0
# cycle
pre 0.0
attend 0.0
pre 0.1
attend 0.1
post 0.0
read 1#1
pre 0.2
attend 0.2
post 0.1
read 1#2
pre 1.0
attend 1.0
post 0.2
free 0
read 0#0
pre 1.1
attend 1.1
post 1.0
read 0#1
pre 1.2
attend 1.2
post 1.1
read 0#2
post 1.2
free 1
read 1#0
"""


def test_cgopipe_is_algorithm_1_of_its_paper() -> None:
    """Two layers, three lanes: turns 0.0 0.1 0.2 1.0 1.1 1.2, written down from the algorithm. The first two turns
    begin; then each turn is finished, one page of the next layer's weights sets out, and the turn after next begins."""
    walk = Walk(num_stages=2, streamed=(0, 1), num_slots=2, num_pages=3, cpu_attention=(0, 1), order=Order.cgopipe)
    assert str(make_schedule(walk, 3)) == CGOPIPE.strip()


def test_cgopipe_with_one_lane_has_nothing_to_overlap() -> None:
    walk = Walk(num_stages=3, streamed=(), num_slots=0, cpu_attention=(1, 2), order=Order.cgopipe)
    assert lines(make_schedule(walk, 1)) == "run 0.0, pre 1.0, attend 1.0, post 1.0, pre 2.0, attend 2.0, post 2.0"


@pytest.mark.parametrize("num_lanes", range(2, 6))
def test_cgopipe_has_two_attentions_begun_whenever_a_turn_goes_on_from_its_own(num_lanes: int) -> None:
    """Its own and the next turn's, but for the last of the pass; and a third is begun before the next one goes on."""
    walk = Walk(num_stages=4, streamed=(), num_slots=0, cpu_attention=(0, 1, 2, 3), order=Order.cgopipe)
    begun = ended = 0
    for action in make_schedule(walk, num_lanes).cycle:
        begun += action.op is Op.attend
        if action.op is Op.post:
            assert begun == min(ended + 2, 4 * num_lanes)
            ended += 1


@pytest.mark.parametrize(("num_pages", "num_lanes"), [(2, 4), (4, 4), (8, 4), (7, 3), (3, 5)])
def test_no_turn_of_cgopipe_begins_more_pages_than_its_share(num_pages: int, num_lanes: int) -> None:
    walk = Walk(num_stages=6, streamed=tuple(range(6)), num_slots=2, num_pages=num_pages, order=Order.cgopipe)
    waiting, most = 0, -(-num_pages // num_lanes)
    for action in make_schedule(walk, num_lanes).cycle:
        waiting = waiting + 1 if action.op is Op.read else 0 if action.op is Op.run else waiting
        assert waiting <= most


FLEXGEN = """
# prologue
read 0#0
read 0#1
read 1#0
# cycle
fetch 0.0
fetch 0.1
run 0.0
sync
store 0.0
fetch 1.0
read 1#1
run 0.1
sync
store 0.1
fetch 1.1
free 0
read 0#0
run 1.0
sync
store 1.0
read 0#1
run 1.1
sync
store 1.1
free 1
read 1#0
"""


def test_flexgen_overlaps_six_activities_in_each_step_and_waits_for_all_behind_it() -> None:
    """Between two barriers: a part of the next layer's weights, KV of the turn before stored and of the next fetched,
    and the turn at hand."""
    walk = Walk(
        num_stages=2,
        streamed=(0, 1),
        num_slots=2,
        num_pages=2,
        offloaded_kv=(0, 1),
        num_kv_slots=2,
        order=Order.flexgen,
    )
    assert str(make_schedule(walk, 2)) == FLEXGEN.strip()


def test_flexgen_waits_for_each_attention() -> None:
    walk = Walk(num_stages=1, streamed=(), num_slots=0, cpu_attention=(0,), order=Order.flexgen)
    assert lines(make_schedule(walk, 2)) == "pre 0.0, attend 0.0, post 0.0, sync, pre 0.1, attend 0.1, post 0.1, sync"


def test_zigzag_computes_beside_attention_but_stays_in_its_stage() -> None:
    walk = Walk(num_stages=2, streamed=(), num_slots=0, cpu_attention=(0,))
    assert lines(make_schedule(walk, 3)) == (
        "pre 0.0, attend 0.0, pre 0.1, attend 0.1, post 0.0, pre 0.2, attend 0.2, post 0.1, post 0.2, "
        "run 1.0, run 1.1, run 1.2"
    )


def test_module_batched_runs_experts_once_behind_all_lanes() -> None:
    walk = Walk(
        num_stages=2, streamed=(), num_slots=0, cpu_attention=(1,), batched_experts=(0, 1), order=Order.module_batched
    )
    assert lines(make_schedule(walk, 2)) == (
        "route 0.0, route 0.1, experts 0, end 0.0, end 0.1, "
        "pre 1.0, attend 1.0, pre 1.1, attend 1.1, route 1.0, route 1.1, experts 1, end 1.0, end 1.1"
    )


@pytest.mark.parametrize("order", Order)
def test_kv_is_fetched_in_the_order_of_turns_as_far_ahead_as_there_are_slots(order: Order) -> None:
    walk = Walk(num_stages=3, streamed=(), num_slots=0, offloaded_kv=(0, 2), num_kv_slots=3, order=order)
    kv = [str(a) for a in make_schedule(walk, 2).cycle if a.op in (Op.fetch, Op.store)]
    assert kv == [
        "fetch 0.0", "fetch 0.1", "fetch 2.0", "store 0.0", "fetch 2.1", "store 0.1", "store 2.0", "store 2.1"
    ]  # fmt: skip
