"""Static buffers for decode passes: a CUDA graph recorded over them can be replayed for every pass of the same sizes.

Tensor dimensions use the letters of paged.py; `Places` are indices in the KV cache (layout.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .layout import PassLayout, Places
from .views import DecodeRows, Reach, TokenRanges

STEPS = 2  # sizes per power of two: at most a third of the positions is padding
MIN_POSITIONS = 64  # smallest size

GroupKeys: TypeAlias = Mapping[Reach, frozenset[tuple[int, bool]]]  # arguments of `TokenRanges.groups`


def group_keys_from_rows(rows: DecodeRows) -> GroupKeys:
    """Arguments of all `TokenRanges.groups` calls of a finished pass."""
    return {reach: frozenset(spans.group_keys) for reach, spans in rows.reaches.items()}


@dataclass(frozen=True)
class Size:
    """Number of positions that layers of one `Reach` attend to: of the longest row, and of all rows."""

    longest: int
    total: int


Sizes: TypeAlias = Mapping[Reach, Size]


def fit_sizes(rows: DecodeRows, group_keys: GroupKeys) -> Sizes | None:
    """Rounded-up sizes that fit these rows; None if a layer would process them in several groups."""
    sizes = dict[Reach, Size]()
    for reach, keys in group_keys.items():
        spans = rows.token_ranges(reach)
        if any(len(spans.groups(max_positions, are_padded=padded)) > 1 for max_positions, padded in keys):
            return None
        sizes[reach] = Size(_round_up_size(spans.most_positions), _round_up_size(spans.num_positions))
    return sizes


def _round_up_size(number: int) -> int:
    step = max(MIN_POSITIONS, 1 << (number.bit_length() - 1)) // STEPS
    return -(-number // step) * step


class FixedRows:
    """Decoding rows and their layout in static buffers. Mutates its arguments: their cached tensors become the
    buffers."""

    def __init__(self, rows: DecodeRows, layout: PassLayout, group_keys: GroupKeys, sizes: Sizes):
        self._layout, self._group_keys, self._sizes = layout, group_keys, sizes
        self._spans = {reach: self._padded_ranges(rows, reach) for reach in group_keys}
        self._buffers = {reach: self._tensors(rows, layout, reach) for reach in group_keys}
        for reach, spans in self._spans.items():
            bounds, *tensors = self._buffers[reach]
            vars(spans).update(bounds=(spans.bounds[0], bounds))
            for padded, flat in zip(self._padding_modes(reach), tensors, strict=False):
                if padded:
                    vars(spans).update(visible_BS=tensors[-2], hidden_BS=tensors[-1])
                layout.set_places(spans, Places(flat), are_padded=padded)

    def fill(self, rows: DecodeRows, layout: PassLayout) -> None:
        """Copies another pass of the same sizes into the buffers. Mutates its arguments."""
        # In place: a recorded graph reads these addresses.
        self._layout.new_T.flat.copy_(layout.new_T.flat)
        for reach, buffers in self._buffers.items():
            self._padded_ranges(rows, reach)
            for target, source in zip(buffers, self._tensors(rows, layout, reach), strict=True):
                target.copy_(source)

    def _padding_modes(self, reach: Reach) -> list[bool]:
        return sorted({padded for _, padded in self._group_keys[reach]})

    def _padded_ranges(self, rows: DecodeRows, reach: Reach) -> TokenRanges:
        spans = rows.token_ranges(reach)
        vars(spans).update(most_positions=self._sizes[reach].longest)
        spans.set_ungrouped(self._group_keys[reach])
        return spans

    def _tensors(self, rows: DecodeRows, layout: PassLayout, reach: Reach) -> list[torch.Tensor]:
        """Position bounds, places for each padding mode, masks of visible and hidden padded places."""
        spans, tensors = rows.token_ranges(reach), list[torch.Tensor]()
        tensors.append(spans.bounds[1])
        for padded in self._padding_modes(reach):
            flat = (layout.padded_places if padded else layout.packed_places)(spans).flat
            if not padded:  # place 0 is always valid memory; padding is never attended to
                flat = torch.nn.functional.pad(flat, (0, self._sizes[reach].total - len(flat)))
            tensors.append(flat)
        if True in self._padding_modes(reach):
            lengths_B = spans.bounds[1].diff()
            visible_BS = torch.arange(spans.most_positions, device=lengths_B.device) < lengths_B[:, None]
            tensors += [visible_BS, ~visible_BS]
        return tensors
