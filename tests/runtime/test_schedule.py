"""Schedules of every order over every kind of walk pass the checker, and print and parse back."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from runtime.config.settings import Order
from runtime.errors import ConfigError
from runtime.plan.schedule.actions import Action, Op, parse_action
from runtime.plan.schedule.check import check_schedule
from runtime.plan.schedule.schedule import Schedule, make_schedule
from runtime.plan.schedule.walk import Walk

NUM_STAGES = 9
LAYERS = tuple(range(1, 8))
STREAMED = {
    "all": tuple(range(NUM_STAGES)),
    "layers": LAYERS,
    "spread": (1, 2, 4, 5, 7),
    "one": (4,),
    "none": (),
    "behind the encoder": (4, 5, 7),
}
FIRST = {"behind the encoder": 4}  # where a pass begins, if not at stage 0
SLOTS = {"off": (1, 1), "lookahead 1": (2, 1), "lookahead 3": (4, 1), "block 2": (4, 2), "block 3": (6, 3)}
ROADS = {  # whether there is a link, and one of how many stages host memory holds
    "disk": (False, 0),
    "disk, link": (True, 0),
    "link": (True, 1),
    "link, some from disk": (True, 2),
}
STOPS: dict[str, dict[str, tuple[int, ...]]] = {
    "nothing stops": {},
    "attending": {"cpu_attention": LAYERS},
    "some attending, some routing": {"cpu_attention": (1, 2, 4, 6, 7), "batched_experts": (2, 3, 6)},
    "travelling": {"offloaded_kv": (1, 3, 4, 7)},
    "all": {"cpu_attention": LAYERS, "batched_experts": LAYERS, "offloaded_kv": LAYERS},
}
MIN_SLOTS = {Order.flexgen: 2, Order.cgopipe: 2}


def walk_of(streamed: str, slots: str, road: str) -> Walk:
    stages, (num_slots, block), (copies, every) = STREAMED[streamed], SLOTS[slots], ROADS[road]
    block = block if len(stages) > block else 1
    in_host = frozenset(stages[::every] if every else ())
    staging = (2 if block == 1 else block) if copies else 0
    return Walk(
        num_stages=NUM_STAGES,
        streamed=stages,
        num_slots=min(num_slots, len(stages)),
        num_staging_slots=min(staging, len(stages) - len(in_host)),
        in_host=in_host,
        copies=copies,
        block=block,
        first_stage=FIRST.get(streamed, 0),
    )


def walks(order: Order, stops: str, streamed: str) -> Iterator[tuple[Walk, int]]:
    """All slots over all roads for one lane to five, with one page or three: every other one each."""
    for index, (slots, road, num_lanes) in enumerate(product(SLOTS, ROADS, range(1, 6))):
        walk, num_pages = walk_of(streamed, slots, road), 1 if index % 2 else 3
        if walk.num_slots >= min(MIN_SLOTS.get(order, 0), len(walk.streamed)):
            num_kv_slots = min(2, num_lanes) + num_lanes % 2
            pages = replace(walk, order=order, num_pages=num_pages, num_kv_slots=num_kv_slots)
            yield replace(pages, **STOPS[stops]), num_lanes


def parsed(text: str) -> Schedule:
    """The inverse of `str(schedule)`."""
    prologue, _, cycle = text.partition("# cycle")
    lines = [[line for line in part.splitlines() if line and not line.startswith("#")] for part in (prologue, cycle)]
    return Schedule(prologue=tuple(map(parse_action, lines[0])), cycle=tuple(map(parse_action, lines[1])))


def computed(schedule: Schedule) -> list[Action]:
    others = {Op.read, Op.copy, Op.free, Op.fetch, Op.store, Op.sync}
    return [action for action in schedule.cycle if action.op not in others]


@pytest.mark.dealt
@pytest.mark.parametrize("streamed", STREAMED)
@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("order", Order)
def test_every_order_over_every_walk_is_legal_and_parses_back(order: Order, stops: str, streamed: str) -> None:
    for walk, num_lanes in walks(order, stops, streamed):
        schedule = make_schedule(walk, num_lanes)
        check_schedule(schedule, walk, num_lanes, num_passes=4)
        assert parsed(str(schedule)) == schedule


@pytest.mark.dealt(most=8)
@pytest.mark.parametrize("streamed", STREAMED)
@pytest.mark.parametrize("order", Order)
def test_every_page_takes_every_hop_once_a_pass_and_none_without_need(order: Order, streamed: str) -> None:
    for walk, num_lanes in walks(order, "all", streamed):
        cycle = make_schedule(walk, num_lanes).cycle
        pages = [None] if walk.num_pages == 1 else list(range(walk.num_pages))
        for op, stages in ((Op.read, walk.from_disk), (Op.copy, walk.streamed if walk.copies else ())):
            taken = {(a.stage, a.page) for a in cycle if a.op is op}
            assert taken == set(product(stages, pages))
            assert len(taken) == sum(a.op is op for a in cycle)
        assert [a.stage for a in cycle if a.op is Op.free] == list(walk.streamed)


@pytest.mark.parametrize("streamed", STREAMED)
@pytest.mark.parametrize("order", Order)
def test_without_stops_every_order_runs_all_lanes_through_a_stage_before_the_next(order: Order, streamed: str) -> None:
    for walk, num_lanes in walks(order, "nothing stops", streamed):
        runs = [Action(Op.run, stage, lane) for stage in walk.stages for lane in range(num_lanes)]
        assert computed(make_schedule(walk, num_lanes)) == runs


def test_with_one_slot_nothing_is_read_ahead() -> None:
    walk = Walk(num_stages=3, streamed=(0, 2), num_slots=1, num_staging_slots=1, copies=True)
    schedule = make_schedule(walk, 1)
    assert schedule.prologue == ()
    assert lines(schedule) == "read 0, copy 0, run 0.0, free 0, run 1.0, read 2, copy 2, run 2.0, free 2"


@pytest.mark.parametrize(("slots", "ahead"), [("lookahead 1", 1), ("lookahead 3", 3)])
def test_lookahead_runs_its_depth_ahead(slots: str, ahead: int) -> None:
    """While stage i is computed, the reads of the next `depth` stages have begun."""
    schedule = make_schedule(walk_of("all", slots, "disk"), 1)
    begun = len(schedule.prologue)
    for action in schedule.cycle:
        if action.op is Op.run:
            assert begun == action.stage_index + 1 + ahead
        begun += action.op is Op.read


def test_a_block_is_brought_in_while_the_one_before_it_is_computed() -> None:
    walk = Walk(num_stages=4, streamed=(0, 1, 2, 3), num_slots=4, num_staging_slots=2, copies=True, block=2)
    schedule = make_schedule(walk, 1)
    assert ", ".join(map(str, schedule.prologue)) == "read 0, read 1, copy 0, copy 1, read 2, read 3, copy 2, copy 3"
    assert lines(schedule) == (
        "run 0.0, free 0, run 1.0, free 1, read 0, read 1, copy 0, copy 1, "
        "run 2.0, free 2, run 3.0, free 3, read 2, read 3, copy 2, copy 3"
    )


def lines(schedule: Schedule) -> str:
    return ", ".join(map(str, schedule.cycle))


REFUSED = {
    "more slots than streamed stages": (
        Walk(num_stages=4, streamed=(1, 2), num_slots=3),
        r"3 slots for 2 streamed stages: lower prefetch\.depth or prefetch\.block_layers",
    ),
    "cgopipe without a slot to read ahead": (
        Walk(num_stages=4, streamed=(1, 2), num_slots=1, order=Order.cgopipe),
        r"1 slots, but policy\.schedule=cgopipe .* takes 2: .*prefetch\.depth",
    ),
    "flexgen without a slot to read ahead": (
        Walk(num_stages=4, streamed=(1, 2), num_slots=1, order=Order.flexgen),
        r"1 slots, but policy\.schedule=flexgen .* takes 2: .*prefetch\.depth",
    ),
    "no slot for KV": (
        Walk(num_stages=4, streamed=(), num_slots=0, offloaded_kv=(1,)),
        r"kv\.num_slots=0: policy\.schedule=zigzag .* 1 lanes .*set kv\.num_slots=1",
    ),
    "one slot for KV of two lanes": (
        Walk(num_stages=4, streamed=(), num_slots=0, offloaded_kv=(1,), cpu_attention=(1,), num_kv_slots=1),
        r"kv\.num_slots=1: policy\.schedule=zigzag .* 2 lanes .*set kv\.num_slots=2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_too_many_or_too_few_slots_are_refused_with_the_key(name: str) -> None:
    walk, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make_schedule(walk, 2)
