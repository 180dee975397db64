"""Divides requests into blocks and micro-batches (lanes) of about equal numbers of tokens. Requests that share a prompt
prefix are scheduled together, as in BatchLLM (Zheng et al. 2024). Pure and deterministic. Requests are given by their
index in the planned list."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from .prefixes import SharedPrefix


@dataclass(frozen=True, kw_only=True)
class Block:
    """Requests that are decoded together. `micro_batches`: indices in the planned list of requests."""

    index: int
    micro_batches: tuple[tuple[int, ...], ...]

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(i for micro_batch in self.micro_batches for i in micro_batch)


@dataclass(kw_only=True)
class Group:
    """Requests that stay in one lane. `num_tokens`: number of their KV positions, without a prefix that all of them
    share."""

    members: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, other: "Group") -> None:
        self.members += other.members
        self.num_tokens += other.num_tokens

    def split(self, num_members: int) -> tuple["Group", "Group"]:
        """Splits into the first `num_members` members and the remaining ones, with proportional shares of the
        tokens."""
        num_first = self.num_tokens * num_members // len(self.members)
        return (
            Group(members=self.members[:num_members], num_tokens=num_first),
            Group(members=self.members[num_members:], num_tokens=self.num_tokens - num_first),
        )


def plan_blocks(
    num_tokens: Sequence[int],
    *,
    micro_batch_size: int,
    num_micro_batches: int,
    is_packed: bool,
    prefixes: Sequence[SharedPrefix | None] = (),
    is_continuous: bool = False,
    num_beams: int = 1,
) -> tuple[Block, ...]:
    """Assigns every request to exactly one block. `num_tokens`: KV positions of each request; `prefixes`: longest
    shared prefix of each, or empty. Requests are assigned longest first, equally long ones by index.

    Packed lanes have no padding. Sorted requests are dealt to blocks in serpentine order, so that blocks have about
    equal KV. Padded lanes are as wide as their longest sequence, so requests of similar length stay together.

    Requests that share a prefix stay in one lane if they fit, and whole lanes are dealt to blocks. With
    `is_continuous`, lanes with the same prefix are consecutive instead. With `num_beams`, so many consecutive requests
    are one beam search, and stay in one micro-batch."""
    if num_beams > 1:
        return _plan_beam_blocks(num_tokens, prefixes, micro_batch_size, num_micro_batches, is_packed, num_beams)
    if any(prefixes):
        return _plan_prefix_blocks(
            num_tokens, prefixes, micro_batch_size, num_micro_batches, is_continuous=is_continuous
        )
    order = sorted(range(len(num_tokens)), key=num_tokens.__getitem__, reverse=True)  # stable sort keeps ties in order
    block_size = micro_batch_size * num_micro_batches
    num_blocks = -(-len(order) // block_size)
    block_members: list[list[int]] = [[] for _ in range(num_blocks)]
    for position, i in enumerate(order):
        block_members[_snake_index(position, num_blocks)].append(i)
    blocks: list[Block] = []
    for index in range(num_blocks):
        if is_packed:
            groups = balance(block_members[index], num_tokens, micro_batch_size)
        else:
            members = order[index * block_size : (index + 1) * block_size]
            groups = [members[i : i + micro_batch_size] for i in range(0, len(members), micro_batch_size)]
        blocks.append(Block(index=index, micro_batches=tuple(map(tuple, groups))))
    return tuple(blocks)


def _plan_beam_blocks(
    num_tokens: Sequence[int],
    prefixes: Sequence[SharedPrefix | None],
    micro_batch_size: int,
    num_micro_batches: int,
    is_packed: bool,
    num_beams: int,
) -> tuple[Block, ...]:
    """Makes blocks of whole beam searches. A search counts as one request with the tokens of all its beams."""
    searches = [range(i, min(i + num_beams, len(num_tokens))) for i in range(0, len(num_tokens), num_beams)]
    blocks = plan_blocks(
        [sum(num_tokens[i] for i in beams) for beams in searches],
        micro_batch_size=max(1, micro_batch_size // num_beams),
        num_micro_batches=num_micro_batches,
        is_packed=is_packed,
        prefixes=prefixes[::num_beams],
    )
    return tuple(
        Block(
            index=block.index,
            micro_batches=tuple(tuple(i for search in lane for i in searches[search]) for lane in block.micro_batches),
        )
        for block in blocks
    )


def _plan_prefix_blocks(
    num_tokens: Sequence[int],
    prefixes: Sequence[SharedPrefix | None],
    micro_batch_size: int,
    num_micro_batches: int,
    *,
    is_continuous: bool,
) -> tuple[Block, ...]:
    """Makes blocks of whole lanes, in which requests with the same prefix are together."""
    num_blocks = -(-len(num_tokens) // (micro_batch_size * num_micro_batches))
    num_lanes = num_blocks * -(-len(num_tokens) // (num_blocks * micro_batch_size))
    lanes = group_by_prefix(num_tokens, prefixes, num_lanes=num_lanes, lane_size=micro_batch_size)
    lanes = [lane for lane in sorted(lanes, key=lambda lane: lane.num_tokens, reverse=True) if lane.members]
    block_lanes: list[list[tuple[int, ...]]] = [[] for _ in range(num_blocks)]
    if is_continuous:  # lanes with the same first prefix are consecutive
        lanes_by_root = defaultdict[SharedPrefix | None, list[Group]](list)
        for lane in lanes:
            first = prefixes[lane.members[0]]
            lanes_by_root[[*first.chain][-1] if first is not None else None].append(lane)
        lanes = [lane for same_root in lanes_by_root.values() for lane in same_root]
    for position, lane in enumerate(lanes):
        if is_continuous:
            index = position * min(num_blocks, len(lanes)) // len(lanes)
        else:
            index = _snake_index(position, num_blocks)
        block_lanes[index].append(tuple(lane.members))
    return tuple(Block(index=index, micro_batches=tuple(groups)) for index, groups in enumerate(block_lanes))


def _snake_index(position: int, width: int) -> int:
    """The column of `position` in serpentine order over `width` columns: 0, 1, 2, 2, 1, 0, 0, 1, ..."""
    row, column = divmod(position, width)
    return column if row % 2 == 0 else width - 1 - column


def balance(members: Sequence[int], num_tokens: Sequence[int], micro_batch_size: int) -> list[list[int]]:
    """Divides requests into as few micro-batches as their size allows, by MoE-Lightning's Algorithm 2: each request
    goes to the micro-batch with the fewest tokens that is not full. `members` must be sorted longest first."""
    groups: list[list[int]] = [[] for _ in range(-(-len(members) // micro_batch_size))]
    open_groups = [(0, group) for group in range(len(groups))]  # heap of (tokens, group)
    for member in members:
        total, target = open_groups[0]
        groups[target].append(member)
        if len(groups[target]) < micro_batch_size:
            heapreplace(open_groups, (total + num_tokens[member], target))
        else:
            heappop(open_groups)
    return groups


def group_by_prefix(
    num_tokens: Sequence[int], prefixes: Sequence[SharedPrefix | None], *, num_lanes: int, lane_size: int
) -> list[Group]:
    """Assigns every request to one of `num_lanes` lanes of up to `lane_size` requests; lanes may stay empty.
    `num_tokens`: KV positions of each request, including its prefix. Requests with a common prefix stay in one lane if
    they fit; otherwise they are split evenly among lanes."""
    width = -(-len(num_tokens) // num_lanes)  # average number of requests in a lane, rounded up
    requests_by_prefix = defaultdict[SharedPrefix | None, list[int]](list)
    child_groups = defaultdict[SharedPrefix | None, list[Group]](list)  # prefix -> groups of longer prefixes
    for i, prefix in enumerate(prefixes):
        requests_by_prefix[prefix].append(i)
    chains = dict[SharedPrefix, None]()  # all prefixes and their ancestors
    for prefix in [*requests_by_prefix]:
        while prefix is not None and prefix not in chains:
            chains[prefix] = None
            prefix = prefix.parent
    for prefix in sorted(chains, key=lambda prefix: prefix.num_tokens, reverse=True):  # children before parents
        members, groups = requests_by_prefix.pop(prefix, []), child_groups.pop(prefix, [])
        num_members = len(members) + sum(len(group.members) for group in groups)
        if num_members <= lane_size:
            merged = Group(members=members, num_tokens=sum(num_tokens[i] - prefix.num_tokens for i in members))
            for group in groups:
                merged.add(group)
            groups = [merged]
        else:
            parts = [*groups, *_singletons(members, num_tokens, prefix.num_tokens)]
            groups = _pack_groups(parts, -(-num_members // width), lane_size)
        for group in groups:
            group.num_tokens += prefix.num_tokens - (prefix.parent.num_tokens if prefix.parent is not None else 0)
        child_groups[prefix.parent] += groups
    without_prefix = _singletons(requests_by_prefix[None], num_tokens, 0)
    return _pack_groups([*child_groups[None], *without_prefix], num_lanes, lane_size)


def _singletons(requests: Iterable[int], num_tokens: Sequence[int], num_shared: int) -> list[Group]:
    """A group for each request, without the tokens of a prefix of length `num_shared`."""
    return [Group(members=[i], num_tokens=num_tokens[i] - num_shared) for i in requests]


def _pack_groups(parts: Sequence[Group], num_groups: int, group_size: int) -> list[Group]:
    """Merges parts into `num_groups` groups of up to `group_size` requests, as in MoE-Lightning's Algorithm 2: parts
    with the most requests first, each into the group with the fewest tokens in which it fits. A part that fits into no
    group is split."""
    groups = [Group() for _ in range(num_groups)]
    waiting = defaultdict[int, list[Group]](list)
    for part in parts:
        waiting[len(part.members)].append(part)
    for size in range(max(waiting, default=0), 0, -1):
        open_groups = [(g.num_tokens, i) for i, g in enumerate(groups) if len(g.members) + size <= group_size]
        heapify(open_groups)
        for part in sorted(waiting.pop(size, []), key=lambda part: part.num_tokens, reverse=True):
            if not open_groups:
                smallest = min(groups, key=lambda group: len(group.members))
                part, remainder = part.split(group_size - len(smallest.members))
                smallest.add(part)
                waiting[len(remainder.members)].append(remainder)
                continue
            _, i = open_groups[0]
            groups[i].add(part)
            if len(groups[i].members) + size <= group_size:
                heapreplace(open_groups, (groups[i].num_tokens, i))
            else:
                heappop(open_groups)
    return groups
