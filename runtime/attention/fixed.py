"""Static buffers for the index tensors of decode passes, so that a CUDA graph can be replayed for many passes.

A graph reads the addresses that it was recorded with. Before each replay, the next pass is copied into these buffers,
padded to the sizes of the recording. `Places` are indices in the KV cache (layout.py). A `Reach` is the attention span
of a layer; layers with the same reach use the same index tensors. Letters: B rows (sequences), S positions, T tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .layout import PassLayout, Places
from .views import DecodeRows, Reach, TokenRanges

STEPS = 2  # number of sizes per power of two: so at most a third of the positions is padding
MIN_POSITIONS = 64

GroupKeys: TypeAlias = Mapping[Reach, frozenset[tuple[int, bool]]]  # arguments of `TokenRanges.groups`


def group_keys_from_rows(rows: DecodeRows) -> GroupKeys:
    """The arguments of all `TokenRanges.groups` calls in a finished pass."""
    return {reach: frozenset(spans.group_keys) for reach, spans in rows.reaches.items()}


@dataclass(frozen=True)
class Size:
    """Number of positions that layers with the same reach attend to."""

    longest: int  # of the longest row
    total: int  # of all rows


Sizes: TypeAlias = Mapping[Reach, Size]


def fit_sizes(rows: DecodeRows, group_keys: GroupKeys) -> Sizes | None:
    """Rounded-up sizes into which these rows fit; None if a layer would process the rows in several groups."""
    sizes = dict[Reach, Size]()
    for reach, keys in group_keys.items():
        ranges = rows.token_ranges(reach)
        if any(len(ranges.groups(max_positions, are_padded=padded)) > 1 for max_positions, padded in keys):
            return None
        sizes[reach] = Size(_round_up_size(ranges.most_positions), _round_up_size(ranges.num_positions))
    return sizes


def _round_up_size(number: int) -> int:
    step = max(MIN_POSITIONS, 1 << (number.bit_length() - 1)) // STEPS
    return -(-number // step) * step


class FixedRows:
    """Index tensors of decoding rows in static buffers.

    The constructor changes `rows` and `layout`: their cached tensors become the buffers, so that a graph that is
    recorded with them reads the buffers.
    """

    def __init__(self, rows: DecodeRows, layout: PassLayout, group_keys: GroupKeys, sizes: Sizes):
        self._layout, self._group_keys, self._sizes = layout, group_keys, sizes
        self._ranges = {reach: self._padded_ranges(rows, reach) for reach in group_keys}
        self._buffers = {reach: self._tensors(rows, layout, reach) for reach in group_keys}
        for reach, ranges in self._ranges.items():
            bounds, *tensors = self._buffers[reach]
            vars(ranges).update(bounds=(ranges.bounds[0], bounds))  # sets a cached property
            for padded, flat in zip(self._padding_modes(reach), tensors, strict=False):
                if padded:
                    vars(ranges).update(visible_BS=tensors[-2], hidden_BS=tensors[-1])
                layout.set_places(ranges, Places(flat), are_padded=padded)

    def fill(self, rows: DecodeRows, layout: PassLayout) -> None:
        """Copies another pass, which fits the same sizes, into the buffers. Changes `rows` and `layout`."""
        # In place: a recorded graph reads these addresses.
        self._layout.new_T.flat.copy_(layout.new_T.flat)
        for reach, buffers in self._buffers.items():
            self._padded_ranges(rows, reach)
            for target, source in zip(buffers, self._tensors(rows, layout, reach), strict=True):
                target.copy_(source)

    def _padding_modes(self, reach: Reach) -> list[bool]:
        return sorted({padded for _, padded in self._group_keys[reach]})

    def _padded_ranges(self, rows: DecodeRows, reach: Reach) -> TokenRanges:
        """The token ranges of the rows, padded to the fixed size of the longest row, in a single group."""
        ranges = rows.token_ranges(reach)
        vars(ranges).update(most_positions=self._sizes[reach].longest)
        ranges.set_ungrouped(self._group_keys[reach])
        return ranges

    def _tensors(self, rows: DecodeRows, layout: PassLayout, reach: Reach) -> list[torch.Tensor]:
        """Tensors for the buffers: position bounds, places for each padding mode, and masks if one mode is padded."""
        ranges, tensors = rows.token_ranges(reach), list[torch.Tensor]()
        tensors.append(ranges.bounds[1])
        for padded in self._padding_modes(reach):
            flat = (layout.padded_places if padded else layout.packed_places)(ranges).flat
            if not padded:  # pad with place 0, which always exists; no token attends to it
                flat = torch.nn.functional.pad(flat, (0, self._sizes[reach].total - len(flat)))
            tensors.append(flat)
        if True in self._padding_modes(reach):
            lengths_B = ranges.bounds[1].diff()
            visible_BS = torch.arange(ranges.most_positions, device=lengths_B.device) < lengths_B[:, None]
            tensors += [visible_BS, ~visible_BS]
        return tensors
