"""The rules of slots: what holds weights and KV while a schedule is played, and what may happen to them; and of what
goes from rank to rank."""

from .actions import Action, Op
from .walk import Walk


def broken(action: Action, rule: str) -> ValueError:
    return ValueError(f"'{action}': {rule}")


class WeightSlots:
    """Slots of compute memory and of staging, by stage, with the pages that have been begun to be brought in."""

    def __init__(self, walk: Walk):
        self._walk, self._streamed = walk, frozenset(walk.streamed)
        self._all_pages = frozenset(range(walk.num_pages))
        self._staged: dict[int, set[int]] = {}
        self._present: dict[int, set[int]] = {}
        self._freed: set[int] = set()

    def contents(self) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """A copy, to compare with."""
        staged, present = ({stage: set(pages) for stage, pages in of.items()} for of in (self._staged, self._present))
        return staged, present

    def begin_pass(self) -> None:
        self._freed.clear()

    def end_pass(self) -> None:
        for stage in self._walk.streamed:
            if stage not in self._freed:
                raise broken(Action(Op.free, stage), "missing: the stage keeps its slot beyond the pass")

    def read(self, action: Action) -> None:
        if action.stage in self._walk.in_host:
            raise broken(action, "read, though its weights are in host memory already")
        if self._walk.copies:
            self._bring(action, self._staged, self._walk.num_staging_slots, "staging slot")
        else:
            self._bring(action, self._present, self._walk.num_slots, "slot")

    def copy(self, action: Action) -> None:
        if not self._walk.copies:
            raise broken(action, "the walk copies nothing, compute finds its weights where they are read")
        stage = action.its_stage
        if stage not in self._walk.in_host and not self._staged.get(stage, set()) >= self._pages(action):
            raise broken(action, "copied before it was read")
        self._bring(action, self._present, self._walk.num_slots, "device slot")
        if self._present[stage] == self._all_pages:
            self._staged.pop(stage, None)

    def use(self, action: Action) -> None:
        stage = action.its_stage
        if stage in self._streamed and self._present.get(stage) != self._all_pages:
            count = f"{len(self._present.get(stage, ()))} of {self._walk.num_pages} pages are there"
            raise broken(action, f"used before its weights were brought in, {count}")

    def free(self, action: Action) -> None:
        stage = action.its_stage
        if stage not in self._present:
            raise broken(action, f"freed but not present; in slots are {sorted(self._present)}")
        if stage in self._freed:
            raise broken(action, "freed twice in one pass")
        del self._present[stage]
        self._freed.add(stage)

    def _bring(self, action: Action, slots: dict[int, set[int]], limit: int, kind: str) -> None:
        stage, pages = action.its_stage, self._pages(action)
        if stage not in self._streamed:
            raise broken(action, "the stage is resident and never brought in")
        if stage not in slots and len(slots) >= limit:
            raise broken(action, f"no free {kind}, all {limit} are in use, by stages {sorted(slots)}")
        held = slots.setdefault(stage, set())
        if held & pages:
            raise broken(action, f"brought in twice, pages {sorted(held & pages)} are there already")
        if action.page not in (None, len(held)):
            raise broken(action, f"brought in out of order, page {len(held)} comes next")
        held |= pages

    def _pages(self, action: Action) -> frozenset[int]:
        if action.page is None:
            return self._all_pages
        if action.page not in self._all_pages:
            raise broken(action, f"a stage has pages 0 to {self._walk.num_pages - 1}")
        return frozenset((action.page,))


class KVSlots:
    """Slots of KV, by stage and lane."""

    def __init__(self, walk: Walk):
        self._travelling, self._num_slots = frozenset(walk.travelling), walk.num_kv_slots
        self._held: set[tuple[int, int]] = set()
        self._fetched: set[tuple[int, int]] = set()

    def begin_pass(self) -> None:
        self._fetched.clear()

    def end_pass(self) -> None:
        for stage, lane in sorted(self._held):
            raise broken(Action(Op.store, stage, lane), "missing: its KV slot is not free at the end of the pass")

    def fetch(self, action: Action) -> None:
        key = action.turn
        if key[0] not in self._travelling:
            raise broken(action, "the stage's KV does not travel")
        if key in self._fetched:
            raise broken(action, "fetched twice in one pass")
        if len(self._held) >= self._num_slots:
            raise broken(action, f"no free KV slot, all {self._num_slots} are in use, by {_names(self._held)}")
        self._held.add(key)
        self._fetched.add(key)

    def use(self, action: Action) -> None:
        key = action.turn
        if key[0] in self._travelling and key not in self._held:
            raise broken(action, "the lane enters before its KV was fetched")

    def store(self, action: Action) -> None:
        key = action.turn
        if key not in self._held:
            raise broken(action, "stored without having been fetched")
        self._held.remove(key)


class Neighbours:
    """Hidden states of lanes that come from the rank before, and go to the one behind."""

    def __init__(self, walk: Walk, num_lanes: int):
        self._walk, self._num_lanes = walk, num_lanes
        self._received, self._sent = set[int](), set[int]()

    def begin_pass(self) -> None:
        self._received.clear()
        self._sent.clear()

    def end_pass(self) -> None:
        if self._walk.sends and (left := {*range(self._num_lanes)} - self._sent):
            raise broken(Action(Op.send, self._walk.num_stages - 1, min(left)), "missing: the rank behind waits for it")

    def receive(self, action: Action) -> None:
        if not self._walk.receives or action.stage != self._walk.first_stage:
            raise broken(action, "no hidden states come into this stage from another rank")
        self._once(action, self._received)

    def enter(self, action: Action) -> None:
        is_first = self._walk.receives and action.stage == self._walk.first_stage
        if is_first and action.lane not in self._received:
            raise broken(action, "the lane enters before its hidden states have come")

    def send(self, action: Action) -> None:
        if not self._walk.sends or action.stage != self._walk.num_stages - 1:
            raise broken(action, "no hidden states go from this stage to another rank")
        self._once(action, self._sent)

    def _once(self, action: Action, lanes: set[int]) -> None:
        _, lane = action.turn
        if lane in lanes:
            raise broken(action, "twice in one pass")
        lanes.add(lane)


def _names(keys: set[tuple[int, int]]) -> str:
    return ", ".join(f"{stage}.{lane}" for stage, lane in sorted(keys))
