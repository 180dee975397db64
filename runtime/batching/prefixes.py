"""Which tokens several prompts begin with, so that they are computed once: pure functions of the prompts.

The prompts of a run are a trie, as BatchLLM takes them (Zheng et al. 2024), and those of its inner nodes count that
spare enough. Every choice follows from the prompts alone, so a run that is stopped and goes on cuts them where it did.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# A prefix goes on from its parent for so many tokens at least. A page holds no more, and so sharing takes no more pages
# than not to: what a prefix needs beside those that it spares is the one page that it leaves half full.
LEAST_TOKENS = 16
TOKEN_BYTES = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedPrefix:
    """The first `num_tokens` of several prompts; `parent` is the longest of those that it begins with itself."""

    num_tokens: int
    parent: "SharedPrefix | None" = None

    @property
    def chain(self) -> "Iterator[SharedPrefix]":
        """Itself, and those that it begins with, the longest first."""
        found: SharedPrefix | None = self
        while found is not None:
            yield found
            found = found.parent


@dataclass(frozen=True, kw_only=True)
class SharingRule:
    """How far prefixes may be shared. `among_lanes`: not only in each. `in_pass`: those who go on from one may begin in
    the pass that computes it. `page_tokens`: of a page that cannot be copied, so that only whole ones are shared."""

    among_lanes: bool
    in_pass: bool = True
    page_tokens: int = 1

    def num_shared(self, prefix: SharedPrefix | None) -> int:
        """Tokens of the prefix that are shared."""
        return prefix.num_tokens // self.page_tokens * self.page_tokens if prefix is not None else 0

    def parts(self, groups: Sequence[Sequence[int]]) -> list[Sequence[Sequence[int]]]:
        """The lanes of a block, those together that share among themselves."""
        return [groups] if self.among_lanes else [[group] for group in groups]


IN_LANES = SharingRule(among_lanes=False)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What some of the prompts share among themselves: of each the longest prefix that another of them has as well, and
    the parent of each prefix among those, parents first."""

    of: Sequence[SharedPrefix | None]
    parents: Mapping[SharedPrefix, SharedPrefix | None]

    @staticmethod
    def among(prefixes: Sequence[SharedPrefix | None]) -> "Shares":
        """`prefixes` are those of the whole run, of some of its prompts. Those that nobody or one alone has here are
        left out, and those at which none parts from the others."""
        ends, counts = Counter(prefixes), Counter[SharedPrefix]()
        ends.pop(None, None)
        for prefix, count in ends.items():
            for each in prefix.chain if prefix is not None else ():
                counts[each] += count
        parting = Counter(ends)  # that end there, or go on alone
        for prefix, count in counts.items():
            if prefix.parent is not None:
                parting[prefix.parent] = max(parting[prefix.parent], 1 if count < counts[prefix.parent] else 0)
        kept = [prefix for prefix, count in counts.items() if count > 1 and parting[prefix]]
        kept.sort(key=lambda prefix: prefix.num_tokens)
        places = dict.fromkeys(kept)
        firsts = {prefix: _first_of(prefix, places) for prefix in (None, *ends)}
        return Shares(
            of=[firsts[prefix] for prefix in prefixes],
            parents={prefix: _first_of(prefix.parent, places) for prefix in kept},
        )

    def num_spared(self, rule: SharingRule = IN_LANES) -> int:
        """Tokens of prompts that need not be computed."""
        kept = (rule.num_shared(prefix) - rule.num_shared(parent) for prefix, parent in self.parents.items())
        return sum(map(rule.num_shared, self.of)) - sum(kept)


def num_spared(
    blocks: Iterable[Sequence[Sequence[int]]], prefixes: Sequence[SharedPrefix | None], rule: SharingRule
) -> int:
    """Tokens of prompts that a run in blocks of such lanes of requests need not compute."""
    if not prefixes:
        return 0
    parts = (part for groups in blocks for part in rule.parts(groups))
    return sum(Shares.among([prefixes[i] for group in part for i in group]).num_spared(rule) for part in parts)


def _first_of(prefix: SharedPrefix | None, kept: Mapping[SharedPrefix, None]) -> SharedPrefix | None:
    return next((each for each in prefix.chain if each in kept), None) if prefix is not None else None


@dataclass(kw_only=True)
class _Node:
    """Prompts [begin, end) of the sorted ones have `depth` tokens in common."""

    depth: int
    begin: int
    end: int = 0
    children: list["_Node"] = field(default_factory=list)


def shared_prefixes(prompts: Sequence[Sequence[int]], most: Sequence[int]) -> list[SharedPrefix | None]:
    """The longest prefix of each of `prompts` that others have as well, of its first `most` tokens. Takes the time to
    sort the prompts, and a comparison of neighbours."""
    heads = [array("i", prompt[:limit]).tobytes() for prompt, limit in zip(prompts, most, strict=True)]
    order = sorted(range(len(heads)), key=heads.__getitem__)
    found = list[SharedPrefix | None]([None] * len(heads))
    waiting: list[tuple[_Node, SharedPrefix | None]] = [(_trie([heads[i] for i in order]), None)]
    while waiting:
        node, prefix = waiting.pop()
        if node.depth - (prefix.num_tokens if prefix is not None else 0) >= LEAST_TOKENS:
            prefix = SharedPrefix(num_tokens=node.depth, parent=prefix)
            for place in range(node.begin, node.end):
                found[order[place]] = prefix
        waiting += [(child, prefix) for child in node.children]
    return found


def _trie(heads: Sequence[bytes]) -> _Node:
    """The inner nodes of the trie of sorted prompts, by how much neighbours have in common."""
    root = _Node(depth=0, begin=0)
    path = [root]
    for place in range(1, len(heads)):
        depth, begin = _num_common(heads[place - 1], heads[place]), place - 1
        while path[-1].depth > depth:
            closed = path.pop()
            closed.end, begin = place, closed.begin
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


def _num_common(one: bytes, other: bytes) -> int:
    """How many first tokens are the same, by halving; 0 for fewer than are ever shared."""
    least = LEAST_TOKENS * TOKEN_BYTES
    if one[:least] != other[:least]:
        return 0
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * TOKEN_BYTES : middle * TOKEN_BYTES] == other[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
