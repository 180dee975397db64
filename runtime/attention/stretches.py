"""Tokens of a pass beside the positions that they look at, one sequence behind the other, as attention over sequences
of several lengths wants it. All numbers are the host's, so that nobody waits for a device to learn them.

Letters as in paged.py.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from .upload import upload


class Stretch(NamedTuple):
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
class Stretches:
    """The stretches of one pass, in the order of its tokens. Their tensors are made once for all layers."""

    parts: tuple[Stretch, ...]
    device: torch.device
    _groups: dict[tuple[int, bool], tuple["Stretches", ...]] = field(default_factory=dict)

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
    def seen_BS(self) -> torch.Tensor | None:
        """Which of `most_positions` each has; None where they are all of one length."""
        if all(part.num_positions == self.most_positions for part in self.parts):
            return None
        lengths_B = self.bounds[1].diff()
        return torch.arange(self.most_positions, device=self.device) < lengths_B[:, None]

    @cached_property
    def hidden_BS(self) -> torch.Tensor | None:
        return None if self.seen_BS is None else ~self.seen_BS

    @property
    def cuts(self) -> Collection[tuple[int, bool]]:
        """What `groups` was asked so far."""
        return self._groups.keys()

    def keep_whole(self, cuts: Collection[tuple[int, bool]]) -> None:
        """Says of these that nothing is cut."""
        self._groups.update(dict.fromkeys(cuts, (self,)))

    def groups(self, most_positions: int, *, are_padded: bool) -> tuple["Stretches", ...]:
        """Neighbours that together look at no more positions than this, each of them padded to the longest or not; one
        alone may."""
        key = most_positions, are_padded
        if key not in self._groups:
            found = tuple(self._cut(most_positions, are_padded))
            self._groups[key] = (self,) if len(found) == 1 else tuple(Stretches(part, self.device) for part in found)
        return self._groups[key]

    def _cut(self, most_positions: int, are_padded: bool) -> Iterator[tuple[Stretch, ...]]:
        group: list[Stretch] = []
        longest = total = 0
        for part in self.parts:
            longest, total = max(longest, part.num_positions), total + part.num_positions
            if group and ((len(group) + 1) * longest if are_padded else total) > most_positions:
                yield tuple(group)
                group, longest, total = [], part.num_positions, part.num_positions
            group.append(part)
        yield tuple(group)
