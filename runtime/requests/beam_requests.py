"""The beams of each request that is searched: as many requests as it has beams, of which the first are its samples."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import replace

from ..sequences.sequence import Request
from .scoring import Joined


def with_beams(joined: Iterable[Joined]) -> Iterator[Joined]:
    """All of them, and behind the last sample of each prompt the beams that nobody asked for, which serve no member.
    The samples of a prompt are neighbours."""
    last: Joined | None = None
    for each in joined:
        if last is not None and last.request.id != each.request.id:
            yield from _unasked(last.request)
        yield each
        last = each
    if last is not None:
        yield from _unasked(last.request)


def _unasked(last: Request) -> Iterator[Joined]:
    """The beams behind the last sample."""
    for index in range(last.sample_index + 1, last.num_beams):
        yield Joined(request=replace(last, sample_index=index, is_returned=False), members=())


def with_whole_searches(left: Iterable[int], requests: Rows[Request]) -> list[int]:
    """Those of `left` that are to be computed: beams that nobody asked for only beside those that somebody did."""
    known = list(left)
    asked = {requests[i].id for i in known if requests[i].is_returned}
    return [i for i in known if requests[i].id in asked]


def whole_searches(places: Iterable[int], requests: Rows[Request]) -> dict[int, None]:
    """`places` in their order, each followed by the beams that nobody asked for behind it."""
    found = dict[int, None]()
    for place in places:
        found[place] = None
        while place + 1 < len(requests) and not requests[place + 1].is_returned:
            place += 1
            found[place] = None
    return found
