"""Schedules print and parse back, never overfill a ring, and all lanes pass a stage before any enters the next."""

from itertools import product

import pytest

from runtime.errors import ConfigError
from runtime.plan.schedule import (
    Action,
    Op,
    Schedule,
    Walk,
    check_schedule,
    make_schedule,
    parse_action,
    parse_schedule,
)

NUM_STAGES = 9
STREAMED = {
    "all": tuple(range(NUM_STAGES)),
    "layers": tuple(range(1, 8)),
    "spread": (1, 2, 4, 5, 7),
    "one": (4,),
    "none": (),
    "behind the encoder": (4, 5, 7),
}
FIRST = {"behind the encoder": 4}  # where a pass begins, if not at stage 0
SLOTS = {"off": (1, 1), "lookahead 1": (2, 1), "lookahead 3": (4, 1), "block 2": (4, 2), "block 3": (6, 3)}
ROADS = {"disk": (True, False), "disk, link": (True, True), "link": (False, True)}


def walk_of(streamed: str, slots: str, road: str) -> Walk:
    stages, (num_slots, block), (reads, copies) = STREAMED[streamed], SLOTS[slots], ROADS[road]
    block = block if len(stages) > block else 1
    staging = (2 if block == 1 else block) if reads and copies else 0
    return Walk(
        num_stages=NUM_STAGES,
        streamed=stages,
        num_slots=min(num_slots, len(stages)),
        num_staging_slots=min(staging, len(stages)),
        reads=reads,
        copies=copies,
        block=block,
        first_stage=FIRST.get(streamed, 0),
    )


WALKS = [pytest.param(walk_of(*keys), id=" - ".join(keys)) for keys in product(STREAMED, SLOTS, ROADS)]
PLAIN = Walk(num_stages=3, streamed=(1,), num_slots=1)
RING = Walk(num_stages=3, streamed=(0, 1, 2), num_slots=2)
STAGED = Walk(num_stages=2, streamed=(0, 1), num_slots=1, num_staging_slots=1, copies=True)


@pytest.mark.parametrize("num_lanes", [1, 2, 5])
@pytest.mark.parametrize("walk", WALKS)
def test_every_generated_schedule_obeys_the_rules(walk: Walk, num_lanes: int) -> None:
    check_schedule(make_schedule(walk, num_lanes), walk, num_lanes, num_passes=4)


@pytest.mark.parametrize("walk", WALKS)
def test_a_schedule_prints_and_parses_back(walk: Walk) -> None:
    schedule = make_schedule(walk, 3)
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize("walk", WALKS)
def test_every_hop_of_a_stage_happens_once_a_pass_and_none_without_need(walk: Walk) -> None:
    cycle = make_schedule(walk, 2).cycle
    for op, exists in ((Op.read, walk.reads), (Op.copy, walk.copies), (Op.free, True)):
        assert sorted(a.stage for a in cycle if a.op is op) == (list(walk.streamed) if exists else [])


@pytest.mark.parametrize("walk", WALKS)
def test_all_lanes_pass_a_stage_before_any_enters_the_next(walk: Walk) -> None:
    runs = [(a.stage, a.lane) for a in make_schedule(walk, 3).cycle if a.op is Op.run]
    assert runs == [(stage, lane) for stage in range(walk.first_stage, NUM_STAGES) for lane in range(3)]


@pytest.mark.parametrize(("slots", "ahead"), [("lookahead 1", 1), ("lookahead 3", 3)])
def test_lookahead_runs_its_depth_ahead(slots: str, ahead: int) -> None:
    """While stage i is computed, the reads of the next `depth` stages have begun."""
    schedule = make_schedule(walk_of("all", slots, "disk"), 1)
    begun = len(schedule.prologue)
    for action in schedule.cycle:
        if action.op is Op.run:
            assert begun == action.stage + 1 + ahead
        begun += action.op is Op.read


@pytest.mark.parametrize(
    "action",
    [Action(Op.read, 0), Action(Op.copy, 12), Action(Op.run, 7, 3), Action(Op.run, 0, 0), Action(Op.free, 7)],
    ids=str,
)
def test_an_action_prints_and_parses_back(action: Action) -> None:
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "read", "run 7", "read 7.3", "run 7.", "run .3", "run -1.0", "fly 7", "read seven", "free 1 2"]
)
def test_what_is_no_action_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="not an action") as error:
        parse_action(text)
    assert repr(text) in str(error.value)


BROKEN = {
    "read into a full ring": (RING, "read 0; read 1; read 2", "", "'read 2'.*no free slot, all 2"),
    "run before read": (PLAIN, "", "run 0.0; run 1.0; read 1; free 1; run 2.0", "'run 1.0'.*before its weights"),
    "freed twice": (PLAIN, "", "run 0.0; read 1; run 1.0; free 1; free 1; run 2.0", "'free 1'.*not present"),
    "missing run": (PLAIN, "", "run 0.0; read 1; free 1; run 2.0", r"pass 0.*missing runs: \[\(1, 0\)\]"),
    "wrong order": (PLAIN, "", "read 1; run 1.0; run 0.0; free 1; run 2.0", "pass 0.*out of order"),
    "run twice": (PLAIN, "", "run 0.0; read 1; run 1.0; run 1.0; free 1; run 2.0", "pass 0.*out of order"),
    "never freed": (PLAIN, "", "run 0.0; read 1; run 1.0; run 2.0", "'read 1'.*no free slot"),
    "copied before it was read": (STAGED, "", "copy 0", "'copy 0'.*before it was read"),
    "staging overflows": (STAGED, "read 0; read 1", "", "'read 1'.*no free slot, all 1"),
    "device slots overflow": (STAGED, "read 0; copy 0; read 1; copy 1", "", "'copy 1'.*no free device slot, all 1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_schedule_is_refused_naming_the_action_and_the_rule(name: str) -> None:
    walk, prologue, cycle, message = BROKEN[name]
    actions = [tuple(parse_action(text) for text in part.split("; ") if text) for part in (prologue, cycle)]
    with pytest.raises(ValueError, match=message):
        check_schedule(Schedule(prologue=actions[0], cycle=actions[1]), walk, 1)


def test_more_slots_than_streamed_stages_are_refused_with_the_keys() -> None:
    with pytest.raises(
        ConfigError, match=r"3 slots for 2 streamed stages: lower prefetch\.depth or prefetch\.block_layers"
    ):
        make_schedule(Walk(num_stages=4, streamed=(1, 2), num_slots=3), 1)
