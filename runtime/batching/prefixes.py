"""Finds shared prefixes of prompts, and decides how long their KV stays cached. Pure.

The prompts of a run form a trie, as in BatchLLM (Zheng et al. 2024). Inner nodes that save enough tokens become
prefixes. A prefix may have a shorter one as its parent. The result depends only on the prompts, so a resumed run shares
the same prefixes.

The users of a prefix are the requests whose prompts begin with it. The first user opens the prefix, which means that it
is computed. A prefix is retained while running or waiting requests need it. If KV pages run short, prefixes without
running users are dropped, beginning with the one that is needed last."""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# Minimum number of tokens of a prefix after its parent: one page. A prefix adds at most one partial page, so sharing
# never takes more pages than not sharing.
MIN_PREFIX_TOKENS = 16
TOKEN_BYTES = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedPrefix:
    """The first `num_tokens` tokens of several prompts. `parent`: the longest shared prefix that is shorter, if any."""

    num_tokens: int
    parent: "SharedPrefix | None" = None

    @property
    def chain(self) -> "Iterator[SharedPrefix]":
        """This prefix and its ancestors, longest first."""
        prefix: SharedPrefix | None = self
        while prefix is not None:
            yield prefix
            prefix = prefix.parent


@dataclass(frozen=True, kw_only=True)
class SharingRule:
    """What sharing is possible. `among_lanes`: between the lanes (micro-batches) of a block, not only within one.
    `in_pass`: users of a prefix may start in the pass that computes it. `page_tokens`: page size if only whole pages
    can be shared, else 1."""

    among_lanes: bool
    in_pass: bool = True
    page_tokens: int = 1

    def num_shared(self, prefix: SharedPrefix | None) -> int:
        """Number of tokens of the prefix that are shared; 0 without a prefix."""
        return prefix.num_tokens // self.page_tokens * self.page_tokens if prefix is not None else 0

    def sharing_groups(self, groups: Sequence[Sequence[int]]) -> list[Sequence[Sequence[int]]]:
        """Divides the lanes of a block into groups within which prefixes are shared. A lane is a list of requests."""
        return [groups] if self.among_lanes else [[group] for group in groups]


WITHIN_LANES = SharingRule(among_lanes=False)


@dataclass(frozen=True, kw_only=True)
class PrefixSharing:
    """The prefixes that are shared within a subset of the run's prompts. `prefixes`: the longest prefix of each prompt.
    `parents`: prefix -> its parent, shorter prefixes first."""

    prefixes: Sequence[SharedPrefix | None]
    parents: Mapping[SharedPrefix, SharedPrefix | None]

    @staticmethod
    def from_prefixes(prefixes: Sequence[SharedPrefix | None]) -> "PrefixSharing":
        """Selects the prefixes that are useful for this subset. A prefix is useless if only one prompt of the subset
        has it, or if all prompts that have it continue with the same longer prefix. `prefixes`: for each prompt of the
        subset, its longest prefix in the whole run."""
        ends, counts = Counter(prefixes), Counter[SharedPrefix]()
        ends.pop(None, None)
        for prefix, count in ends.items():
            for ancestor in prefix.chain if prefix is not None else ():
                counts[ancestor] += count
        # Positive for a prefix at which prompts diverge: some have no longer prefix, or they have different longer
        # ones.
        branches = Counter(ends)
        for prefix, count in counts.items():
            if prefix.parent is not None:
                branches[prefix.parent] = max(branches[prefix.parent], 1 if count < counts[prefix.parent] else 0)
        shared = [prefix for prefix, count in counts.items() if count > 1 and branches[prefix]]
        shared.sort(key=lambda prefix: prefix.num_tokens)
        candidates = dict.fromkeys(shared)
        nearest = {prefix: _nearest_candidate(prefix, candidates) for prefix in (None, *ends)}
        return PrefixSharing(
            prefixes=[nearest[prefix] for prefix in prefixes],
            parents={prefix: _nearest_candidate(prefix.parent, candidates) for prefix in shared},
        )

    def num_spared(self, rule: SharingRule = WITHIN_LANES) -> int:
        """Number of prompt tokens that sharing saves."""
        computed = (rule.num_shared(prefix) - rule.num_shared(parent) for prefix, parent in self.parents.items())
        return sum(map(rule.num_shared, self.prefixes)) - sum(computed)


def num_spared(
    blocks: Iterable[Sequence[Sequence[int]]], prefixes: Sequence[SharedPrefix | None], rule: SharingRule
) -> int:
    """Number of prompt tokens that sharing saves in a run of these blocks. A block is a list of lanes, and a lane a
    list of requests."""
    if not prefixes:
        return 0
    parts = (part for groups in blocks for part in rule.sharing_groups(groups))
    return sum(
        PrefixSharing.from_prefixes([prefixes[i] for group in part for i in group]).num_spared(rule) for part in parts
    )


def _nearest_candidate(prefix: SharedPrefix | None, candidates: Mapping[SharedPrefix, None]) -> SharedPrefix | None:
    """The longest of the prefix and its ancestors that is in `candidates`."""
    return next((each for each in prefix.chain if each in candidates), None) if prefix is not None else None


@dataclass(kw_only=True)
class _Node:
    """An inner node of the trie: the sorted prompts [begin, end) have their first `depth` tokens in common."""

    depth: int
    begin: int
    end: int = 0
    children: list["_Node"] = field(default_factory=list)


def shared_prefixes(prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[SharedPrefix | None]:
    """Finds the longest shared prefix of each prompt, within the first `limits[i]` tokens of prompt i."""
    heads = [array("i", prompt[:limit]).tobytes() for prompt, limit in zip(prompts, limits, strict=True)]
    order = sorted(range(len(heads)), key=heads.__getitem__)
    prefixes = list[SharedPrefix | None]([None] * len(heads))
    waiting: list[tuple[_Node, SharedPrefix | None]] = [(_trie([heads[i] for i in order]), None)]
    while waiting:
        node, prefix = waiting.pop()
        if node.depth - (prefix.num_tokens if prefix is not None else 0) >= MIN_PREFIX_TOKENS:
            prefix = SharedPrefix(num_tokens=node.depth, parent=prefix)
            for index in range(node.begin, node.end):
                prefixes[order[index]] = prefix
        waiting += [(child, prefix) for child in node.children]
    return prefixes


def _trie(heads: Sequence[bytes]) -> _Node:
    """Builds the inner nodes of the trie of sorted prompts. Compares each prompt with the one before it."""
    root = _Node(depth=0, begin=0)
    path = [root]  # the nodes that contain the current prompt, by depth; their ends are not known yet
    for index in range(1, len(heads)):
        # Close the nodes that are deeper than what this prompt has in common with the previous one. A new node begins
        # at `begin`: where the last closed node began, or at the previous prompt.
        depth, begin = _num_common(heads[index - 1], heads[index]), index - 1
        while path[-1].depth > depth:
            closed = path.pop()
            closed.end, begin = index, closed.begin
            if path[-1].depth < depth:
                path.append(_Node(depth=depth, begin=begin))
            path[-1].children.append(closed)
        if path[-1].depth < depth:
            path.append(_Node(depth=depth, begin=begin))
    while len(path) > 1:
        closed = path.pop()
        closed.end = len(heads)
        path[-1].children.append(closed)
    root.end = len(heads)
    return root


def _num_common(first: bytes, second: bytes) -> int:
    """Length of the common prefix in tokens, by bisection; 0 if shorter than `MIN_PREFIX_TOKENS`."""
    min_bytes = MIN_PREFIX_TOKENS * TOKEN_BYTES
    if first[:min_bytes] != second[:min_bytes]:
        return 0
    low, high = 0, min(len(first), len(second)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if first[low * TOKEN_BYTES : middle * TOKEN_BYTES] == second[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


ALL_LANES = -1
PrefixKey = tuple[SharedPrefix, int]  # a prefix, and the lane in which it is shared or ALL_LANES
Assigned = Iterable[tuple[SharedPrefix | None, int]]  # (prefix, lane) of each running request
Queue = Iterable[SharedPrefix | None]  # the prefix of each waiting request, in order
NOT_QUEUED = 1 << 62  # queue position of prefixes that no waiting request uses


@dataclass(frozen=True, kw_only=True)
class CachedPrefix:
    """A prefix that `lane` computes or has computed. `num_cached`: its tokens with stored KV, including its
    parent's."""

    prefix: SharedPrefix
    lane: int
    num_cached: int


def prefix_keys(prefix: SharedPrefix | None, lane: int, rule: SharingRule) -> list[PrefixKey]:
    """Keys of a prefix and its ancestors, shortest first, for a sequence in `lane`."""
    key_lane = ALL_LANES if rule.among_lanes else lane
    return [(each, key_lane) for each in prefix.chain][::-1] if prefix is not None else []


def all_prefix_keys(assigned: Assigned, rule: SharingRule) -> set[PrefixKey]:
    """Keys of all prefixes of running requests, and of their ancestors."""
    keys = set[PrefixKey]()
    for prefix, lane in assigned:
        key_lane = ALL_LANES if rule.among_lanes else lane
        while prefix is not None and (prefix, key_lane) not in keys:
            keys.add((prefix, key_lane))
            prefix = prefix.parent
    return keys


class RetainedPrefixes:
    """The cached prefixes, oldest first, during the planning of a pass. `dropped`: those that were removed."""

    def __init__(self, cached: Iterable[CachedPrefix], rule: SharingRule, page_tokens: int):
        self._rule, self._page_tokens = rule, page_tokens
        self._cached = {(each.prefix, ALL_LANES if rule.among_lanes else each.lane): each for each in cached}
        self.dropped: list[PrefixKey] = []

    def __iter__(self) -> Iterator[tuple[PrefixKey, CachedPrefix]]:
        return iter(self._cached.items())

    def __len__(self) -> int:
        return len(self._cached)

    def __getitem__(self, key: PrefixKey) -> CachedPrefix:
        return self._cached[key]

    def open(self, prefix: SharedPrefix | None, lane: int) -> None:
        """Adds the prefix and its ancestors, unless they are cached, as prefixes that this lane computes."""
        for key in self._missing(prefix, lane):
            num_parent = self._rule.num_shared(key[0].parent)
            self._cached[key] = CachedPrefix(prefix=key[0], lane=lane, num_cached=num_parent)

    def _missing(self, prefix: SharedPrefix | None, lane: int) -> list[PrefixKey]:
        return [key for key in prefix_keys(prefix, lane, self._rule) if key not in self._cached]

    def missing_tokens(self, prefix: SharedPrefix | None, lane: int) -> int:
        return sum(map(self._num_tokens, self._missing(prefix, lane)))

    def missing_pages(self, prefix: SharedPrefix | None, lane: int) -> int:
        return sum(map(self._num_pages, self._missing(prefix, lane)))

    @property
    def pending_pages(self) -> int:
        """Number of pages that prefixes still need until they are completely computed."""
        return sum(self._num_pages(key) - self._stored_pages(key) for key in self._cached)

    def can_start_after(self, prefix: SharedPrefix | None, lane: int, new_tokens: Mapping[PrefixKey, int]) -> bool:
        """True if a sequence in `lane` may continue from the prefix in this pass: the prefix is cached, or this pass
        completes it before. `new_tokens`: tokens that the pass adds to prefixes."""
        if prefix is None:
            return True
        key = prefix, ALL_LANES if self._rule.among_lanes else lane
        cached, num_tokens = self._cached[key], self._rule.num_shared(prefix)
        in_pass = new_tokens.get(key, 0) if self._rule.in_pass and cached.lane <= lane else 0
        return cached.num_cached + in_pass == num_tokens

    def drop_unused(self, assigned: Assigned, queue: Queue) -> int:
        """Drops prefixes that neither running nor waiting requests use. Returns the number of freed pages."""
        idle = self._idle_keys(assigned)
        first_uses = _first_uses(queue) if idle else {}  # usually none is idle, and the queue is long
        return sum(self._drop(key) for key in self._eviction_order(idle, first_uses) if key[0] not in first_uses)

    def drop_least_urgent(self, assigned: Assigned, queue: Queue) -> int | None:
        """Drops the prefix that is needed last, of those without running users. Returns the number of freed pages; None
        if all prefixes have running users."""
        idle = self._eviction_order(self._idle_keys(assigned), _first_uses(queue))
        return self._drop(idle[0]) if idle else None

    def make_room(self, num_pages: int, assigned: Assigned, queue: Queue) -> int | None:
        """Drops idle prefixes, those without running users, until they release `num_pages` pages. Pages that a prefix
        would still allocate count too. Returns the number of released pages. If idle prefixes have fewer pages, drops
        nothing and returns None."""
        idle, num_released = self._eviction_order(self._idle_keys(assigned), _first_uses(queue)), 0
        if sum(map(self._num_pages, idle)) < num_pages:
            return None
        for key in idle:
            if num_released >= num_pages:
                break
            num_released += self._num_pages(key)
            self._drop(key)
        return num_released

    def _idle_keys(self, assigned: Assigned) -> list[PrefixKey]:
        """Keys of prefixes without running users."""
        needed = all_prefix_keys(assigned, self._rule) if self._cached else ()
        return [key for key in self._cached if key not in needed]

    @staticmethod
    def _eviction_order(idle: Iterable[PrefixKey], first_uses: Mapping[SharedPrefix, int]) -> list[PrefixKey]:
        """Sorts keys by the first use in the queue, latest first. A prefix comes before its parent."""
        return sorted(idle, key=lambda key: (first_uses.get(key[0], NOT_QUEUED), key[0].num_tokens), reverse=True)

    def _drop(self, key: PrefixKey) -> int:
        num_pages = self._stored_pages(key)
        del self._cached[key]
        self.dropped.append(key)
        return num_pages

    def _num_tokens(self, key: PrefixKey) -> int:
        return self._rule.num_shared(key[0]) - self._rule.num_shared(key[0].parent)

    def _num_pages(self, key: PrefixKey) -> int:
        return self._num_tokens(key) // self._page_tokens

    def _stored_pages(self, key: PrefixKey) -> int:
        num_own = self._cached[key].num_cached - self._rule.num_shared(key[0].parent)
        return -(-num_own // self._page_tokens)


def _first_uses(queue: Queue) -> dict[SharedPrefix, int]:
    """Prefix -> queue position of the first request that uses it."""
    positions = dict[SharedPrefix, int]()
    for position, prefix in enumerate(queue):
        for ancestor in prefix.chain if prefix is not None and prefix not in positions else ():
            positions.setdefault(ancestor, position)
    return positions
