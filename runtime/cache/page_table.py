"""The page table of a packed lane (micro-batch): the page numbers of each row, some of them shared with other rows.

A row is one sequence of the lane. Each row counts as a holder of its pages; a page is freed when it has no holder.
Positions are the tokens of a sequence; a row's last page may be partial. Quantized pages are whole: each row has a tail
instead, an unquantized buffer for its partial page (see partial_pages.py)."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..plan.placement.memory import PAGE_TOKENS
from .pages import PagePool, SharedPages, num_pages_for
from .partial_pages import PartialPages


@dataclass(kw_only=True)
class PagedRow:
    """One sequence, with `past` positions cached in `pages`."""

    past: int = 0
    tail: int = 0  # index of its tail
    pages: list[int] = field(default_factory=list)
    owned_prefix: SharedPages | None = None  # shared prefix that this row computes for others
    prefix: SharedPages | None = None  # shared prefix that this row continues from; None after its first pass
    copied_page: int | None = None  # partial page of another row, to copy in the next pass of this row

    def dirty_pages(self, new: int, *, is_quantized: bool) -> list[int]:
        """The pages that a pass of `new` tokens writes to. Quantized pages are written only when they are full."""
        if is_quantized:
            return self.pages[self.past // PAGE_TOKENS : (self.past + new) // PAGE_TOKENS]
        return self.pages[num_pages_for(self.past + 1) - 1 : num_pages_for(self.past + new) if new else 0]

    @property
    def page_copy(self) -> tuple[int, int, int] | None:
        """(source page, target page, number of positions) to copy in the next pass, or None."""
        if self.copied_page is None:
            return None
        return self.copied_page, self.pages[self.past // PAGE_TOKENS], self.past % PAGE_TOKENS


class PageTable:
    """The rows of a lane, in the order of its sequences. `tails`: for quantized pages, else None.
    `keeps_open_pages_adjacent`: allocates the partial pages of a pass next to each other, since later passes write only
    to these, and adjacent pages are copied together. `may_hold_ahead`: a row may hold pages that it needs only later,
    as the pool has enough for all rows at their token limits."""

    def __init__(
        self,
        pool: PagePool,
        tails: PartialPages | None,
        *,
        keeps_open_pages_adjacent: bool,
        may_hold_ahead: bool = False,
    ):
        self._pool, self._tails, self._keeps_open_pages_adjacent = pool, tails, keeps_open_pages_adjacent
        self._may_hold_ahead = may_hold_ahead and tails is None and not keeps_open_pages_adjacent
        self._rows: list[PagedRow] = []
        self._new: list[int] = []  # number of tokens of each row in the pass
        self._last_page: int | None = None  # the page that was allocated last
        self._page_places: dict[int, int] = {}

    @property
    def past(self) -> list[int]:
        return [row.past for row in self._rows]

    @property
    def pages(self) -> list[list[int]]:
        """Page numbers of each row."""
        return [row.pages for row in self._rows]

    @property
    def tails(self) -> list[int]:
        """Index of each row's tail."""
        return [row.tail for row in self._rows]

    @property
    def page_places(self) -> dict[int, int]:
        """Page number -> index of the page in the KV slot, the device buffer to which an offloaded layer's pages are
        copied. Has the pages of all rows and the pages to copy from. Indices are in the order of page numbers, so that
        few copies transfer the pages."""
        return self._page_places

    @property
    def dirty_pages(self) -> list[int]:
        """Indices, as in `page_places`, of the pages that the pass writes to, ascending."""
        rows, is_quantized = zip(self._rows, self._new, strict=True), self._tails is not None
        pages = [page for row, new in rows for page in row.dirty_pages(new, is_quantized=is_quantized)]
        return sorted(self._page_places[page] for page in pages)

    @property
    def copies(self) -> list[tuple[int, int, int]]:
        """The partial pages to copy in this pass; see `PagedRow.page_copy`."""
        rows = zip(self._rows, self._new, strict=True)
        return [copy for row, new in rows if new and (copy := row.page_copy) is not None]

    def add(self, past: int = 0, *, owned_prefix: SharedPages | None = None, prefix: SharedPages | None = None) -> None:
        """Appends a row with `past` cached positions. `owned_prefix`: the shared prefix that the row computes for
        others. `prefix`: the shared prefix that it continues from, which an earlier pass has computed, or an earlier
        row computes in the same pass."""
        past = past if prefix is None else prefix.num_tokens
        tail = self._tails.allocate() if self._tails else 0
        self._rows.append(PagedRow(past=past, owned_prefix=owned_prefix, prefix=prefix, tail=tail))

    def remove(self, position: int) -> None:
        """Removes a row; later rows move up."""
        row = self._rows.pop(position)
        self._release_copied_page(row)
        if self._tails is not None:
            self._tails.free(row.tail)
        if row.prefix is not None:  # the row has not started: it still counts as a user of its prefix
            self.release(row.prefix)
        if row.owned_prefix is None:
            self._pool.free(row.pages)
        else:
            row.owned_prefix.has_owner_left = True
            self._free_if_unused(row.owned_prefix)

    def take_back(self, position: int, past: int) -> None:
        """Uncaches the positions of a row after the first `past` ones. The row keeps its pages."""
        assert self._tails is None, "quantized pages cannot be written again"
        self._rows[position].past = past

    def close(self) -> None:
        """Removes all rows."""
        while self._rows:
            self.remove(len(self._rows) - 1)

    def release(self, shared: SharedPages) -> None:
        """Removes one waiting user of a shared prefix, which has left or is now itself a holder of the pages."""
        shared.num_users -= 1
        self._free_if_unused(shared)

    def _free_if_unused(self, shared: SharedPages) -> None:
        if shared.has_owner_left and not shared.num_users:
            self._pool.free(shared.pages)
            shared.pages = []

    def reorder_rows(self, sources: Sequence[int]) -> None:
        """Makes row i continue from row `sources[i]`, for beam search. Full pages are shared. If several rows continue
        from one source, one of them takes its partial last page, and the others copy it in their next pass. Rows that
        share pages must have equal `past`."""
        rows, old_pages = self._rows, [row.pages for row in self._rows]
        # Source -> the row that takes its partial last page: the source itself if it continues, else the first row.
        tail_takers = {source: source for i, source in enumerate(sources) if i == source}
        for i, source in enumerate(sources):
            tail_takers.setdefault(source, i)
        for i, (row, source) in enumerate(zip(rows, sources, strict=True)):
            if i == source:
                continue
            takes_tail, num_whole = tail_takers[source] == i, row.past // PAGE_TOKENS
            self._pool.share(old_pages[source])  # also the partial page, which must stay until it is copied
            row.pages = old_pages[source] if takes_tail else old_pages[source][:num_whole]
            row.copied_page = None if takes_tail or row.past % PAGE_TOKENS == 0 else old_pages[source][num_whole]
        moved = [(i, source) for i, source in enumerate(sources) if i != source]
        for i, _ in moved:
            self._pool.free(old_pages[i])
        if self._tails is not None and moved:
            # With quantized pages, partial pages are in tails, which are copied here: the next pass copies no page.
            self._tails.copy([rows[source].tail for _, source in moved], [rows[i].tail for i, _ in moved])
            for i, _ in moved:
                self._release_copied_page(rows[i])

    def begin_pass(self, new_tokens: Sequence[int]) -> None:
        """Begins a pass with `new_tokens[i]` tokens of row i. Allocates pages for them."""
        self._new = list(new_tokens)
        growing = [(row, row.past + new) for row, new in zip(self._rows, self._new, strict=True) if new]
        for row, end in growing:
            if (prefix := row.prefix) is not None:  # the row's first pass: it begins with the pages of its prefix
                num_whole = prefix.num_tokens // PAGE_TOKENS
                assert self._tails is None or not prefix.num_tokens % PAGE_TOKENS, "quantized pages are shared whole"
                row.pages = prefix.pages[:num_whole]
                row.copied_page = prefix.pages[num_whole] if prefix.num_tokens % PAGE_TOKENS else None
                self._pool.share(prefix.pages[: num_pages_for(prefix.num_tokens)])
                row.prefix = None
                self.release(prefix)
            if row.owned_prefix is not None:
                self._allocate(row, num_pages_for(end) - len(row.pages))
                row.owned_prefix.pages = row.pages  # the same list object, which grows with the row
        if self._keeps_open_pages_adjacent:  # first the pages that the pass fills, then the partial ones
            for row, end in growing:
                self._allocate(row, max(0, end // PAGE_TOKENS - len(row.pages)))
        for row, end in growing:
            self._allocate(row, max(0, num_pages_for(end) - len(row.pages)))
        pages = {page for row in self._rows for page in row.pages}
        pages |= {row.copied_page for row, _ in growing if row.copied_page is not None}
        self._page_places = {page: place for place, page in enumerate(sorted(pages))}

    def _allocate(self, row: PagedRow, count: int) -> None:
        if count:
            row.pages += self._pool.allocate(count, self._last_page)
            self._last_page = row.pages[-1]

    def num_free_positions(self, position: int, new: int) -> int:
        """Number of positions after the next `new` ones of a row that can be written and taken back, and need no page
        that is not sure to be free. Those that complete a quantized page do not count, as a full page cannot be changed
        any more."""
        if self._may_hold_ahead:
            return sys.maxsize
        row = self._rows[position]
        left = -(row.past + new) % PAGE_TOKENS
        return left if self._tails is None else max(0, left - 1)

    def end_pass(self, num_kept: Sequence[int] | None = None) -> None:
        """Counts tokens of the pass as cached: the first `num_kept[i]` tokens of row i; None: all. Releases the pages
        that were copied from."""
        for row, new, kept in zip(self._rows, self._new, num_kept or self._new, strict=True):
            row.past += kept
            if new:
                self._release_copied_page(row)

    def _release_copied_page(self, row: PagedRow) -> None:
        if row.copied_page is not None:
            self._pool.free([row.copied_page])
            row.copied_page = None
