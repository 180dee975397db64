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
    fills: SharedPages | None = None
    behind: SharedPages | None = None
    copied: int | None = None  # the page that is copied in its next pass

    def changed(self, new: int, *, is_quantized: bool) -> list[int]:
        """The pages that a pass of so many new tokens writes to; of quantised ones, those that it fills."""
        if is_quantized:
            return self.pages[self.past // PAGE_TOKENS : (self.past + new) // PAGE_TOKENS]
        return self.pages[num_pages_for(self.past + 1) - 1 : num_pages_for(self.past + new) if new else 0]

    @property
    def copy(self) -> tuple[int, int, int] | None:
        """What it copies in its next pass: from which page, to which, and how many positions."""
        if self.copied is None:
            return None
        return self.copied, self.pages[self.past // PAGE_TOKENS], self.past % PAGE_TOKENS


class PageTable:
    """Rows are in the order of the lane's sequences. Pages are taken in `begin_pass` and given back by `remove` or
    `close`.

    `lies_close`: the pages that a pass leaves open lie side by side, as only these are carried back later.
    """

    def __init__(self, pool: PagePool, tails: PartialPages | None, *, lies_close: bool):
        self._pool, self._tails, self._lies_close = pool, tails, lies_close
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
    def place_of(self) -> dict[int, int]:
        """The place of each page that a layer which travels brings along: those of all rows, and those that rows copy
        from, ascending, so that few copies carry them."""
        return self._place_of

    @property
    def changed(self) -> list[int]:
        """Places of the pages that the pass writes to, ascending."""
        each, is_quantized = zip(self._rows, self._new, strict=True), self._tails is not None
        pages = [page for row, new in each for page in row.changed(new, is_quantized=is_quantized)]
        return sorted(self._place_of[page] for page in pages)

    @property
    def copies(self) -> list[tuple[int, int, int]]:
        """What rows copy that begin in this pass behind a page that is not full."""
        each = zip(self._rows, self._new, strict=True)
        return [copy for row, new in each if new and (copy := row.copy) is not None]

    def add(self, past: int = 0, *, fills: SharedPages | None = None, behind: SharedPages | None = None) -> None:
        """A row for a new sequence, behind the others; `past` of its positions are taken for cached. `fills`: its pages
        are for those who go on from them. `behind`: it begins with these, which must be filled when it begins, by an
        earlier pass, or in this one by a row before it or by a lane before this one."""
        begin, tail = behind.num_tokens if behind is not None else past, self._tails.take() if self._tails else 0
        self._rows.append(PagedRow(past=begin, fills=fills, behind=behind, tail=tail))

    def remove(self, position: int) -> None:
        """Takes a row out; those behind it move up."""
        row = self._rows.pop(position)
        self._end_copy(row)
        if self._tails is not None:
            self._tails.give(row.tail)
        if row.behind is not None:  # it has never begun
            self.release(row.behind)
        if row.fills is None:
            self._pool.give(row.pages)
        else:
            row.fills.is_left = True
            self._drop(row.fills)

    def close(self) -> None:
        """Takes all rows out."""
        while self._rows:
            self.remove(len(self._rows) - 1)

    def release(self, shared: SharedPages) -> None:
        """One user fewer, who has not begun or holds the pages by itself now."""
        shared.num_users -= 1
        self._drop(shared)

    def _drop(self, shared: SharedPages) -> None:
        if shared.is_left and not shared.num_users:
            self._pool.give(shared.pages)
            shared.pages = []

    def follow(self, sources: Sequence[int]) -> None:
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
            row.copied = None if is_going or row.past % PAGE_TOKENS == 0 else held[source][num_whole]
        moved = [(i, source) for i, source in enumerate(sources) if i != source]
        for i, _ in moved:
            self._pool.give(held[i])
        if self._tails is not None and moved:
            # A page that is not full is a tail where pages are quantised: it is copied at once, and no page.
            self._tails.copy([rows[source].tail for _, source in moved], [rows[i].tail for i, _ in moved])
            for i, _ in moved:
                self._end_copy(rows[i])

    def begin_pass(self, new_tokens: Sequence[int]) -> None:
        """Takes the pages for as many tokens of each row."""
        self._new = list(new_tokens)
        growing = [(row, row.past + new) for row, new in zip(self._rows, self._new, strict=True) if new]
        for row, end in growing:
            if (behind := row.behind) is not None:  # the pages that it goes on from, before it has any of its own
                num_whole = behind.num_tokens // PAGE_TOKENS
                assert self._tails is None or not behind.num_tokens % PAGE_TOKENS, "quantised pages are shared whole"
                row.pages = behind.pages[:num_whole]
                row.copied = behind.pages[num_whole] if behind.num_tokens % PAGE_TOKENS else None
                self._pool.share(behind.pages[: num_pages_for(behind.num_tokens)])
                row.behind = None
                self.release(behind)
            if row.fills is not None:
                self._take(row, num_pages_for(end) - len(row.pages))
                row.fills.pages = row.pages  # all that it will have, as it grows
        if self._lies_close:  # the open ones behind those that the pass fills
            for row, end in growing:
                self._take(row, max(0, end // PAGE_TOKENS - len(row.pages)))
        for row, end in growing:
            self._take(row, num_pages_for(end) - len(row.pages))
        held = {page for row in self._rows for page in row.pages}
        held |= {row.copied for row, _ in growing if row.copied is not None}
        self._place_of = {page: place for place, page in enumerate(sorted(held))}

    def _take(self, row: PagedRow, count: int) -> None:
        if count:
            row.pages += self._pool.take(count, self._last_page)
            self._last_page = row.pages[-1]

    def end_pass(self) -> None:
        """Counts the pass's tokens as cached."""
        for row, new in zip(self._rows, self._new, strict=True):
            row.past += new
            if new:
                self._end_copy(row)

    def _end_copy(self, row: PagedRow) -> None:
        if row.copied is not None:
            self._pool.give([row.copied])
            row.copied = None
