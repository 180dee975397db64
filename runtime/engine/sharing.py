"""The lanes of a block, with rows in them that compute what several of its sequences begin with."""

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from ..batching.prefixes import Sharing, shared_prefixes
from ..cache.shared import SharedPages
from ..plan.placement.memory import PAGE_TOKENS
from .sequence import Request, Sequence


@dataclass(frozen=True, kw_only=True)
class SharingRule:
    """How far prefixes may be shared. `among_lanes`: not only in each. `in_pass`: those who go on from one may begin in
    the pass that computes it. `whole_pages`: a page that is not full cannot be copied."""

    among_lanes: bool
    in_pass: bool
    whole_pages: bool


def with_prefixes(
    groups: Rows[Rows[int]], requests: Rows[Request], running: Mapping[int, Sequence], rule: SharingRule
) -> list[list[Sequence]]:
    """Lanes of those of each group that are running, and before them, in the first lane that needs it, each prefix that
    they go on from. Where prompts are cut follows from all members of `groups`, running or not. Mutates `running`."""
    if rule.among_lanes:
        return _lanes(groups, requests, running, rule)
    return [lane for group in groups for lane in _lanes([group], requests, running, rule)]


def _lanes(
    groups: Rows[Rows[int]], requests: Rows[Request], running: Mapping[int, Sequence], rule: SharingRule
) -> list[list[Sequence]]:
    members = [i for group in groups for i in group]
    prompts = [requests[i].prompt_ids for i in members]
    most = [_most_shared(requests[i]) for i in members]
    sharing = shared_prefixes(prompts, most, multiple=PAGE_TOKENS if rule.whole_pages else 1)
    place_of = {i: place for place, i in enumerate(members)}
    opened = dict[int, SharedPages]()
    lanes = list[list[Sequence]]()
    for group in groups:
        lanes.append([])
        for i in group:
            if i in running:
                prefix = sharing.of[place_of[i]]
                running[i].behind = _opened(prefix, sharing, prompts, rule, opened, lanes[-1])
                lanes[-1].append(running[i])
    return lanes


def _opened(
    place: int | None,
    sharing: Sharing,
    prompts: Rows[tuple[int, ...]],
    rule: SharingRule,
    opened: dict[int, SharedPages],
    lane: list[Sequence],
) -> SharedPages | None:
    """The prefix for one more user; at the first one it enters the lane, behind those that it goes on from."""
    if place is None:
        return None
    if place not in opened:
        prefix = sharing.prefixes[place]
        behind = _opened(prefix.parent, sharing, prompts, rule, opened, lane)
        opened[place] = SharedPages(num_tokens=prefix.num_tokens, in_pass=rule.in_pass)
        tokens = prompts[prefix.source][: prefix.num_tokens]
        request = Request(id="", prompt_ids=tokens, max_new_tokens=0)
        lane.append(Sequence(request=request, fills=opened[place], behind=behind))
    opened[place].num_users += 1
    return opened[place]


def _most_shared(request: Request) -> int:
    """Tokens of its prompt that it needs not compute itself: somebody has to be asked for logits."""
    return len(request.prompt_ids) - max(1, request.num_scored)
