"""The checker refuses what would go wrong on lanes, by the action and the rule in plain words."""

import time
from statistics import median

import pytest

from runtime.config.settings import Order
from runtime.plan.schedule.actions import parse_action
from runtime.plan.schedule.check import check_schedule
from runtime.plan.schedule.schedule import Schedule, make_schedule
from runtime.plan.schedule.walk import Walk

PLAIN = Walk(num_stages=3, streamed=(1,), num_slots=1)
RING = Walk(num_stages=3, streamed=(0, 1, 2), num_slots=2)
STAGED = Walk(num_stages=2, streamed=(0, 1), num_slots=1, num_staging_slots=1, copies=True)
LINKED = Walk(num_stages=2, streamed=(0, 1), num_slots=1, in_host=frozenset((0, 1)), copies=True)
PAGED = Walk(num_stages=1, streamed=(0,), num_slots=1, num_pages=3)
PAGED_STAGED = Walk(num_stages=1, streamed=(0,), num_slots=1, num_pages=3, num_staging_slots=1, copies=True)
DECODER = Walk(num_stages=3, first_stage=1, streamed=(), num_slots=0)
RESIDENT = Walk(num_stages=2, streamed=(), num_slots=0)
STOPPING = Walk(num_stages=2, streamed=(), num_slots=0, cpu_attention=(0, 1), batched_experts=(1,))
BARRED = Walk(num_stages=2, streamed=(), num_slots=0, cpu_attention=(0, 1), order=Order.flexgen)
TRAVELLING = Walk(num_stages=2, streamed=(), num_slots=0, offloaded_kv=(0, 1), num_kv_slots=1)
STREAMED = Walk(num_stages=2, streamed=(0,), num_slots=1, cpu_attention=(0,), batched_experts=(0,))

# walk, number of lanes, prologue, cycle
LEGAL = {
    "pages one behind the other": (PAGED, 1, "", "read 0#0, read 0#1, read 0#2, run 0.0, free 0"),
    "a whole stage for its pages": (PAGED, 1, "", "read 0, run 0.0, free 0"),
    "lanes stop where they may or run": (
        STOPPING, 2, "", "run 0.0, pre 0.1, attend 0.1, post 0.1, pre 1.0, attend 1.0, route 1.0, route 1.1, "
        "experts 1, end 1.1, end 1.0",
    ),
    "experts run lane by lane where they may be batched": (STOPPING, 1, "", "run 0.0, run 1.0"),
    "experts run lane by lane after attention": (
        STOPPING, 1, "", "run 0.0, pre 1.0, attend 1.0, post 1.0",
    ),
    "KV is stored once attention is over": (
        Walk(num_stages=1, streamed=(), num_slots=0, batched_experts=(0,), offloaded_kv=(0,), num_kv_slots=1), 1, "",
        "fetch 0.0, route 0.0, store 0.0, experts 0, end 0.0",
    ),
}  # fmt: skip
BROKEN = {
    "read into a full ring": (RING, 1, "read 0, read 1, read 2", "", "'read 2': no free slot, all 2"),
    "staging overflows": (STAGED, 1, "read 0, read 1", "", "'read 1': no free staging slot, all 1"),
    "device slots overflow": (STAGED, 1, "read 0, copy 0, read 1, copy 1", "", "'copy 1': no free device slot, all 1"),
    "read twice": (RING, 1, "read 0, read 0", "", "'read 0': loaded twice"),
    "page read twice": (PAGED, 1, "read 0#0, read 0#1, read 0#1", "", r"'read 0#1': loaded twice: pages \[1\]"),
    "page before its turn": (PAGED, 1, "read 0#0, read 0#2", "", "'read 0#2': loaded out of order, page 1 is"),
    "last page first": (PAGED, 1, "read 0#2", "", "'read 0#2': loaded out of order, page 0 is"),
    "page copied before its turn": (
        PAGED_STAGED, 1, "read 0, copy 0#1", "", "'copy 0#1': loaded out of order, page 0 is",
    ),
    "page that is none": (PAGED, 1, "read 0#3", "", "'read 0#3': a stage has pages 0 to 2"),
    "resident stage read": (PLAIN, 1, "read 0", "", "'read 0': loaded, but the stage is resident"),
    "read without a disk": (LINKED, 1, "read 0", "", "'read 0': read, but its weights are already in host memory"),
    "copied without a device": (PLAIN, 1, "read 1, copy 1", "", "'copy 1': the walk has no copies"),
    "copied before it was read": (STAGED, 1, "", "copy 0", "'copy 0': copied before it was read"),
    "run before read": (PLAIN, 1, "", "run 0.0, run 1.0", "'run 1.0': used before its weights were loaded, 0 of 1"),
    "run before the last page": (
        PAGED, 1, "", "read 0#0, read 0#1, run 0.0", "'run 0.0': used before its weights .* 2 of 3 pages",
    ),
    "freed twice": (PLAIN, 1, "", "run 0.0, read 1, run 1.0, free 1, free 1", "'free 1': freed but not loaded"),
    "freed with nothing gained": (
        PLAIN, 1, "", "run 0.0, read 1, run 1.0, free 1, read 1, free 1", "'free 1': freed twice in one pass",
    ),
    "freed before a lane came": (
        PLAIN, 2, "read 1", "run 0.0, run 0.1, run 1.0, free 1", "'free 1': freed before all lanes .*lane 1 is",
    ),
    "freed under an attention": (
        STREAMED, 2, "read 0", "run 0.0, pre 0.1, attend 0.1, free 0",
        "'free 0': freed before .*lane 1 is at the running attention of stage 0",
    ),
    "freed under experts": (
        STREAMED, 1, "read 0", "route 0.0, experts 0, free 0", "'free 0': .*lane 0 is after the experts",
    ),
    "never freed": (PLAIN, 1, "", "run 0.0, read 1, run 1.0, run 2.0", "'free 1': missing"),
    "missing run": (PLAIN, 1, "", "run 0.0, read 1, free 1, run 2.0", "'free 1': .*lane 0 is before stage 1"),
    "missing end of a pass": (RESIDENT, 1, "", "run 0.0", "'run 1.0': missing: .*lane 0 before stage 1"),
    "wrong order": (PLAIN, 1, "", "read 1, run 1.0, run 0.0", "'run 1.0': out of order, lane 0 is before stage 0"),
    "run twice": (PLAIN, 1, "", "run 0.0, run 0.0", "'run 0.0': out of order, lane 0 is before stage 1"),
    "stage that is none": (RESIDENT, 1, "", "run 2.0", "'run 2.0': no such stage, the walk has stages 0 to 1"),
    "read of a stage that is none": (PLAIN, 1, "read 3", "", "'read 3': no such stage, .* 0 to 2"),
    "experts of a stage that is none": (STOPPING, 1, "", "experts 7", "'experts 7': no such stage"),
    "stage in front of the walk": (DECODER, 1, "", "run 0.0", "'run 0.0': no such stage, the walk has stages 1 to 2"),
    "more attentions than there is memory for": (
        STOPPING, 3, "", "pre 0.0, attend 0.0, pre 0.1, attend 0.1, pre 0.2, attend 0.2",
        r"'attend 0.2': policy.schedule=zigzag has 2 attentions running at most, lanes \[0, 1\] are",
    ),
    "two attentions where none runs ahead": (
        BARRED, 2, "", "pre 0.0, attend 0.0, pre 0.1, attend 0.1", "'attend 0.1': policy.schedule=flexgen has 1 ",
    ),
    "lane that is none": (RESIDENT, 2, "", "run 0.2", "'run 0.2': no such lane, there are 2"),
    "lanes in a prologue": (RESIDENT, 2, "run 0.0", "", "'run 0.0': no such lane, .*a prologue has none"),
    "post without attention": (STOPPING, 1, "", "pre 0.0, post 0.0", "'post 0.0': .*lane 0 is at the attention"),
    "attention without a lane": (STOPPING, 1, "", "attend 0.0", "'attend 0.0': out of order, lane 0 is before"),
    "attention never begun": (STOPPING, 1, "", "pre 0.0", "'attend 0.0': missing: .*lane 0 at the attention"),
    "attention never awaited": (STOPPING, 1, "", "pre 0.0, attend 0.0", "'post 0.0': missing: .*running attention"),
    "stop where there is none": (RESIDENT, 1, "", "pre 0.0", "'pre 0.0': lanes do not stop at the attention"),
    "routing where there is none": (STOPPING, 1, "", "route 0.0", "'route 0.0': lanes do not stop at the experts"),
    "experts before all lanes": (
        STOPPING, 2, "", "run 0.0, run 0.1, route 1.0, experts 1", "'experts 1': run before .*lane 1 is before",
    ),
    "experts twice": (
        STOPPING, 1, "", "run 0.0, route 1.0, experts 1, experts 1", "'experts 1': .*lane 0 is after the experts",
    ),
    "end without experts": (STOPPING, 1, "", "run 0.0, route 1.0, end 1.0", "'end 1.0': .*is at the experts"),
    "experts forgotten": (STOPPING, 1, "", "run 0.0, route 1.0", "'experts 1': missing: .*at the experts"),
    "KV slots overflow": (TRAVELLING, 2, "", "fetch 0.0, fetch 0.1", "'fetch 0.1': no free KV slot, all 1 .*by 0.0"),
    "entered without KV": (TRAVELLING, 1, "", "run 0.0", "'run 0.0': the lane enters before its KV was fetched"),
    "KV fetched twice": (
        TRAVELLING, 1, "", "fetch 0.0, run 0.0, store 0.0, fetch 0.0", "'fetch 0.0': fetched twice in one pass",
    ),
    "KV that stays": (RESIDENT, 1, "", "fetch 0.0", "'fetch 0.0': the stage's KV is not offloaded"),
    "KV stored under its attention": (
        TRAVELLING, 1, "", "fetch 0.0, store 0.0", "'store 0.0': stored before its attention is done",
    ),
    "KV stored without a fetch": (RESIDENT, 1, "", "run 0.0, store 0.0", "'store 0.0': stored without"),
    "KV never stored": (TRAVELLING, 1, "", "fetch 0.0, run 0.0, store 0.0, fetch 1.0, run 1.0", "'store 1.0': missing"),
}  # fmt: skip


def schedule_of(prologue: str, cycle: str) -> Schedule:
    before, each = (tuple(parse_action(line) for line in text.split(", ") if line) for text in (prologue, cycle))
    return Schedule(prologue=before, cycle=each)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_schedule_is_refused_naming_the_action_and_the_rule(name: str) -> None:
    walk, num_lanes, prologue, cycle, message = BROKEN[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        check_schedule(schedule_of(prologue, cycle), walk, num_lanes)


@pytest.mark.parametrize("name", LEGAL)
def test_what_breaks_no_rule_passes(name: str) -> None:
    walk, num_lanes, prologue, cycle = LEGAL[name]
    check_schedule(schedule_of(prologue, cycle), walk, num_lanes)


@pytest.mark.parametrize("num_lanes", [0, -1])
def test_a_pass_without_lanes_is_refused(num_lanes: int) -> None:
    with pytest.raises(ValueError, match=f"{num_lanes} lanes"):
        check_schedule(schedule_of("", ""), RESIDENT, num_lanes)


def test_what_goes_wrong_only_in_a_later_pass_is_found() -> None:
    """What is read once too often lies there when the second pass reads it."""
    walk = Walk(num_stages=2, streamed=(0, 1), num_slots=1, num_staging_slots=1, copies=True)
    fine = "read 0, copy 0, run 0.0, free 0, read 1, copy 1, run 1.0, free 1"
    check_schedule(schedule_of("", fine), walk, 1)
    with pytest.raises(ValueError, match="'read 0': loaded twice"):
        check_schedule(schedule_of("", f"{fine}, read 0"), walk, 1)


@pytest.mark.parametrize("order", Order)
def test_sixty_stages_and_sixteen_lanes_are_scheduled_and_checked_at_once(order: Order) -> None:
    """Continuous admission changes the number of lanes in mid-run. About 20 ms; the limit is for slow machines."""
    layers = tuple(range(1, 61))
    walk = Walk(
        num_stages=62, streamed=layers, num_slots=2, num_staging_slots=2, copies=True, num_pages=16, order=order,
        cpu_attention=layers, batched_experts=layers if order is Order.module_batched else (),
        offloaded_kv=layers, num_kv_slots=4,
    )  # fmt: skip
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        check_schedule(make_schedule(walk, 16), walk, 16)
        seconds.append(time.process_time() - begin)
    assert median(seconds) < 0.2
