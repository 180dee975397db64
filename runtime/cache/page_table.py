"""Rows of a packed lane and the pages that hold what they have cached: who takes which, who shares them with others,
and who goes on from whom. Nothing here looks at what is in a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..plan.placement.memory import PAGE_TOKENS
from .pages import PagePool, SharedPages, num_pages_for
from .partial_pages import PartialPages


@dataclass(kw_only=True)
class PagedRow:
    """One sequence: `past` positions are cached, in `pages`. `fills`: what it computes for others. `behind`: what it
    goes on from; the last page of that, if it is not full, is copied to `pages` in the row's first pass. So is that of
    another row that it goes on from. `tail`: its slot among the tails, where pages are quantised."""

    past: int = 0
    tail: int = 0
    pages: list[int] = field(default_factory=list)
    owned_prefix: SharedPages | None = None
    prefix: SharedPages | None = None
    copied_page: int | None = None  # the page that is copied in its next pass

    def dirty_pages(self, new: int, *, is_quantized: bool) -> list[int]:
        """The pages that a pass of so many new tokens writes to; of quantised ones, those that it fills."""
        if is_quantized:
            return self.pages[self.past // PAGE_TOKENS : (self.past + new) // PAGE_TOKENS]
        return self.pages[num_pages_for(self.past + 1) - 1 : num_pages_for(self.past + new) if new else 0]

    @property
    def page_copy(self) -> tuple[int, int, int] | None:
        """What it copies in its next pass: from which page, to which, and how many positions."""
        if self.copied_page is None:
            return None
        return self.copied_page, self.pages[self.past // PAGE_TOKENS], self.past % PAGE_TOKENS


class PageTable:
    """Rows are in the order of the lane's sequences. Pages are taken in `begin_pass` and given back by `remove` or
    `close`.

    `lies_close`: the pages that a pass leaves open lie side by side, as only these are carried back later.
    """

    def __init__(self, pool: PagePool, tails: PartialPages | None, *, keeps_open_pages_adjacent: bool):
        self._pool, self._tails, self._lies_close = pool, tails, keeps_open_pages_adjacent
        self._rows: list[PagedRow] = []
        self._new: list[int] = []  # of each row, how many tokens the pass carries
        self._last_page: int | None = None
        self._place_of: dict[int, int] = {}

    @property
    def past(self) -> list[int]:
        return [row.past for row in self._rows]

    @property
    def pages(self) -> list[list[int]]:
        """The pages of each row."""
        return [row.pages for row in self._rows]

    @property
    def tails(self) -> list[int]:
        """The slot of each row among the tails."""
        return [row.tail for row in self._rows]

    @property
    def page_places(self) -> dict[int, int]:
        """The place of each page that a layer which travels brings along: those of all rows, and those that rows copy
        from, ascending, so that few copies carry them."""
        return self._place_of

    @property
    def dirty_pages(self) -> list[int]:
        """Places of the pages that the pass writes to, ascending."""
        each, is_quantized = zip(self._rows, self._new, strict=True), self._tails is not None
        pages = [page for row, new in each for page in row.dirty_pages(new, is_quantized=is_quantized)]
        return sorted(self._place_of[page] for page in pages)

    @property
    def copies(self) -> list[tuple[int, int, int]]:
        """What rows copy that begin in this pass behind a page that is not full."""
        each = zip(self._rows, self._new, strict=True)
        return [copy for row, new in each if new and (copy := row.page_copy) is not None]

    def add(self, past: int = 0, *, owned_prefix: SharedPages | None = None, prefix: SharedPages | None = None) -> None:
        """A row for a new sequence, behind the others; `past` of its positions are taken for cached. `fills`: its pages
        are for those who go on from them. `behind`: it begins with these, which must be filled when it begins, by an
        earlier pass, or in this one by a row before it or by a lane before this one."""
        begin, tail = prefix.num_tokens if prefix is not None else past, self._tails.allocate() if self._tails else 0
        self._rows.append(PagedRow(past=begin, owned_prefix=owned_prefix, prefix=prefix, tail=tail))

    def remove(self, position: int) -> None:
        """Takes a row out; those behind it move up."""
        row = self._rows.pop(position)
        self._release_copied_page(row)
        if self._tails is not None:
            self._tails.free(row.tail)
        if row.prefix is not None:  # it has never begun
            self.release(row.prefix)
        if row.owned_prefix is None:
            self._pool.free(row.pages)
        else:
            row.owned_prefix.has_owner_left = True
            self._free_if_unused(row.owned_prefix)

    def close(self) -> None:
        """Takes all rows out."""
        while self._rows:
            self.remove(len(self._rows) - 1)

    def release(self, shared: SharedPages) -> None:
        """One user fewer, who has not begun or holds the pages by itself now."""
        shared.num_users -= 1
        self._free_if_unused(shared)

    def _free_if_unused(self, shared: SharedPages) -> None:
        if shared.has_owner_left and not shared.num_users:
            self._pool.free(shared.pages)
            shared.pages = []

    def reorder_rows(self, sources: Sequence[int]) -> None:
        """Row i goes on from what row `sources[i]` has cached: nothing is copied but, in the row's next pass, a page
        that is not full and that another goes on with. All rows between that share it have cached equally much."""
        rows, held = self._rows, [row.pages for row in self._rows]
        going = {source: source for i, source in enumerate(sources) if i == source}  # who goes on with its last page
        for i, source in enumerate(sources):
            going.setdefault(source, i)
        for i, (row, source) in enumerate(zip(rows, sources, strict=True)):
            if i == source:
                continue
            is_going, num_whole = going[source] == i, row.past // PAGE_TOKENS
            self._pool.share(held[source])
            row.pages = held[source] if is_going else held[source][:num_whole]
            row.copied_page = None if is_going or row.past % PAGE_TOKENS == 0 else held[source][num_whole]
        moved = [(i, source) for i, source in enumerate(sources) if i != source]
        for i, _ in moved:
            self._pool.free(held[i])
        if self._tails is not None and moved:
            # A page that is not full is a tail where pages are quantised: it is copied at once, and no page.
            self._tails.copy([rows[source].tail for _, source in moved], [rows[i].tail for i, _ in moved])
            for i, _ in moved:
                self._release_copied_page(rows[i])

    def begin_pass(self, new_tokens: Sequence[int]) -> None:
        """Takes the pages for as many tokens of each row."""
        self._new = list(new_tokens)
        growing = [(row, row.past + new) for row, new in zip(self._rows, self._new, strict=True) if new]
        for row, end in growing:
            if (behind := row.prefix) is not None:  # the pages that it goes on from, before it has any of its own
                num_whole = behind.num_tokens // PAGE_TOKENS
                assert self._tails is None or not behind.num_tokens % PAGE_TOKENS, "quantised pages are shared whole"
                row.pages = behind.pages[:num_whole]
                row.copied_page = behind.pages[num_whole] if behind.num_tokens % PAGE_TOKENS else None
                self._pool.share(behind.pages[: num_pages_for(behind.num_tokens)])
                row.prefix = None
                self.release(behind)
            if row.owned_prefix is not None:
                self._take(row, num_pages_for(end) - len(row.pages))
                row.owned_prefix.pages = row.pages  # all that it will have, as it grows
        if self._lies_close:  # the open ones behind those that the pass fills
            for row, end in growing:
                self._take(row, max(0, end // PAGE_TOKENS - len(row.pages)))
        for row, end in growing:
            self._take(row, num_pages_for(end) - len(row.pages))
        pages = {page for row in self._rows for page in row.pages}
        pages |= {row.copied_page for row, _ in growing if row.copied_page is not None}
        self._place_of = {page: place for place, page in enumerate(sorted(pages))}

    def _take(self, row: PagedRow, count: int) -> None:
        if count:
            row.pages += self._pool.allocate(count, self._last_page)
            self._last_page = row.pages[-1]

    def end_pass(self) -> None:
        """Counts the pass's tokens as cached."""
        for row, new in zip(self._rows, self._new, strict=True):
            row.past += new
            if new:
                self._release_copied_page(row)

    def _release_copied_page(self, row: PagedRow) -> None:
        if row.copied_page is not None:
            self._pool.free([row.copied_page])
            row.copied_page = None
