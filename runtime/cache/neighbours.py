"""Page numbers for keys and values that travel: those of one lane side by side, so that few copies carry them all."""

from bisect import bisect_right
from collections.abc import Iterable

from ..plan.placement.kv import stretches
from .pages import PagePool


class NeighbourPool(PagePool):
    """Hands out pages behind those that their lane took last, as long as these are free. Otherwise the lane begins in
    the middle of the longest free stretch, as whoever has the pages in front of it will grow as well."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._given: list[int] = []
        self._stretches = [range(num_pages)] if num_pages else []  # free, ascending, with taken pages between them

    @property
    def num_free(self) -> int:
        return sum(map(len, self._stretches))

    def take(self, count: int, behind: int | None = None) -> list[int]:
        self._require(count)
        taken: list[int] = []
        while len(taken) < count:
            last = taken[-1] if taken else behind
            taken += self._cut(self._begin(last), count - len(taken))
        return taken

    def give(self, pages: Iterable[int]) -> None:
        given = list(pages)
        for run in stretches(given):
            self._join(run)
        self._given += given

    def _begin(self, last: int | None) -> int:
        if last is not None and (at := self._before(last + 1)) >= 0 and last + 1 in self._stretches[at]:
            return last + 1
        longest = max(self._stretches, key=len)
        return longest.start + len(longest) // 2 if longest.start else 0

    def _before(self, page: int) -> int:
        """Which stretch is the last that begins at the page or before it; -1: none."""
        return bisect_right(self._stretches, page, key=lambda stretch: stretch.start) - 1

    def _cut(self, begin: int, most: int) -> range:
        at = self._before(begin)
        whole = self._stretches[at]
        taken = range(begin, min(begin + most, whole.stop))
        left = (range(whole.start, taken.start), range(taken.stop, whole.stop))
        self._stretches[at : at + 1] = [part for part in left if part]
        return taken

    def _join(self, run: range) -> None:
        at = self._before(run.start) + 1
        first = at - 1 if at and self._stretches[at - 1].stop == run.start else at
        end = at + 1 if at < len(self._stretches) and self._stretches[at].start == run.stop else at
        touching = [run, *self._stretches[first:end]]
        whole = range(min(each.start for each in touching), max(each.stop for each in touching))
        self._stretches[first:end] = [whole]
