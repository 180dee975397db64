"""The lines that a pass is made of, as values that print and parse back.

read 7 | read 7#2   disk -> host, begins: the whole stage, or page 2 of the walk's `num_pages`
copy 7 | copy 7#2   host -> device, begins once its read is done (accelerators only)
free 7              the stage's slot may be reused when its compute has finished
run 7.3             lane 3 passes stage 7 from end to end, attention and experts where it meets them
pre 7.3             lane 3 enters stage 7 and stops at its attention
attend 7.3          that attention begins on the CPU's workers, beside the KV
post 7.3            waits for the attention; lane 3 goes on to the end of the stage
route 7.3           lane 3 enters stage 7, or goes on from its attention, and stops at its experts
experts 7           each expert of stage 7 runs once, over the tokens of all lanes, which stopped there
end 7.3             lane 3 goes on from the experts to the end of the stage
fetch 7.3           KV of lane 3 in stage 7: from its tier to a KV slot, begins
recv 7.3            hidden states of lane 3 come from the rank before, into stage 7
send 7.3            what lane 3 has become behind stage 7 goes to the rank behind, begins
store 7.3           what stage 7 added to it: back to the tier, begins; the KV slot is free once that is done
sync                waits for everything that has begun
"""

import re
from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    read = "read"
    copy = "copy"
    free = "free"
    run = "run"
    pre = "pre"
    attend = "attend"
    post = "post"
    route = "route"
    experts = "experts"
    end = "end"
    fetch = "fetch"
    store = "store"
    recv = "recv"
    send = "send"
    sync = "sync"


WEIGHT_OPS = frozenset({Op.read, Op.copy, Op.free})  # what moves weights; the other ops serve lanes
PAGED_OPS = frozenset({Op.read, Op.copy})
STAGE_OPS = frozenset({Op.read, Op.copy, Op.free, Op.experts})  # the others but sync are of one lane in a stage
_LINE = re.compile(r"([a-z]+)(?: (\d+)(?:\.(\d+)|#(\d+))?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """`stage` is None for `sync` alone, `lane` where the op is of a whole stage, `page` where it is of all pages."""

    op: Op
    stage: int | None
    lane: int | None = None
    page: int | None = None

    def __str__(self) -> str:
        stage = "" if self.stage is None else f" {self.stage}"
        lane = "" if self.lane is None else f".{self.lane}"
        page = "" if self.page is None else f"#{self.page}"
        return self.op.value + stage + lane + page

    @property
    def stage_index(self) -> int:
        """`stage`, of any op but `sync`."""
        assert self.stage is not None, f"'{self}' is of no stage"
        return self.stage

    @property
    def turn(self) -> tuple[int, int]:
        """Stage and lane, of an op that is of both."""
        assert self.lane is not None, f"'{self}' is of no lane"
        return self.stage_index, self.lane


def parse_action(text: str) -> Action:
    """The inverse of `str(action)`; raises ValueError naming the text."""
    match = _LINE.fullmatch(text.strip())
    if match is None or match[1] not in Op.__members__:
        raise _invalid_action(text)
    op = Op[match[1]]
    stage, lane, page = (None if number is None else int(number) for number in match.groups()[1:])
    has_stage, has_lane = op is not Op.sync, op is not Op.sync and op not in STAGE_OPS
    if (stage is not None, lane is not None) != (has_stage, has_lane) or (page is not None and op not in PAGED_OPS):
        raise _invalid_action(text)
    return Action(op, stage, lane, page)


def _invalid_action(text: str) -> ValueError:
    return ValueError(f"not an action: {text!r}; actions look like 'read 7', 'copy 7#2', 'run 7.3', 'sync'")
