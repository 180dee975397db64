"""Where the tokens of a pass, and all that is cached of its rows, lie in pages. Letters as in paged.py."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..plan.memory import PAGE_TOKENS
from .views import DecodeRows, Segment


class Run(NamedTuple):
    """Neighbouring positions of a row in neighbouring places: `num` from `place` on, the first being the `at`-th."""

    place: int
    at: int
    num: int


class PassLayout:
    """Of one pass. `pages[row]` are the numbers of a row's pages, in the memory that this layout is about."""

    def __init__(
        self,
        pages: Sequence[Sequence[int]],
        new_places: Sequence[tuple[int, int, int]],
        decoding: DecodeRows | None,
        segments: Sequence[Segment],
        device: torch.device,
        *,
        expands: bool,
    ):
        """`new_places`: (row, first, end) positions of the pass's tokens, in their order."""
        self._pages, self._device = pages, device
        new = [place for row, begin, end in new_places for place in self.places(row, begin, end)]
        self.new_T = self._pairs(new)
        self.tables_Bn = self._tables(decoding) if decoding is not None else None
        self.cached_S = self._pairs(self._cached(decoding, segments)) if expands else None

    def numbers(self, row: int) -> torch.Tensor:
        return torch.tensor(self._pages[row], device=self._device)

    def runs(self, row: int, begin: int, end: int) -> Iterator[Run]:
        places, at = self.places(row, begin, end), 0
        for i in range(1, len(places) + 1):
            if i == len(places) or places[i] != places[i - 1] + 1:
                yield Run(places[at], at, i - at)
                at = i

    def places(self, row: int, begin: int, end: int) -> list[int]:
        """Positions of a row, counted over all positions of all pages."""
        pages = self._pages[row]
        return [pages[i // PAGE_TOKENS] * PAGE_TOKENS + i % PAGE_TOKENS for i in range(begin, end)]

    def _tables(self, decoding: DecodeRows) -> torch.Tensor:
        """Short rows end in page 0, which they do not look at."""
        rows = [self._pages[row] for row in decoding.rows]
        width = max(map(len, rows))
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int32, device=self._device)

    def _cached(self, decoding: DecodeRows | None, segments: Sequence[Segment]) -> list[int]:
        """Of all positions of the pass's rows, in the order of `kv_start`; short rows of `decoding` end in repeats."""
        places: list[int] = []
        if decoding is not None:
            for row, past in zip(decoding.rows, decoding.past, strict=True):
                own = self.places(row, 0, past + 1)
                places += own + own[-1:] * (decoding.longest - len(own))
        for segment in segments:
            places += self.places(segment.row, 0, segment.end)
        return places

    def _pairs(self, places: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Page numbers and positions in them. Two indices, because pages may lie apart."""
        places_T = torch.tensor(places, device=self._device)
        return places_T // PAGE_TOKENS, places_T % PAGE_TOKENS


@dataclass(frozen=True)
class LayerKV:
    """Keys and values (N, P, H, D) of a layer, and where the pass's rows lie in them."""

    k_NPHD: torch.Tensor
    v_NPHD: torch.Tensor
    layout: PassLayout

    def row_of(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """All positions of the segment's row, (H, S, D) each, copied out of their pages."""
        numbers = self.layout.numbers(segment.row)
        k, v = (pages[numbers].flatten(0, 1)[: segment.end].transpose(0, 1) for pages in (self.k_NPHD, self.v_NPHD))
        return k, v
