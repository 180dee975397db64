"""Merges scoring requests with the same context into one request, and adds the hidden beams of a beam search.

A beam search with `num_beams` computes that many sequences per prompt, one request each. Hidden beams are those beyond
the samples that are returned."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

from ..sequences.sequence import Completion, Request, TokenScore


@dataclass(frozen=True, kw_only=True)
class JoinedRequest:
    """A request to compute. `members`: indices of the original requests that get its results; none for a hidden
    beam."""

    request: Request
    members: Rows[int]


def join_requests(requests: Rows[Request], slots: Rows[object] | None = None) -> list[JoinedRequest]:
    """Merges scoring requests with equal input tokens, such as the targets of one prompt that differ in the last token.
    The merged request has the id of its first member. Other requests are not merged. `slots`: one value per request;
    only requests with equal values are merged."""
    groups: dict[object, list[int]] = {}  # what is computed -> indices of requests
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
    """Selects the scores of one member from the completion of a merged request; empty if it failed."""
    own, joined = member.scoring, completion.request.scoring
    assert own is not None, "not a scoring request"
    assert joined is not None, "not merged from scoring requests"
    return tuple(completion.scores[index] for index in joined.positions_of(own)) if completion.is_ok else ()


def add_hidden_beams(joined: Iterable[JoinedRequest]) -> Iterator[JoinedRequest]:
    """Yields all requests, and after the last sample of each prompt its hidden beams. The samples of a prompt must be
    adjacent in `joined`."""
    last: JoinedRequest | None = None
    for each in joined:
        if last is not None and last.request.id != each.request.id:
            yield from _hidden_beams(last.request)
        yield each
        last = each
    if last is not None:
        yield from _hidden_beams(last.request)


def _hidden_beams(last: Request) -> Iterator[JoinedRequest]:
    """Yields requests for the beams after `last`, the last returned sample of a prompt."""
    for index in range(last.sample_index + 1, last.num_beams):
        yield JoinedRequest(request=replace(last, sample_index=index, is_returned=False), members=())


def drop_orphaned_beams(indices: Iterable[int], requests: Rows[Request]) -> list[int]:
    """Removes hidden beams from `indices` if `indices` contains no returned beam of the same search."""
    remaining = list(indices)
    returned = {requests[i].id for i in remaining if requests[i].is_returned}
    return [i for i in remaining if requests[i].id in returned]


def with_hidden_beams(indices: Iterable[int], requests: Rows[Request]) -> dict[int, None]:
    """Adds, after each of `indices` in `requests`, the indices of the hidden beams that follow it. The values of the
    dict are unused: it is an ordered set."""
    extended = dict[int, None]()
    for index in indices:
        extended[index] = None
        while index + 1 < len(requests) and not requests[index + 1].is_returned:
            index += 1
            extended[index] = None
    return extended
