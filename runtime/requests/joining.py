"""Requests that are computed together: those that ask for scores behind the same tokens become one, and those that are
searched stand beside the beams of theirs that nobody asked for.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

from ..sequences.sequence import Completion, Request, TokenScore


@dataclass(frozen=True, kw_only=True)
class JoinedRequest:
    """A request that brings the scores of several: those at `members` of the list that was joined."""

    request: Request
    members: Rows[int]


def join_requests(requests: Rows[Request], slots: Rows[object] | None = None) -> list[JoinedRequest]:
    """Requests that ask for scores behind the same tokens become one, under the first one's name: what they compute is
    the same, and their last tokens are read off the same logits. One that generates stays by itself. `slots`: one of
    each, where only those with the same may become one."""
    groups: dict[object, list[int]] = {}
    for i, (request, slot) in enumerate(zip(requests, slots or [None] * len(requests), strict=True)):
        scoring = request.scoring
        computed = request.key if scoring is None else (request.prompt_ids, scoring.decoder_ids, slot)
        groups.setdefault(computed, []).append(i)
    found = list[JoinedRequest]()
    for group in groups.values():
        first = requests[group[0]]
        if len(group) > 1:
            scorings = [each for i in group if (each := requests[i].scoring) is not None]
            last_ids = dict.fromkeys(token for scoring in scorings for token in scoring.last_ids)
            num_positions = max(scoring.num_positions for scoring in scorings)
            scoring = replace(scorings[0], num_positions=num_positions, last_ids=tuple(last_ids))
            first = replace(first, scoring=scoring)
        found.append(JoinedRequest(request=first, members=group))
    return found


def member_scores(member: Request, completion: Completion) -> tuple[TokenScore, ...]:
    """The scores of one of the requests whose joined request has come to `completion`: none where it failed."""
    own, whole = member.scoring, completion.request.scoring
    assert own is not None, "its tokens are scored"
    assert whole is not None, "it was joined of scored ones"
    return tuple(completion.scores[place] for place in whole.positions_of(own)) if completion.is_ok else ()


def add_hidden_beams(joined: Iterable[JoinedRequest]) -> Iterator[JoinedRequest]:
    """All of them, and behind the last sample of each prompt the beams that nobody asked for, which serve no member.
    The samples of a prompt are neighbours."""
    last: JoinedRequest | None = None
    for each in joined:
        if last is not None and last.request.id != each.request.id:
            yield from _hidden_beams(last.request)
        yield each
        last = each
    if last is not None:
        yield from _hidden_beams(last.request)


def _hidden_beams(last: Request) -> Iterator[JoinedRequest]:
    """The beams behind the last sample."""
    for index in range(last.sample_index + 1, last.num_beams):
        yield JoinedRequest(request=replace(last, sample_index=index, is_returned=False), members=())


def drop_orphaned_beams(left: Iterable[int], requests: Rows[Request]) -> list[int]:
    """Those of `left` that are to be computed: beams that nobody asked for only beside those that somebody did."""
    known = list(left)
    asked = {requests[i].id for i in known if requests[i].is_returned}
    return [i for i in known if requests[i].id in asked]


def with_hidden_beams(places: Iterable[int], requests: Rows[Request]) -> dict[int, None]:
    """`places` in their order, each followed by the beams that nobody asked for behind it."""
    found = dict[int, None]()
    for place in places:
        found[place] = None
        while place + 1 < len(requests) and not requests[place + 1].is_returned:
            place += 1
            found[place] = None
    return found
