"""Merges requests that are computed together: scoring requests with the same context, and the beams of a search."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

from ..sequences.sequence import Completion, Request, TokenScore


@dataclass(frozen=True, kw_only=True)
class JoinedRequest:
    """A request that computes the scores of several: those at `members` in the original list."""

    request: Request
    members: Rows[int]


def join_requests(requests: Rows[Request], slots: Rows[object] | None = None) -> list[JoinedRequest]:
    """Merges scoring requests with equal context, which compute the same positions, into one with the first one's id.
    Other requests stay alone. `slots`: only requests with equal slots merge."""
    groups: dict[object, list[int]] = {}
    for i, (request, slot) in enumerate(zip(requests, slots or [None] * len(requests), strict=True)):
        scoring = request.scoring
        computed = request.key if scoring is None else (request.prompt_ids, scoring.decoder_ids, slot)
        groups.setdefault(computed, []).append(i)
    joined = list[JoinedRequest]()
    for group in groups.values():
        first = requests[group[0]]
        if len(group) > 1:
            scorings = [each for i in group if (each := requests[i].scoring) is not None]
            last_ids = dict.fromkeys(token for scoring in scorings for token in scoring.last_ids)
            num_positions = max(scoring.num_positions for scoring in scorings)
            scoring = replace(scorings[0], num_positions=num_positions, last_ids=tuple(last_ids))
            first = replace(first, scoring=scoring)
        joined.append(JoinedRequest(request=first, members=group))
    return joined


def member_scores(member: Request, completion: Completion) -> tuple[TokenScore, ...]:
    """Scores of one member of a merged request; empty if it failed."""
    own, joined = member.scoring, completion.request.scoring
    assert own is not None, "not a scoring request"
    assert joined is not None, "not merged from scoring requests"
    return tuple(completion.scores[index] for index in joined.positions_of(own)) if completion.is_ok else ()


def add_hidden_beams(joined: Iterable[JoinedRequest]) -> Iterator[JoinedRequest]:
    """Yields all requests and, after the samples of each prompt, which must be adjacent, its hidden beams."""
    last: JoinedRequest | None = None
    for each in joined:
        if last is not None and last.request.id != each.request.id:
            yield from _hidden_beams(last.request)
        yield each
        last = each
    if last is not None:
        yield from _hidden_beams(last.request)


def _hidden_beams(last: Request) -> Iterator[JoinedRequest]:
    """The beams after the last returned sample."""
    for index in range(last.sample_index + 1, last.num_beams):
        yield JoinedRequest(request=replace(last, sample_index=index, is_returned=False), members=())


def drop_orphaned_beams(indices: Iterable[int], requests: Rows[Request]) -> list[int]:
    """Removes hidden beams from `indices` if no returned beam of their search is in it."""
    remaining = list(indices)
    returned = {requests[i].id for i in remaining if requests[i].is_returned}
    return [i for i in remaining if requests[i].id in returned]


def with_hidden_beams(indices: Iterable[int], requests: Rows[Request]) -> dict[int, None]:
    """`indices` in order, each followed by its hidden beams."""
    extended = dict[int, None]()
    for index in indices:
        extended[index] = None
        while index + 1 < len(requests) and not requests[index + 1].is_returned:
            index += 1
            extended[index] = None
    return extended
