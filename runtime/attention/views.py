"""What attention over a packed lane looks at: the tokens of a pass, by sequence, and which cached positions each may
see.

Letters as in paged.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from .stretches import Stretch, Stretches
from .upload import upload


@dataclass(frozen=True)
class Reach:
    """How far back a layer looks: the last `window` positions, or those of the same chunk of `chunk`; None is all."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """The first position that `position` may look at."""
        begin = 0 if self.window is None else max(0, position + 1 - self.window)
        return begin if self.chunk is None else max(begin, position // self.chunk * self.chunk)

    def hides(self, queries_T1: torch.Tensor, places_1S: torch.Tensor) -> torch.Tensor:
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
    def seen(self) -> torch.Tensor | None:
        return None if self.hidden is None else ~self.hidden


@dataclass(frozen=True)
class PagedView:
    """What a segment looks at where pages are quantised: `pages` of its row as they are kept, then its positions from
    the begin of the first page that it adds to, as computed. `hidden` (T, S): of all these, what each token does not
    see. Every token sees its own page as computed, and those before it as they are kept."""

    pages: range
    hidden: torch.Tensor


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
    _paged_views: dict[Reach, PagedView] = field(default_factory=dict, compare=False)

    @property
    def end(self) -> int:
        return self.past + self.new

    def view(self, reach: Reach) -> View | None:
        if reach not in self._views:
            self._views[reach] = self._look(reach)
        return self._views[reach]

    def _look(self, reach: Reach) -> View | None:
        first = reach.first(self.past)
        if self.past == 0 and reach.first(self.end - 1) == 0:
            return None
        if self.new == 1:
            return View(first, self.end, None)
        places = torch.arange(first, self.end, device=self.device)[None]
        queries = torch.arange(self.past, self.end, device=self.device)[:, None]
        return View(first, self.end, (places > queries) | reach.hides(queries, places))

    def paged_view(self, reach: Reach, page_tokens: int) -> PagedView:
        if reach not in self._paged_views:
            own = self.past // page_tokens * page_tokens
            pages = range(reach.first(self.past) // page_tokens, (self.end - 1) // page_tokens)
            kept = torch.arange(pages.start * page_tokens, pages.stop * page_tokens, device=self.device)[None]
            computed = torch.arange(own, self.end, device=self.device)[None]
            queries = torch.arange(self.past, self.end, device=self.device)[:, None]
            begins = queries // page_tokens * page_tokens
            shown = torch.cat([kept < begins, (computed >= begins) & (computed <= queries)], 1)
            self._paged_views[reach] = PagedView(pages, ~shown | reach.hides(queries, torch.cat([kept, computed], 1)))
        return self._paged_views[reach]

    def stretches(self, reach: Reach) -> Iterator[Stretch]:
        """One, or one for each chunk that its new tokens lie in."""
        at = self.past
        while at < self.end:
            end = self.end if reach.chunk is None else min(self.end, (at // reach.chunk + 1) * reach.chunk)
            yield Stretch(self.row, self.start + at - self.past, end - at, reach.first(at), end)
            at = end


@dataclass(frozen=True)
class Prompts:
    """The segments of a pass."""

    segments: Sequence[Segment]
    device: torch.device
    _stretches: dict[Reach, Stretches] = field(default_factory=dict, compare=False)

    def stretches(self, reach: Reach) -> Stretches:
        if reach not in self._stretches:
            parts = tuple(part for segment in self.segments for part in segment.stretches(reach))
            self._stretches[reach] = Stretches(parts, self.device)
        return self._stretches[reach]


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
    _stretches: dict[Reach, Stretches] = field(default_factory=dict, compare=False)

    @cached_property
    def tokens_B(self) -> torch.Tensor:
        return upload(self.tokens, self.device)

    def stretches(self, reach: Reach) -> Stretches:
        if reach not in self._stretches:
            each = zip(self.rows, self.past, self.tokens, strict=True)
            parts = tuple(Stretch(row, token, 1, reach.first(past), past + 1) for row, past, token in each)
            self._stretches[reach] = Stretches(parts, self.device)
        return self._stretches[reach]

    @property
    def reaches(self) -> Mapping[Reach, Stretches]:
        """What layers have asked for."""
        return self._stretches

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
