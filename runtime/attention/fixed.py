"""A pass in which rows decode, in memory that stays: what is recorded over it once finds the numbers of every later
pass of as many rows and positions in the same places.

Letters as in paged.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .layout import PassLayout, Places
from .views import DecodeRows, Reach, TokenRanges

STEPS = 2  # sizes from one power of two to the next: a third of what is looked at is in vain at most
LEAST = 64  # positions

Cuts: TypeAlias = Mapping[Reach, frozenset[tuple[int, bool]]]  # how layers cut rows, see `Stretches.groups`


def cuts_from_rows(rows: DecodeRows) -> Cuts:
    """How the layers of the pass that these rows were in have looked at them."""
    return {reach: frozenset(spans.group_keys) for reach, spans in rows.reaches.items()}


@dataclass(frozen=True)
class Size:
    """Positions of one reach: of the longest row, and of all rows together."""

    longest: int
    total: int


Sizes: TypeAlias = Mapping[Reach, Size]


def fit_sizes(rows: DecodeRows, cuts: Cuts) -> Sizes | None:
    """The sizes that have room for these rows, or None where some layer would look at them in several parts."""
    found = dict[Reach, Size]()
    for reach, keys in cuts.items():
        spans = rows.token_ranges(reach)
        if any(len(spans.groups(most, are_padded=padded)) > 1 for most, padded in keys):
            return None
        found[reach] = Size(_round_up_size(spans.most_positions), _round_up_size(spans.num_positions))
    return found


def _round_up_size(number: int) -> int:
    step = max(LEAST, 1 << (number.bit_length() - 1)) // STEPS
    return -(-number // step) * step


class FixedRows:
    """Rows that decode and where they lie, both fresh, made to stay. Mutates them."""

    def __init__(self, rows: DecodeRows, layout: PassLayout, cuts: Cuts, sizes: Sizes):
        self._layout, self._cuts, self._sizes = layout, cuts, sizes
        self._spans = {reach: self._padded_ranges(rows, reach) for reach in cuts}
        self._buffers = {reach: self._tensors(rows, layout, reach) for reach in cuts}
        for reach, spans in self._spans.items():
            bounds, *places = self._buffers[reach]
            vars(spans).update(bounds=(spans.bounds[0], bounds))
            for padded, flat in zip(self._padding_modes(reach), places, strict=False):
                if padded:
                    vars(spans).update(seen_BS=places[-2], hidden_BS=places[-1])
                layout.set_places(spans, Places(flat), are_padded=padded)

    def fill(self, rows: DecodeRows, layout: PassLayout) -> None:
        """Puts in the numbers of another pass of these sizes, which is fresh."""
        self._layout.new_T.flat.copy_(layout.new_T.flat)
        for reach, kept in self._buffers.items():
            self._padded_ranges(rows, reach)
            for target, source in zip(kept, self._tensors(rows, layout, reach), strict=True):
                target.copy_(source)

    def _padding_modes(self, reach: Reach) -> list[bool]:
        return sorted({padded for _, padded in self._cuts[reach]})

    def _padded_ranges(self, rows: DecodeRows, reach: Reach) -> TokenRanges:
        """The rows' stretches, as if their longest one were as long as there is room for."""
        spans = rows.token_ranges(reach)
        vars(spans).update(most_positions=self._sizes[reach].longest)
        spans.set_ungrouped(self._cuts[reach])
        return spans

    def _tensors(self, rows: DecodeRows, layout: PassLayout, reach: Reach) -> list[torch.Tensor]:
        """Bounds of positions, the places of each way, and which of padded places are seen and hidden."""
        spans, found = rows.token_ranges(reach), list[torch.Tensor]()
        found.append(spans.bounds[1])
        for padded in self._padding_modes(reach):
            flat = (layout.padded_places if padded else layout.packed_places)(spans).flat
            if not padded:  # place 0 is there, whatever lies in it, and nobody looks at it
                flat = torch.nn.functional.pad(flat, (0, self._sizes[reach].total - len(flat)))
            found.append(flat)
        if True in self._padding_modes(reach):
            lengths_B = spans.bounds[1].diff()
            seen_BS = torch.arange(spans.most_positions, device=lengths_B.device) < lengths_B[:, None]
            found += [seen_BS, ~seen_BS]
        return found
