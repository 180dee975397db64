"""The actions of a pass, as values that print and parse back.

read 7 | read 7#2   start reading weights, disk -> host: the whole stage, or page 2 of the walk's `num_pages`
copy 7 | copy 7#2   start copying weights, host -> device, after the read is done (accelerators only)
free 7              the stage's slot may be reused after its compute is done
run 7.3             lane 3 runs all of stage 7, attention and experts included
pre 7.3             lane 3 enters stage 7 and stops before attention
attend 7.3          start the attention of lane 3 on the CPU's workers, which hold its KV cache
post 7.3            wait for the attention; lane 3 runs the rest of the stage
route 7.3           lane 3 enters stage 7, or continues after `attend`, and stops before the experts
experts 7           run each expert of stage 7 once, over the tokens of all lanes stopped there
end 7.3             lane 3 continues after the experts and runs the rest of the stage
fetch 7.3           start moving KV of lane 3 in stage 7 from its tier to a KV slot
store 7.3           start moving the KV that stage 7 added back to the tier; then the KV slot is free
recv 7.3            receive the hidden states of lane 3 from the previous rank, before stage 7
send 7.3            start sending the hidden states of lane 3 after stage 7 to the next rank
sync                wait for all transfers and attention started before
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


WEIGHT_OPS = frozenset({Op.read, Op.copy, Op.free})  # ops that move weights; the others work on lanes
PAGED_OPS = frozenset({Op.read, Op.copy})
STAGE_OPS = frozenset({Op.read, Op.copy, Op.free, Op.experts})  # ops of a whole stage, not of a lane
_LINE = re.compile(r"([a-z]+)(?: (\d+)(?:\.(\d+)|#(\d+))?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One action."""

    op: Op
    stage: int | None  # None: sync
    lane: int | None = None  # None: op of a whole stage
    page: int | None = None  # None: all pages

    def __str__(self) -> str:
        stage = "" if self.stage is None else f" {self.stage}"
        lane = "" if self.lane is None else f".{self.lane}"
        page = "" if self.page is None else f"#{self.page}"
        return self.op.value + stage + lane + page

    @property
    def stage_index(self) -> int:
        """`stage`, for any op except `sync`."""
        assert self.stage is not None, f"'{self}' has no stage"
        return self.stage

    @property
    def turn(self) -> tuple[int, int]:
        """Stage and lane, for ops that have a lane."""
        assert self.lane is not None, f"'{self}' has no lane"
        return self.stage_index, self.lane


def parse_action(text: str) -> Action:
    """Inverse of `str(action)`. Raises ValueError with the text."""
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
