"""Which tokens several prompts of a block begin with, so that they are computed once: a pure function of the prompts.

The prompts are taken as a trie (as BatchLLM does, Zheng et al. 2024); of its inner nodes those are kept that spare
enough. Every choice follows from the prompts alone, so a run that is stopped and goes on cuts them where it did.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

# A prefix goes on from its parent for so many tokens at least. A page holds no more, and so sharing takes no more pages
# than not to: what a prefix needs beside those that it spares is the one page that it leaves half full.
LEAST_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The first `num_tokens` of the prompt at `source`, which others have as well. `parent`: the place of the longest
    prefix that it goes on from; None: it goes on from none."""

    num_tokens: int
    source: int
    parent: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """`prefixes`, parents first, and of each prompt the place of the longest one that it begins with; None: of none."""

    prefixes: tuple[Prefix, ...] = ()
    of: tuple[int | None, ...] = ()

    def num_shared(self, place: int) -> int:
        """Tokens of the prompt at `place` that are a prefix's."""
        prefix = self.of[place]
        return 0 if prefix is None else self.prefixes[prefix].num_tokens


@dataclass(kw_only=True)
class _Node:
    """Prompts [begin, end) of the sorted ones have `depth` tokens in common."""

    depth: int
    begin: int
    end: int = 0
    children: list["_Node"] = field(default_factory=list)


def shared_prefixes(prompts: Sequence[Sequence[int]], most: Sequence[int], *, multiple: int = 1) -> Sharing:
    """The prefixes of `prompts`, of which each may share its first `most` tokens. Lengths are multiples of `multiple`.
    Takes what sorting the prompts takes, and a comparison of neighbours."""
    heads = [tuple(prompt[:limit]) for prompt, limit in zip(prompts, most, strict=True)]
    order = sorted(range(len(heads)), key=heads.__getitem__)
    root = _trie([heads[i] for i in order], multiple)
    prefixes, of = list[Prefix](), list[int | None]([None] * len(heads))
    waiting: list[tuple[_Node, int | None, int]] = [(root, None, 0)]
    while waiting:
        node, parent, depth = waiting.pop()
        if node.depth - depth >= LEAST_TOKENS:
            prefixes.append(Prefix(num_tokens=node.depth, source=order[node.begin], parent=parent))
            parent, depth = len(prefixes) - 1, node.depth
            for place in range(node.begin, node.end):
                of[order[place]] = parent
        waiting += [(child, parent, depth) for child in reversed(node.children)]
    return Sharing(prefixes=tuple(prefixes), of=tuple(of))


def _trie(heads: Sequence[tuple[int, ...]], multiple: int) -> _Node:
    """The inner nodes of the trie of sorted prompts, by how much neighbours have in common."""
    root = _Node(depth=0, begin=0)
    path = [root]
    for place in range(1, len(heads)):
        depth, begin = _num_common(heads[place - 1], heads[place]) // multiple * multiple, place - 1
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


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many first tokens are the same, by halving."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
