"""A layer's quantised pages as a pass sees them.

A token sees its own page as it was computed and all pages before it as they are kept. So what it sees follows from its
position alone: not from which tokens are beside it in a pass, how its prompt was cut, or whether it is decoded.

Letters as in paged.py; R rows that have a tail, M pages.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..plan.shape.dtypes import PAGE_TOKENS
from .layout import PassLayout
from .page_codes import PageFormat
from .stretches import Stretches
from .views import Reach, Segment

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


@dataclass(frozen=True)
class QuantizedKV:
    """`pages`, uint8 (N, bytes). `tails` (R, P, H, D): the page of each row's last position, as computed. `spans`: of
    each segment's row, its positions (S, H, D) from the begin of the first page that the pass adds to."""

    format: PageFormat
    pages: torch.Tensor
    tails: Pair
    spans: Mapping[int, Pair]
    layout: PassLayout

    @property
    def likes(self) -> Pair:
        """Tensors of the heads' sizes and dtype."""
        return self.tails

    @property
    def position_bytes(self) -> int:
        return self.tails[0][0, 0].nbytes + self.tails[1][0, 0].nbytes

    def seen_by(self, segment: Segment, reach: Reach) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values (H, S, D) that the segment's tokens look at, and which of them are hidden from each (T, S):
        pages as they are kept, then those that the pass adds to, as computed."""
        view = segment.paged_view(reach, PAGE_TOKENS)
        k_SHD, v_SHD = self.spans[segment.row]
        if view.pages:
            numbers = self.layout.numbers(segment.row)[view.pages.start : view.pages.stop]
            kept = self.format.decode(self.pages[numbers], k_SHD.dtype)
            k_SHD, v_SHD = (torch.cat([x.flatten(0, 1), y]) for x, y in zip(kept, (k_SHD, v_SHD), strict=True))
        return k_SHD.transpose(0, 1), v_SHD.transpose(0, 1), view.hidden

    def padded(self, stretches: Stretches) -> Pair:
        """What rows that decode look at, (B, S, H, D) each; short ones end in repeats."""
        places = self.layout.by_page(stretches)
        kept = self.format.decode(self.pages[places.tables_Bn.flatten()], self.tails[0].dtype)
        rows_B = torch.arange(len(places.slots_B), device=places.slots_B.device)
        found = []
        for pages, tails in zip(kept, self.tails, strict=True):
            pages_BnPHD = pages.unflatten(0, places.tables_Bn.shape)
            pages_BnPHD[rows_B, places.lasts_B] = tails[places.slots_B]
            found.append(pages_BnPHD.flatten(1, 2)[rows_B[:, None], places.at_BS])
        return found[0], found[1]
