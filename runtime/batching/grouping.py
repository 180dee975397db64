"""Sequences that begin alike, kept in one lane as far as they fit: a pure function of sizes, prefixes and lengths.

BatchLLM (Zheng et al. 2024) schedules groups that share a prefix together. Here a group that is larger than a lane is
cut into lanes that are alike, and one that is smaller shares a lane with others.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from .prefixes import SharedPrefix


@dataclass(kw_only=True)
class Group:
    """Sequences of one lane. `num_tokens`: KV positions that they hold together, without those of the prefix that the
    whole group is behind."""

    members: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, other: "Group") -> None:
        self.members += other.members
        self.num_tokens += other.num_tokens

    def parted(self, num_members: int) -> tuple["Group", "Group"]:
        """The first of its members and the others, each with its share of the tokens."""
        taken = self.num_tokens * num_members // len(self.members)
        return (
            Group(members=self.members[:num_members], num_tokens=taken),
            Group(members=self.members[num_members:], num_tokens=self.num_tokens - taken),
        )


def grouped(
    num_tokens: Sequence[int], prefixes: Sequence[SharedPrefix | None], *, num_lanes: int, lane_size: int
) -> list[Group]:
    """Every sequence in one of `num_lanes` lanes of up to `lane_size`, some of which may stay empty. `num_tokens`: of
    each sequence, its prefix included. A group that fits a lane stays whole; a larger one is cut into lanes that are no
    fuller than all would be if sequences were spread evenly."""
    width = -(-len(num_tokens) // num_lanes)
    rows, below = defaultdict[SharedPrefix | None, list[int]](list), defaultdict[SharedPrefix | None, list[Group]](list)
    for i, prefix in enumerate(prefixes):
        rows[prefix].append(i)
    for prefix in _longest_first(rows):
        own, groups = rows.pop(prefix, []), below.pop(prefix, [])
        count = len(own) + sum(len(group.members) for group in groups)
        if count <= lane_size:
            groups = [_one(own, groups, num_tokens, prefix.num_tokens)]
        else:
            parts = [*groups, *_alone(own, num_tokens, prefix.num_tokens)]
            groups = _joined(parts, -(-count // width), lane_size)
        for group in groups:
            group.num_tokens += prefix.num_tokens - (prefix.parent.num_tokens if prefix.parent is not None else 0)
        below[prefix.parent] += groups
    return _joined([*below[None], *_alone(rows[None], num_tokens, 0)], num_lanes, lane_size)


def _alone(rows: Iterable[int], num_tokens: Sequence[int], num_shared: int) -> list[Group]:
    return [Group(members=[i], num_tokens=num_tokens[i] - num_shared) for i in rows]


def _one(rows: list[int], groups: Iterable[Group], num_tokens: Sequence[int], num_shared: int) -> Group:
    """All of them together."""
    found = Group(members=rows, num_tokens=sum(num_tokens[i] for i in rows) - len(rows) * num_shared)
    for group in groups:
        found.add(group)
    return found


def _longest_first(prefixes: Iterable[SharedPrefix | None]) -> list[SharedPrefix]:
    """All of them and those that they begin with, each in front of its parent."""
    found = dict[SharedPrefix, None]()
    for prefix in dict.fromkeys(prefixes):
        while prefix is not None and prefix not in found:
            found[prefix] = None
            prefix = prefix.parent
    return sorted(found, key=lambda prefix: prefix.num_tokens, reverse=True)


def _joined(parts: Sequence[Group], num_groups: int, most: int) -> list[Group]:
    """The parts in so many groups of up to `most` sequences: those of most sequences first, each into the group with
    the fewest tokens that has room, as in MoE-Lightning's Algorithm 2. A part for which none has room is taken apart.
    """
    groups = [Group() for _ in range(num_groups)]
    waiting = defaultdict[int, list[Group]](list)
    for part in parts:
        waiting[len(part.members)].append(part)
    for size in range(max(waiting, default=0), 0, -1):
        with_room = [(g.num_tokens, i) for i, g in enumerate(groups) if len(g.members) + size <= most]
        heapify(with_room)
        for part in sorted(waiting.pop(size, []), key=lambda part: part.num_tokens, reverse=True):
            if not with_room:
                roomiest = min(groups, key=lambda group: len(group.members))
                part, rest = part.parted(most - len(roomiest.members))
                roomiest.add(part)
                waiting[len(rest.members)].append(rest)
                continue
            _, i = with_room[0]
            groups[i].add(part)
            if len(groups[i].members) + size <= most:
                heapreplace(with_room, (groups[i].num_tokens, i))
            else:
                heappop(with_room)
    return groups
