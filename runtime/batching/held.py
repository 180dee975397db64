"""Prefixes that are kept while sequences come and go, for a pass that is being planned. Pure.

A prefix is opened with the first that goes on from it. It is kept as long as somebody seated does, or somebody in line
who may soon enter; where pages run short, those go first that nobody seated needs, the one wanted last before others.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .prefixes import SharedPrefix, SharingRule

ALL_LANES = -1
Place = tuple[SharedPrefix, int]  # a prefix, and the lane that shares it: ALL_LANES where all do
Seated = Iterable[tuple[SharedPrefix | None, int]]  # what each goes on from, and its lane
Line = Iterable[SharedPrefix | None]  # what those go on from that may soon enter
FAR = 1 << 62  # nobody in line


@dataclass(frozen=True, kw_only=True)
class HeldPrefix:
    """`lane` computes it; `num_cached` of its tokens are stored, those of its parent among them."""

    prefix: SharedPrefix
    lane: int
    num_cached: int


def places_of(prefix: SharedPrefix | None, lane: int, rule: SharingRule) -> list[Place]:
    """Where a sequence of the lane finds what it goes on from, the shortest first."""
    where = ALL_LANES if rule.among_lanes else lane
    return [(each, where) for each in prefix.chain][::-1] if prefix is not None else []


def places_of_all(seated: Seated, rule: SharingRule) -> set[Place]:
    """Where any of them does."""
    found = set[Place]()
    for prefix, lane in seated:
        where = ALL_LANES if rule.among_lanes else lane
        while prefix is not None and (prefix, where) not in found:
            found.add((prefix, where))
            prefix = prefix.parent
    return found


class Kept:
    """The prefixes that are held, those opened last behind the others. `dropped` are those that no longer are."""

    def __init__(self, held: Iterable[HeldPrefix], rule: SharingRule, page_tokens: int):
        self._rule, self._page_tokens = rule, page_tokens
        self._held = {(each.prefix, ALL_LANES if rule.among_lanes else each.lane): each for each in held}
        self.dropped: list[Place] = []

    def __iter__(self) -> Iterator[tuple[Place, HeldPrefix]]:
        return iter(self._held.items())

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, place: Place) -> HeldPrefix:
        return self._held[place]

    def open(self, prefix: SharedPrefix | None, lane: int) -> None:
        """Has the lane compute what a sequence of it goes on from, as far as nobody does."""
        for place in self._missing(prefix, lane):
            found = place[0]
            self._held[place] = HeldPrefix(prefix=found, lane=lane, num_cached=self._rule.num_shared(found.parent))

    def _missing(self, prefix: SharedPrefix | None, lane: int) -> list[Place]:
        return [place for place in places_of(prefix, lane, self._rule) if place not in self._held]

    def missing_tokens(self, prefix: SharedPrefix | None, lane: int) -> int:
        return sum(map(self._num_tokens, self._missing(prefix, lane)))

    def missing_pages(self, prefix: SharedPrefix | None, lane: int) -> int:
        return sum(map(self._num_pages, self._missing(prefix, lane)))

    @property
    def promised_pages(self) -> int:
        """That those on their way still take."""
        return sum(self._num_pages(place) - self._stored_pages(place) for place in self._held)

    def may_begin(self, prefix: SharedPrefix | None, lane: int, filled: Mapping[Place, int]) -> bool:
        """Whether a sequence of the lane may go on from the prefix in a pass that adds `filled` to those held."""
        if prefix is None:
            return True
        place = prefix, ALL_LANES if self._rule.among_lanes else lane
        held, num_tokens = self._held[place], self._rule.num_shared(prefix)
        in_pass = filled.get(place, 0) if self._rule.in_pass and held.lane <= lane else 0
        return held.num_cached + in_pass == num_tokens

    def drop_unwanted(self, seated: Seated, line: Line) -> int:
        """Drops those that neither anybody seated nor anybody in line goes on from; returns the pages that are free."""
        idle = self._unneeded(seated)
        wanted = _turns(line) if idle else {}  # mostly nobody is idle, and the line is long
        return sum(self._drop(place) for place in self._in_order(idle, wanted) if place[0] not in wanted)

    def drop_one(self, seated: Seated, line: Line) -> int | None:
        """Drops the one that is wanted last of those that nobody seated goes on from; returns the pages that are free,
        None where there is none."""
        idle = self._in_order(self._unneeded(seated), _turns(line))
        return self._drop(idle[0]) if idle else None

    def make_room(self, num_pages: int, seated: Seated, line: Line) -> int | None:
        """Drops as many, in the same order, as have `num_pages`, stored or promised, together; returns the pages
        that they come to, None where all of them come to too few, and none is dropped."""
        idle, found = self._in_order(self._unneeded(seated), _turns(line)), 0
        if sum(map(self._num_pages, idle)) < num_pages:
            return None
        for place in idle:
            if found >= num_pages:
                break
            found += self._num_pages(place)
            self._drop(place)
        return found

    def _unneeded(self, seated: Seated) -> list[Place]:
        """Those that nobody seated needs."""
        needed = places_of_all(seated, self._rule) if self._held else ()
        return [place for place in self._held if place not in needed]

    @staticmethod
    def _in_order(idle: Iterable[Place], turns: Mapping[SharedPrefix, int]) -> list[Place]:
        """The one that is wanted last first; a prefix before its parent."""
        return sorted(idle, key=lambda place: (turns.get(place[0], FAR), place[0].num_tokens), reverse=True)

    def _drop(self, place: Place) -> int:
        num_pages = self._stored_pages(place)
        del self._held[place]
        self.dropped.append(place)
        return num_pages

    def _num_tokens(self, place: Place) -> int:
        return self._rule.num_shared(place[0]) - self._rule.num_shared(place[0].parent)

    def _num_pages(self, place: Place) -> int:
        return self._num_tokens(place) // self._page_tokens

    def _stored_pages(self, place: Place) -> int:
        num_own = self._held[place].num_cached - self._rule.num_shared(place[0].parent)
        return -(-num_own // self._page_tokens)


def _turns(line: Line) -> dict[SharedPrefix, int]:
    """When somebody in line goes on from it first."""
    found = dict[SharedPrefix, int]()
    for turn, prefix in enumerate(line):
        for each in prefix.chain if prefix is not None and prefix not in found else ():
            found.setdefault(each, turn)
    return found
