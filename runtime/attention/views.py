"""A pass of a packed lane (micro-batch) as attention sees it: the tokens of each sequence, and the positions that they
attend to. All sizes are integers on the host, so that nothing waits for a device.

A **row** is a sequence; a **segment** is its prompt chunk in this pass. **Ranges** of tokens say which positions tokens
attend to, for layers with the same attention span. Letters of tensor dimensions: B rows or ranges, T tokens, S
positions, H KV heads, G query heads of a KV head.
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
    """Parameters of a layer's softmax over scores `scale * q.k`."""

    scale: float
    softcap: float | None = None  # limit of absolute scores
    sinks: torch.Tensor | None = None  # (H*G): an extra score per query head, without a value

    @property
    def is_plain(self) -> bool:
        """True without softcap and sinks."""
        return self.softcap is None and self.sinks is None

    def weights(self, scores: torch.Tensor, sinks: torch.Tensor | None, hidden: torch.Tensor | None) -> torch.Tensor:
        """Attention weights from scaled scores (..., S), which may be overwritten.

        `sinks` and `hidden` must broadcast to the scores. `hidden` is True where a token does not see a position.
        """
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if hidden is not None:
            scores = scores.masked_fill_(hidden, float("-inf"))
        if sinks is None:
            return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
        column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, column], -1), -1, dtype=torch.float32)[..., :-1].to(scores.dtype)


class TokenRange(NamedTuple):
    """Tokens of a row that attend causally to positions [first, end)."""

    row: int
    start: int  # index of the first token in the pass
    new: int  # number of tokens; they have the last positions before `end`
    first: int
    end: int

    @property
    def past(self) -> int:
        """The number of positions before the first token."""
        return self.end - self.new

    @property
    def num_positions(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, eq=False)
class TokenRanges:
    """Token ranges of one pass, in the order of tokens. Their index tensors are computed once for all layers."""

    parts: tuple[TokenRange, ...]
    device: torch.device
    # Results of `groups`, by arguments.
    _groups: dict[tuple[int, bool], tuple["TokenRanges", ...]] = field(default_factory=dict)

    @cached_property
    def most_new(self) -> int:
        """The largest number of tokens of a range."""
        return max(part.new for part in self.parts)

    @cached_property
    def most_positions(self) -> int:
        """The largest number of positions of a range."""
        return max(part.num_positions for part in self.parts)

    @cached_property
    def num_positions(self) -> int:
        return sum(part.num_positions for part in self.parts)

    @cached_property
    def is_fresh(self) -> bool:
        """True if no token attends to positions of earlier passes."""
        return all(part.first == part.past for part in self.parts)

    @cached_property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cumulative numbers of tokens and of positions, int32 (B + 1) each, as flash kernels expect them."""
        tokens = accumulate((part.new for part in self.parts), initial=0)
        positions = accumulate((part.num_positions for part in self.parts), initial=0)
        both = upload([[*tokens], [*positions]], self.device, torch.int32)
        return both[0], both[1]

    @cached_property
    def tokens(self) -> slice | torch.Tensor:
        """Indices of the tokens in the pass, as a slice if they are contiguous."""
        first, last = self.parts[0], self.parts[-1]
        if last.start + last.new - first.start == sum(part.new for part in self.parts):
            return slice(first.start, last.start + last.new)
        spans = (range(part.start, part.start + part.new) for part in self.parts)
        return upload([token for span in spans for token in span], self.device)

    @cached_property
    def visible_BS(self) -> torch.Tensor | None:
        """Mask (B, most_positions) of padded ranges, False for padding; None if all ranges have the same length."""
        if all(part.num_positions == self.most_positions for part in self.parts):
            return None
        lengths_B = self.bounds[1].diff()
        return torch.arange(self.most_positions, device=self.device) < lengths_B[:, None]

    @cached_property
    def hidden_BS(self) -> torch.Tensor | None:
        return None if self.visible_BS is None else ~self.visible_BS

    @property
    def group_keys(self) -> Collection[tuple[int, bool]]:
        """Arguments of all calls of `groups` so far."""
        return self._groups.keys()

    def set_ungrouped(self, keys: Collection[tuple[int, bool]]) -> None:
        """Makes `groups` return a single group for these arguments."""
        self._groups.update(dict.fromkeys(keys, (self,)))

    def groups(self, most_positions: int, *, are_padded: bool) -> tuple["TokenRanges", ...]:
        """Divides the ranges into groups of at most `most_positions` positions, padding included if `are_padded`.

        A longer range is a group of its own.
        """
        key = most_positions, are_padded
        if key not in self._groups:
            groups: list[list[TokenRange]] = [[]]
            longest = total = 0  # positions of the longest range of the group, and of all its ranges
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
    """The attention span of a layer."""

    window: int | None = None  # a token attends to the last `window` positions; None: no limit
    chunk: int | None = None  # a token attends to positions of its own chunk, of this size; None: no limit

    def first(self, position: int) -> int:
        """The first position that `position` may attend to."""
        begin = 0 if self.window is None else max(0, position + 1 - self.window)
        return begin if self.chunk is None else max(begin, position // self.chunk * self.chunk)

    def hidden_mask(self, queries_T1: torch.Tensor, positions_1S: torch.Tensor) -> torch.Tensor:
        """Mask (T, S), True where a position is not in the span of a query. Arguments are position numbers."""
        hidden = torch.zeros(len(queries_T1), positions_1S.shape[1], dtype=torch.bool, device=queries_T1.device)
        if self.window is not None:
            hidden |= positions_1S <= queries_T1 - self.window
        if self.chunk is not None:
            hidden |= positions_1S < queries_T1 // self.chunk * self.chunk
        return hidden


@dataclass(frozen=True)
class View:
    """The positions [first, end) that tokens of a segment see."""

    first: int
    end: int
    hidden: torch.Tensor | None  # mask (T, S), True where a token does not see a position; None: all see all

    @cached_property
    def visible(self) -> torch.Tensor | None:
        return None if self.hidden is None else ~self.hidden


@dataclass(frozen=True)
class Segment:
    """The prompt chunk of a row in this pass."""

    row: int
    past: int  # cached positions before the pass
    new: int  # tokens of the chunk
    start: int  # index of the first token in the pass
    kv_start: int  # index of the row's first position in the result of `update`, for layers that expand latents (MLA)
    device: torch.device
    _views: dict[Reach, View | None] = field(default_factory=dict, compare=False)
    _paged_views: dict[Reach, tuple[range, torch.Tensor]] = field(default_factory=dict, compare=False)

    @property
    def end(self) -> int:
        return self.past + self.new

    def view(self, reach: Reach) -> View | None:
        """The positions that the segment's tokens see; None if they see all positions from 0 up to their own."""
        if reach in self._views:
            return self._views[reach]
        first, view = reach.first(self.past), None
        if self.new == 1 and self.past:
            view = View(first, self.end, None)
        elif self.past or reach.first(self.end - 1):
            positions = torch.arange(first, self.end, device=self.device)[None]
            queries = torch.arange(self.past, self.end, device=self.device)[:, None]
            view = View(first, self.end, (positions > queries) | reach.hidden_mask(queries, positions))
        self._views[reach] = view
        return view

    def paged_view(self, reach: Reach, page_tokens: int) -> tuple[range, torch.Tensor]:
        """The quantized pages that the segment's tokens see, and a mask (T, S), True where a token sees no position.

        Pages are numbered within the row. S are the positions of these pages, then the unquantized positions from the
        first page into which the segment writes. A token sees its own page unquantized, and earlier pages quantized.
        """
        if reach not in self._paged_views:
            first_computed = self.past // page_tokens * page_tokens
            pages = range(reach.first(self.past) // page_tokens, (self.end - 1) // page_tokens)
            stored = torch.arange(pages.start * page_tokens, pages.stop * page_tokens, device=self.device)[None]
            computed = torch.arange(first_computed, self.end, device=self.device)[None]
            queries = torch.arange(self.past, self.end, device=self.device)[:, None]
            begins = queries // page_tokens * page_tokens
            visible = torch.cat([stored < begins, (computed >= begins) & (computed <= queries)], 1)
            self._paged_views[reach] = pages, ~visible | reach.hidden_mask(queries, torch.cat([stored, computed], 1))
        return self._paged_views[reach]

    def token_ranges(self, reach: Reach) -> Iterator[TokenRange]:
        """Yields the segment as one range; with chunked attention, one range per chunk of attention."""
        begin = self.past
        while begin < self.end:
            end = self.end if reach.chunk is None else min(self.end, (begin // reach.chunk + 1) * reach.chunk)
            yield TokenRange(self.row, self.start + begin - self.past, end - begin, reach.first(begin), end)
            begin = end


@dataclass(frozen=True)
class Prompts:
    """The prompt segments of a pass."""

    segments: Sequence[Segment]
    device: torch.device
    _ranges: dict[Reach, TokenRanges] = field(default_factory=dict, compare=False)

    def token_ranges(self, reach: Reach) -> TokenRanges:
        if reach not in self._ranges:
            parts = tuple(part for segment in self.segments for part in segment.token_ranges(reach))
            self._ranges[reach] = TokenRanges(parts, self.device)
        return self._ranges[reach]


@dataclass(frozen=True)
class DecodeRows:
    """Rows that decode, with one new token each."""

    rows: tuple[int, ...]
    past: tuple[int, ...]  # cached positions before the pass, by row
    tokens: tuple[int, ...]  # index of the token in the pass, by row
    device: torch.device
    _begins: dict[Reach, torch.Tensor] = field(default_factory=dict, compare=False)
    _hidden: dict[Reach, torch.Tensor | None] = field(default_factory=dict, compare=False)
    _ranges: dict[Reach, TokenRanges] = field(default_factory=dict, compare=False)

    @cached_property
    def tokens_B(self) -> torch.Tensor:
        return upload(self.tokens, self.device)

    def token_ranges(self, reach: Reach) -> TokenRanges:
        if reach not in self._ranges:
            each = zip(self.rows, self.past, self.tokens, strict=True)
            parts = tuple(TokenRange(row, token, 1, reach.first(past), past + 1) for row, past, token in each)
            self._ranges[reach] = TokenRanges(parts, self.device)
        return self._ranges[reach]

    @property
    def reaches(self) -> Mapping[Reach, TokenRanges]:
        """The results of all `token_ranges` calls so far."""
        return self._ranges

    @property
    def longest(self) -> int:
        """Number of positions of the longest row, the new one included."""
        return max(self.past) + 1

    def begins(self, reach: Reach) -> torch.Tensor:
        """The first position that each row attends to, int32 (B)."""
        if reach not in self._begins:
            self._begins[reach] = self._tensor([reach.first(past) for past in self.past])
        return self._begins[reach]

    @cached_property
    def ends(self) -> torch.Tensor:
        """The number of positions of each row, int32 (B): it attends to positions before this one."""
        return self._tensor([past + 1 for past in self.past])

    def hidden(self, reach: Reach) -> torch.Tensor | None:
        """Mask (B, longest), True where a row does not see a position; None if all rows see all positions."""
        if reach not in self._hidden:
            positions = torch.arange(self.longest, device=self.device)[None]
            hides = any(past + 1 < self.longest or reach.first(past) for past in self.past)
            hidden = (positions >= self.ends[:, None]) | (positions < self.begins(reach)[:, None]) if hides else None
            self._hidden[reach] = hidden
        return self._hidden[reach]

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return upload(values, self.device, torch.int32)
