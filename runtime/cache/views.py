"""What attention over a packed lane looks at: the tokens of a pass, by sequence or by group, and which cached positions
each of them may see.

Letters as in ragged.py.
"""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Reach:
    """How far back a layer looks: the last `window` positions, or those of the same chunk of `chunk`; None is all."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """The first position that `position` may look at."""
        begin = 0 if self.window is None else max(0, position + 1 - self.window)
        return begin if self.chunk is None else max(begin, position // self.chunk * self.chunk)


@dataclass(frozen=True)
class View:
    """Of the cached positions only [first, end) matter, and of those not the ones where `hidden` is True (None: all
    do)."""

    first: int
    end: int
    hidden: torch.Tensor | None


@dataclass(frozen=True)
class Segment:
    """Tokens [start, start + new) of the pass belong to one row, which has `past` positions cached already.

    `kv_start`: where its positions begin in what `update` returns for layers that expand them. The view is that of the
    new tokens (T, S); it is None when it is plainly causal from position 0.
    """

    group: int
    row: int
    past: int
    new: int
    start: int
    kv_start: int
    device: torch.device
    _views: dict[Reach, View | None] = field(default_factory=dict, compare=False)

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
        hidden = places > queries
        if reach.window is not None:
            hidden |= places <= queries - reach.window
        if reach.chunk is not None:
            hidden |= places < queries // reach.chunk * reach.chunk
        return View(first, self.end, hidden)


@dataclass(frozen=True)
class DecodeSpan:
    """Tokens [start, start + B) of the pass are one new token for each row of a group; `past` counts what each row has
    cached. Views are of rows (B, S)."""

    group: int
    start: int
    kv_start: int
    past: tuple[int, ...]
    past_B: torch.Tensor
    _views: dict[Reach, View] = field(default_factory=dict, compare=False)

    @property
    def num_rows(self) -> int:
        return len(self.past)

    @property
    def longest(self) -> int:
        """Positions to attend over, the new one included."""
        return max(self.past) + 1

    def view(self, reach: Reach) -> View:
        if reach not in self._views:
            self._views[reach] = self._look(reach)
        return self._views[reach]

    def _look(self, reach: Reach) -> View:
        begins = [reach.first(past) for past in self.past]
        first, longest = min(begins), self.longest
        if max(begins) == first and min(self.past) == max(self.past):
            return View(first, longest, None)
        places = torch.arange(first, longest, device=self.past_B.device)[None]
        begin_B = torch.tensor(begins, device=self.past_B.device)
        return View(first, longest, (places > self.past_B[:, None]) | (places < begin_B[:, None]))
