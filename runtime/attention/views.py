"""What attention over a packed lane looks at: the tokens of a pass, by sequence, which cached positions each may see,
and what a layer does with their scores. Sequences of several lengths lie one behind the other, as `Stretches`, whose
numbers are all the host's, so that nobody waits for a device to learn them.

Letters as in paged.py.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from .upload import upload


@dataclass(frozen=True)
class Rule:
    """What a layer does with its scores: `scale * q.k`, capped to +-softcap, with a sink's score (H*G) beside them."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def weights(self, scores: torch.Tensor, sinks: torch.Tensor | None, hidden: torch.Tensor | None) -> torch.Tensor:
        """Scaled scores (..., S) to weights, in place where it can; `sinks` and `hidden` broadcast over them."""
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if hidden is not None:
            scores = scores.masked_fill_(hidden, float("-inf"))
        if sinks is None:
            return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
        column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, column], -1), -1, dtype=torch.float32)[..., :-1].to(scores.dtype)


class TokenRange(NamedTuple):
    """`new` tokens, from `start` on in the pass, of a row whose positions [first, end) they look at: the last token at
    all of them, each one before it at one less. Those before `past` were cached by earlier passes."""

    row: int
    start: int
    new: int
    first: int
    end: int

    @property
    def past(self) -> int:
        return self.end - self.new

    @property
    def num_positions(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, eq=False)
class TokenRanges:
    """The stretches of one pass, in the order of its tokens. Their tensors are made once for all layers."""

    parts: tuple[TokenRange, ...]
    device: torch.device
    _groups: dict[tuple[int, bool], tuple["TokenRanges", ...]] = field(default_factory=dict)

    @cached_property
    def most_new(self) -> int:
        return max(part.new for part in self.parts)

    @cached_property
    def most_positions(self) -> int:
        return max(part.num_positions for part in self.parts)

    @cached_property
    def num_positions(self) -> int:
        return sum(part.num_positions for part in self.parts)

    @cached_property
    def is_fresh(self) -> bool:
        """No token looks at what an earlier pass has cached, so what they look at are the tokens themselves."""
        return all(part.first == part.past for part in self.parts)

    @cached_property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where tokens and positions of each begin, and where the last ones end (B + 1), int32."""
        tokens = accumulate((part.new for part in self.parts), initial=0)
        positions = accumulate((part.num_positions for part in self.parts), initial=0)
        both = upload([[*tokens], [*positions]], self.device, torch.int32)
        return both[0], both[1]

    @cached_property
    def tokens(self) -> slice | torch.Tensor:
        """Where their tokens lie in the pass: a slice, or indices where they lie apart."""
        first, last = self.parts[0], self.parts[-1]
        if last.start + last.new - first.start == sum(part.new for part in self.parts):
            return slice(first.start, last.start + last.new)
        spans = (range(part.start, part.start + part.new) for part in self.parts)
        return upload([token for span in spans for token in span], self.device)

    @cached_property
    def visible_BS(self) -> torch.Tensor | None:
        """Which of `most_positions` each has; None where they are all of one length."""
        if all(part.num_positions == self.most_positions for part in self.parts):
            return None
        lengths_B = self.bounds[1].diff()
        return torch.arange(self.most_positions, device=self.device) < lengths_B[:, None]

    @cached_property
    def hidden_BS(self) -> torch.Tensor | None:
        return None if self.visible_BS is None else ~self.visible_BS

    @property
    def group_keys(self) -> Collection[tuple[int, bool]]:
        """What `groups` was asked so far."""
        return self._groups.keys()

    def set_ungrouped(self, cuts: Collection[tuple[int, bool]]) -> None:
        """Says of these that nothing is cut."""
        self._groups.update(dict.fromkeys(cuts, (self,)))

    def groups(self, most_positions: int, *, are_padded: bool) -> tuple["TokenRanges", ...]:
        """Neighbours that together look at no more positions than this, each of them padded to the longest or not; one
        alone may."""
        key = most_positions, are_padded
        if key not in self._groups:
            groups: list[list[TokenRange]] = [[]]
            longest = total = 0
            for part in self.parts:
                longest, total = max(longest, part.num_positions), total + part.num_positions
                if groups[-1] and ((len(groups[-1]) + 1) * longest if are_padded else total) > most_positions:
                    groups.append([])
                    longest = total = part.num_positions
                groups[-1].append(part)
            parts = (TokenRanges(tuple(group), self.device) for group in groups)
            self._groups[key] = (self,) if len(groups) == 1 else tuple(parts)
        return self._groups[key]


@dataclass(frozen=True)
class Reach:
    """How far back a layer looks: the last `window` positions, or those of the same chunk of `chunk`; None is all."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """The first position that `position` may look at."""
        begin = 0 if self.window is None else max(0, position + 1 - self.window)
        return begin if self.chunk is None else max(begin, position // self.chunk * self.chunk)

    def hidden_mask(self, queries_T1: torch.Tensor, places_1S: torch.Tensor) -> torch.Tensor:
        """Which places lie too far back for each query (T, S)."""
        hidden = torch.zeros(len(queries_T1), places_1S.shape[1], dtype=torch.bool, device=queries_T1.device)
        if self.window is not None:
            hidden |= places_1S <= queries_T1 - self.window
        if self.chunk is not None:
            hidden |= places_1S < queries_T1 // self.chunk * self.chunk
        return hidden


@dataclass(frozen=True)
class View:
    """Which cached positions matter: [first, end) without those where `hidden` is True (None: all of them)."""

    first: int
    end: int
    hidden: torch.Tensor | None

    @cached_property
    def visible(self) -> torch.Tensor | None:
        return None if self.hidden is None else ~self.hidden


@dataclass(frozen=True)
class Segment:
    """Tokens [start, start + new) of the pass belong to one row, which has `past` positions cached already.

    `kv_start`: where its positions begin in what `update` returns for layers that expand them. The view is that of the
    new tokens (T, S); it is None when it is plainly causal from position 0.
    """

    row: int
    past: int
    new: int
    start: int
    kv_start: int
    device: torch.device
    _views: dict[Reach, View | None] = field(default_factory=dict, compare=False)
    _paged_views: dict[Reach, tuple[range, torch.Tensor]] = field(default_factory=dict, compare=False)

    @property
    def end(self) -> int:
        return self.past + self.new

    def view(self, reach: Reach) -> View | None:
        if reach in self._views:
            return self._views[reach]
        first, found = reach.first(self.past), None
        if self.new == 1 and self.past:
            found = View(first, self.end, None)
        elif self.past or reach.first(self.end - 1):
            places = torch.arange(first, self.end, device=self.device)[None]
            queries = torch.arange(self.past, self.end, device=self.device)[:, None]
            found = View(first, self.end, (places > queries) | reach.hidden_mask(queries, places))
        self._views[reach] = found
        return found

    def paged_view(self, reach: Reach, page_tokens: int) -> tuple[range, torch.Tensor]:
        """What its tokens look at where pages are quantised: pages of its row as they are kept, then its positions from
        the begin of the first page that it adds to, as computed; and (T, S), of all these, what each token does not
        see. Every token sees its own page as computed, and those before it as they are kept."""
        if reach not in self._paged_views:
            own = self.past // page_tokens * page_tokens
            pages = range(reach.first(self.past) // page_tokens, (self.end - 1) // page_tokens)
            kept = torch.arange(pages.start * page_tokens, pages.stop * page_tokens, device=self.device)[None]
            computed = torch.arange(own, self.end, device=self.device)[None]
            queries = torch.arange(self.past, self.end, device=self.device)[:, None]
            begins = queries // page_tokens * page_tokens
            shown = torch.cat([kept < begins, (computed >= begins) & (computed <= queries)], 1)
            self._paged_views[reach] = pages, ~shown | reach.hidden_mask(queries, torch.cat([kept, computed], 1))
        return self._paged_views[reach]

    def token_ranges(self, reach: Reach) -> Iterator[TokenRange]:
        """One, or one for each chunk that its new tokens lie in."""
        at = self.past
        while at < self.end:
            end = self.end if reach.chunk is None else min(self.end, (at // reach.chunk + 1) * reach.chunk)
            yield TokenRange(self.row, self.start + at - self.past, end - at, reach.first(at), end)
            at = end


@dataclass(frozen=True)
class Prompts:
    """The segments of a pass."""

    segments: Sequence[Segment]
    device: torch.device
    _spans: dict[Reach, TokenRanges] = field(default_factory=dict, compare=False)

    def token_ranges(self, reach: Reach) -> TokenRanges:
        if reach not in self._spans:
            parts = tuple(part for segment in self.segments for part in segment.token_ranges(reach))
            self._spans[reach] = TokenRanges(parts, self.device)
        return self._spans[reach]


@dataclass(frozen=True)
class DecodeRows:
    """Rows that carry one new token each: token `tokens[b]` of the pass, behind `past[b]` cached positions.

    In what `update` returns for layers that expand them, their positions come first, `longest` of each.
    """

    rows: tuple[int, ...]
    past: tuple[int, ...]
    tokens: tuple[int, ...]
    device: torch.device
    _begins: dict[Reach, torch.Tensor] = field(default_factory=dict, compare=False)
    _hidden: dict[Reach, torch.Tensor | None] = field(default_factory=dict, compare=False)
    _spans: dict[Reach, TokenRanges] = field(default_factory=dict, compare=False)

    @cached_property
    def tokens_B(self) -> torch.Tensor:
        return upload(self.tokens, self.device)

    def token_ranges(self, reach: Reach) -> TokenRanges:
        if reach not in self._spans:
            each = zip(self.rows, self.past, self.tokens, strict=True)
            parts = tuple(TokenRange(row, token, 1, reach.first(past), past + 1) for row, past, token in each)
            self._spans[reach] = TokenRanges(parts, self.device)
        return self._spans[reach]

    @property
    def reaches(self) -> Mapping[Reach, TokenRanges]:
        """What layers have asked for."""
        return self._spans

    @property
    def longest(self) -> int:
        """Positions of the longest row, the new one included."""
        return max(self.past) + 1

    def begins(self, reach: Reach) -> torch.Tensor:
        """The first position that each row looks at (B), int32."""
        if reach not in self._begins:
            self._begins[reach] = self._tensor([reach.first(past) for past in self.past])
        return self._begins[reach]

    @cached_property
    def ends(self) -> torch.Tensor:
        """One behind the last position of each row (B), int32."""
        return self._tensor([past + 1 for past in self.past])

    def hidden(self, reach: Reach) -> torch.Tensor | None:
        """Which of `longest` positions each row does not see (B, S); None where all see all."""
        if reach not in self._hidden:
            places = torch.arange(self.longest, device=self.device)[None]
            hides = any(past + 1 < self.longest or reach.first(past) for past in self.past)
            hidden = (places >= self.ends[:, None]) | (places < self.begins(reach)[:, None]) if hides else None
            self._hidden[reach] = hidden
        return self._hidden[reach]

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return upload(values, self.device, torch.int32)
