"""Layout of a pass in the paged KV cache: where its tokens and the cached positions of its rows are stored.

A **place** is the index of a position in the cache: page number x page size + offset (a slot of vLLM's slot mapping). A
row is a sequence. Its **tail** is its last, partly filled page, which stays unquantized. With quantized pages, a token
attends to its own page unquantized and to all earlier pages quantized. So the keys and values that it sees depend only
on its position, not on the batch, on the prefill chunks, or on whether it is prefilled or decoded.

Letters of tensor dimensions: B rows, T tokens of the pass, S positions, N pages of the cache, n pages of a row, M other
pages, P positions of a page, H KV heads, D elements of a head, R tails, F tails that become full.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from ..plan.shape.dtypes import PAGE_TOKENS
from .page_codes import PageFormat, cast_to_compute
from .upload import upload
from .views import DecodeRows, Reach, Segment, TokenRanges


@dataclass(frozen=True, eq=False)
class Places:
    """Places in the paged cache: `page * PAGE_TOKENS + offset`."""

    flat: torch.Tensor

    @cached_property
    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Page numbers and offsets, to index pages that are not contiguous."""
        return self.flat // PAGE_TOKENS, self.flat % PAGE_TOKENS

    def gather(self, pages_NPHD: torch.Tensor) -> torch.Tensor:
        """Copies of the keys or values at these places (..., H, D)."""
        # One index instead of a pair takes a third of the host time.
        if not pages_NPHD.is_contiguous():
            return pages_NPHD[self.pairs]
        gathered = pages_NPHD.flatten(0, 1).index_select(0, self.flat.view(-1))
        return gathered if self.flat.dim() == 1 else gathered.unflatten(0, self.flat.shape)

    def scatter(self, pages_NPHD: torch.Tensor, states_SHD: torch.Tensor) -> None:
        """Writes keys or values to these places."""
        if pages_NPHD.is_contiguous():
            pages_NPHD.flatten(0, 1).index_copy_(0, self.flat, states_SHD)
        else:
            pages_NPHD[self.pairs] = states_SHD


class PlaceRun(NamedTuple):
    """Positions at consecutive places."""

    place: int  # of the first position
    offset: int  # of the first position, from the start of the range
    num_positions: int


class PageGather(NamedTuple):
    """Indices to gather the positions of decoding rows from quantized pages and tails."""

    tables_Bn: torch.Tensor  # page numbers
    lasts_B: torch.Tensor  # index in `tables_Bn` of the last page, which is replaced by the tail
    slots_B: torch.Tensor  # indices of the tails
    positions_BS: torch.Tensor  # positions to gather, counted from the first page of the table


class PassLayout:
    """Index tensors of one pass, which all its layers share. They are computed when first used."""

    def __init__(
        self,
        pages: Sequence[Sequence[int]],
        new_places: Sequence[tuple[int, int, int]],
        decoding: DecodeRows | None,
        segments: Sequence[Segment],
        device: torch.device,
        *,
        expands: bool,
        slots: Sequence[int] = (),
    ):
        """Makes `new_T`, the places of the pass's tokens, and if layers need it `cached_S`.

        `pages[row]`: page numbers of the row, in the cache or in a KV slot. `new_places`: (row, first position, end
        position) of the pass's tokens, in order. `expands`: layers expand latents (MLA) of all cached positions.
        `slots[row]`: index of the row's tail.
        """
        self._pages, self._device, self._decoding = pages, device, decoding
        self._segments, self._slots, self._page_gathers = segments, slots, dict[TokenRanges, PageGather]()
        self._numbers: dict[int, torch.Tensor] = {}
        self._packed: dict[TokenRanges, Places] = {}
        self._padded: dict[TokenRanges, Places] = {}
        new = [place for row, begin, end in new_places for place in self.places(row, begin, end)]
        self.new_T = Places(upload(new, device))
        # Places of all positions of all rows, in `kv_start` order; decoding rows are padded by repeating the last one.
        self.cached_S: Places | None = None
        if expands:
            cached = list[int]()
            if decoding is not None:
                for row, past in zip(decoding.rows, decoding.past, strict=True):
                    own = self.places(row, 0, past + 1)
                    cached += own + own[-1:] * (decoding.longest - len(own))
            for segment in segments:
                cached += self.places(segment.row, 0, segment.end)
            self.cached_S = Places(upload(cached, device))

    def page_numbers(self, row: int) -> torch.Tensor:
        """Page numbers of a row."""
        if row not in self._numbers:
            self._numbers[row] = upload(self._pages[row], self._device)
        return self._numbers[row]

    def packed_places(self, ranges: TokenRanges) -> Places:
        """Places of all positions that the ranges attend to, concatenated (S)."""
        if ranges not in self._packed:
            firsts_B, tables_Bn = self._page_tables(ranges)
            bounds, total = ranges.bounds[1], ranges.num_positions
            numbers = torch.arange(len(ranges.parts), device=self._device)
            part_S = numbers.repeat_interleave(bounds.diff(), output_size=total)
            position_S = torch.arange(total, device=self._device) + (firsts_B - bounds[:-1])[part_S]
            self._packed[ranges] = _flat_places(tables_Bn[part_S, position_S // PAGE_TOKENS], position_S)
        return self._packed[ranges]

    def padded_places(self, ranges: TokenRanges) -> Places:
        """Places of the positions that each range attends to (B, S), padded by repeating the last one."""
        if ranges not in self._padded:
            firsts_B, tables_Bn = self._page_tables(ranges)
            lasts_B = ranges.bounds[1].diff() - 1
            index_BS = torch.arange(ranges.most_positions, device=self._device).minimum(lasts_B[:, None])
            position_BS = index_BS + firsts_B[:, None]
            self._padded[ranges] = _flat_places(tables_Bn.gather(1, position_BS // PAGE_TOKENS), position_BS)
        return self._padded[ranges]

    def set_places(self, ranges: TokenRanges, places: Places, *, are_padded: bool) -> None:
        """Sets the places that `packed_places` or `padded_places` return for these ranges."""
        (self._padded if are_padded else self._packed)[ranges] = places

    def page_gather(self, ranges: TokenRanges) -> PageGather:
        """Indices to gather the positions that each range attends to, padded by repeating the last one."""
        if ranges not in self._page_gathers:
            firsts_B, tables_Bn = self._page_tables(ranges)
            counts_B = ranges.bounds[1].diff()
            index_BS = torch.arange(ranges.most_positions, device=self._device).minimum(counts_B[:, None] - 1)
            position_BS = index_BS + firsts_B[:, None]
            lasts_B = (firsts_B + counts_B - 1) // PAGE_TOKENS
            slots_B = upload([self._slots[part.row] for part in ranges.parts], self._device)
            self._page_gathers[ranges] = PageGather(tables_Bn, lasts_B, slots_B, position_BS)
        return self._page_gathers[ranges]

    @cached_property
    def filled_M(self) -> torch.Tensor:
        """Numbers of the pages that become full in this pass: of decoding rows, then of prompts."""
        decoding = self._decoding
        rows = [] if decoding is None else [(*each, 1) for each in zip(decoding.rows, decoding.past, strict=True)]
        rows += [(segment.row, segment.past, segment.new) for segment in self._segments]
        filled = (self._pages[row][past // PAGE_TOKENS : (past + new) // PAGE_TOKENS] for row, past, new in rows)
        return upload([page for pages in filled for page in pages], self._device)

    @cached_property
    def slots_B(self) -> torch.Tensor:
        """Indices of the tails of decoding rows."""
        assert self._decoding is not None, "rows that decode have tails"
        return upload([self._slots[row] for row in self._decoding.rows], self._device)

    @cached_property
    def filling_F(self) -> torch.Tensor:
        """Indices of the tails of decoding rows that become full in this pass."""
        assert self._decoding is not None, "rows that decode have tails"
        rows = zip(self._decoding.rows, self._decoding.past, strict=True)
        return upload([self._slots[row] for row, past in rows if (past + 1) % PAGE_TOKENS == 0], self._device)

    @cached_property
    def offsets_B(self) -> torch.Tensor:
        """Offsets of decoding tokens in their pages."""
        assert self._decoding is not None, "rows that decode have tails"
        return upload([past % PAGE_TOKENS for past in self._decoding.past], self._device)

    def slot(self, row: int) -> int:
        """Index of the row's tail."""
        return self._slots[row]

    def _page_tables(self, ranges: TokenRanges) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets (B) of each range's first position in its page, and page numbers (B, n) of its positions.

        Page numbers are padded with page 0.
        """
        parts = ranges.parts
        tables = [self._pages[p.row][p.first // PAGE_TOKENS : -(-p.end // PAGE_TOKENS)] for p in parts]
        width = max(map(len, tables))
        rows = zip(parts, tables, strict=True)
        # One transfer for both tensors.
        both = upload([[p.first % PAGE_TOKENS, *t, *[0] * (width - len(t))] for p, t in rows], self._device)
        return both[:, 0], both[:, 1:]

    def runs(self, row: int, begin: int, end: int) -> Iterator[PlaceRun]:
        """Divides positions [begin, end) of a row into runs of consecutive places."""
        places, begin_index = self.places(row, begin, end), 0
        for i in range(1, len(places) + 1):
            if i == len(places) or places[i] != places[i - 1] + 1:
                yield PlaceRun(places[begin_index], begin_index, i - begin_index)
                begin_index = i

    def places(self, row: int, begin: int, end: int) -> list[int]:
        """Places of positions [begin, end) of a row."""
        pages = self._pages[row]
        return [pages[i // PAGE_TOKENS] * PAGE_TOKENS + i % PAGE_TOKENS for i in range(begin, end)]

    @cached_property
    def tables_Bn(self) -> torch.Tensor:
        """Page numbers of decoding rows, padded with page 0, which kernels do not read."""
        assert self._decoding is not None, "rows that decode have page tables"
        rows = [self._pages[row] for row in self._decoding.rows]
        width = max(map(len, rows))
        return upload([[*row, *[0] * (width - len(row))] for row in rows], self._device, torch.int32)


def _flat_places(numbers: torch.Tensor, positions: torch.Tensor) -> Places:
    return Places(numbers * PAGE_TOKENS + positions % PAGE_TOKENS)


@dataclass(frozen=True)
class LayerKV:
    """The cached keys and values of a layer, and the layout of the pass in them."""

    k_NPHD: torch.Tensor
    v_NPHD: torch.Tensor
    layout: PassLayout
    dtype: torch.dtype | None = field(default=None, kw_only=True)  # dtype of gathered tensors; None: as stored

    @property
    def likes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors with the head sizes and dtype of gathered keys and values."""
        if self.dtype is None:
            return self.k_NPHD, self.v_NPHD
        k, v = (pages.new_empty(0, pages.shape[3], dtype=self.dtype) for pages in (self.k_NPHD, self.v_NPHD))
        return k, v

    @property
    def position_bytes(self) -> int:
        """Bytes of the gathered keys and values of one position."""
        num_numbers = self.k_NPHD.shape[2] * (self.k_NPHD.shape[3] + self.v_NPHD.shape[3])
        return num_numbers * (self.dtype or self.k_NPHD.dtype).itemsize

    def _to_compute_dtype(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.dtype is None else cast_to_compute(x, self.dtype)

    def gather_row(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all positions of the segment's row, copied, (H, S, D) each."""
        numbers = self.layout.page_numbers(segment.row)
        k, v = (pages[numbers].flatten(0, 1)[: segment.end].transpose(0, 1) for pages in (self.k_NPHD, self.v_NPHD))
        return self._to_compute_dtype(k), self._to_compute_dtype(v)

    def gather_packed(self, ranges: TokenRanges) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the ranges attend to, copied and concatenated, (S, H, D) each."""
        places = self.layout.packed_places(ranges)
        return self._to_compute_dtype(places.gather(self.k_NPHD)), self._to_compute_dtype(places.gather(self.v_NPHD))

    def gather_padded(self, ranges: TokenRanges) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that each range attends to, copied, (B, S, H, D) each, padded by repeating the last one."""
        places = self.layout.padded_places(ranges)
        return self._to_compute_dtype(places.gather(self.k_NPHD)), self._to_compute_dtype(places.gather(self.v_NPHD))


def copy_places(kv: LayerKV, pairs: tuple[Places, Places]) -> None:
    """Copies keys and values from the places `pairs[0]` to `pairs[1]`, which must be disjoint."""
    source, target = pairs
    for pages in (kv.k_NPHD, kv.v_NPHD):
        target.scatter(pages, source.gather(pages))


Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


@dataclass(frozen=True)
class QuantizedKV:
    """Keys and values of a layer in quantized pages."""

    format: PageFormat
    pages: torch.Tensor  # uint8 (N, bytes)
    tails: Pair  # (R, P, H, D) each
    # By row of a prompt: its unquantized positions (S, H, D) each, from the first page into which the pass writes.
    spans: Mapping[int, Pair]
    layout: PassLayout

    @property
    def likes(self) -> Pair:
        """Two tensors with the head sizes and dtype of gathered keys and values."""
        return self.tails

    @property
    def position_bytes(self) -> int:
        """Bytes of the gathered keys and values of one position."""
        return self.tails[0][0, 0].nbytes + self.tails[1][0, 0].nbytes

    def gather_for_segment(self, segment: Segment, reach: Reach) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values (H, S, D) for the segment's tokens, and a mask (T, S) that is True where a token sees none.

        Positions are those of dequantized pages, then the unquantized ones from the first page that the pass writes.
        """
        pages, hidden_TS = segment.paged_view(reach, PAGE_TOKENS)
        k_SHD, v_SHD = self.spans[segment.row]
        if pages:
            numbers = self.layout.page_numbers(segment.row)[pages.start : pages.stop]
            stored = self.format.decode(self.pages[numbers], k_SHD.dtype)
            k_SHD, v_SHD = (torch.cat([x.flatten(0, 1), y]) for x, y in zip(stored, (k_SHD, v_SHD), strict=True))
        return k_SHD.transpose(0, 1), v_SHD.transpose(0, 1), hidden_TS

    def gather_padded(self, ranges: TokenRanges) -> Pair:
        """Keys and values that each decoding row attends to, (B, S, H, D) each, padded by repeating the last one."""
        indices = self.layout.page_gather(ranges)
        stored = self.format.decode(self.pages[indices.tables_Bn.flatten()], self.tails[0].dtype)
        rows_B = torch.arange(len(indices.slots_B), device=indices.slots_B.device)
        gathered = []
        for pages, tails in zip(stored, self.tails, strict=True):
            pages_BnPHD = pages.unflatten(0, indices.tables_Bn.shape)
            pages_BnPHD[rows_B, indices.lasts_B] = tails[indices.slots_B]
            gathered.append(pages_BnPHD.flatten(1, 2)[rows_B[:, None], indices.positions_BS])
        return gathered[0], gathered[1]
