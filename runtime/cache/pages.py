"""Paged keys and values, as in PagedAttention (Kwon et al. 2023). A page has the keys and values of `PAGE_TOKENS`
positions of one sequence, and the same number in every layer. If layers are offloaded, the pages of one lane
(micro-batch) are adjacent, so that few copies transfer them.

Shapes: N pages, P positions of a page, H KV heads, T tokens of a pass, D head size (Dk of keys, Dv of values).
"""

from abc import abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ..attention.page_codes import FLOAT8, PageFormat, stored_dtype
from ..closing import Closing
from ..config.settings import KVDType
from ..plan.placement.kv import consecutive_ranges
from ..plan.placement.memory import PAGE_TOKENS
from ..stream.device import ComputeDevice
from ..stream.exchange import HostExchange


class KVCache(Closing):
    """The keys and values of one lane until `close`, which frees its pages. Not thread-safe.

    Offloaded layers keep their pages in host memory or on disk. Before the lane enters such a layer, the engine copies
    `pages` into a device buffer and passes it to `bind`. After the layer, it calls `unbind` and copies `dirty_pages`
    back.
    """

    @property
    @abstractmethod
    def pages(self) -> Sequence[int]:
        """The page numbers of the lane. Valid for one pass. Empty for a padded lane without offloaded layers."""

    @property
    @abstractmethod
    def dirty_pages(self) -> Sequence[int]:
        """Indices into `pages`, ascending, of the pages that the pass writes to. Valid for one pass."""

    @abstractmethod
    def bind(self, layer: int, pages: torch.Tensor) -> None:
        """Makes an offloaded layer use the memory `pages`, uint8 (len(self.pages), bytes of a page). The caller must
        not use this memory for anything else before `unbind`. No effect if the layer is not offloaded."""

    @abstractmethod
    def unbind(self, layer: int) -> None:
        """Releases the memory of `bind`. It then contains everything that the layer wrote. Raises KeyError if the layer
        has no such memory."""


@dataclass(kw_only=True, eq=False)
class SharedPages:
    """The KV pages of a shared prefix, the first `num_tokens` tokens of several sequences of a block. One row, the
    owner, computes them.

    The owner's pages are freed when the owner has left and no user is waiting. Users that have started are themselves
    holders of the pages (see `PagePool`).
    """

    num_tokens: int
    in_pass: bool  # later rows and lanes may read tokens in the same pass that computes them
    num_users: int = 0  # users that have not started; plus 1 while the prefix is retained for later users
    num_computed: int = 0  # number of tokens that users may read
    pages: list[int] = field(default_factory=list)
    has_owner_left: bool = False

    @property
    def is_complete(self) -> bool:
        """True if users may continue from the prefix in the pass that is being prepared."""
        return self.num_computed == self.num_tokens


class PagePool:
    """Allocates page numbers; the page freed last is allocated first. Pages are reference-counted, as in vLLM (Kwon et
    al. 2023): a page is free when it has no holders."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._freed: list[int] = []
        self._extra_holders: Counter[int] = Counter()  # holders of a page beyond the first
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int, last_page: int | None = None) -> list[int]:
        """Returns `count` pages. `last_page`: the page that the lane allocated last."""
        self._require(count)
        return [self._free.pop() for _ in range(count)]

    def share(self, pages: Iterable[int]) -> None:
        """Adds one holder to each page; each holder must free it."""
        self._extra_holders.update(pages)

    def free(self, pages: Iterable[int]) -> None:
        """Removes one holder of each page, and frees pages without holders. No page may be listed twice."""
        released = list(pages)
        without_holders = released
        if self._extra_holders:
            without_holders = [page for page in released if not self._extra_holders[page]]
            self._extra_holders -= Counter(page for page in released if self._extra_holders[page])
        self._release(without_holders)
        self._freed += without_holders

    def _release(self, pages: Sequence[int]) -> None:
        """Makes pages available for allocation."""
        self._free.extend(reversed(pages))

    def _require(self, count: int) -> None:
        assert count <= self.num_free, f"{count} KV pages requested, {self.num_free} of {self.num_pages} are free"

    def take_freed(self) -> list[int]:
        """Returns the pages that became free since the last call."""
        freed, self._freed = self._freed, []
        return freed


class KVPages:
    """The memory of the KV pages of all lanes of a run. It is in compute memory, or for `host_layers` in host memory,
    to and from which `exchange` copies. A layer's memory is allocated at its first use."""

    def __init__(
        self,
        num_pages: int,
        device: ComputeDevice,
        host_layers: frozenset[int] = frozenset(),
        exchange: HostExchange | None = None,
        pool: PagePool | None = None,
        dtype: KVDType = KVDType.auto,
    ):
        assert bool(host_layers) == (exchange is not None), f"layers {host_layers} in host memory, {exchange}"
        self.pool = pool or PagePool(num_pages)
        self.device, self.host_layers, self.exchange, self.dtype = device, host_layers, exchange, dtype
        self._quantized: dict[int, torch.Tensor] = {}
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, like_k: torch.Tensor, like_v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys (N, P, H, Dk) and values (N, P, H, Dv) of a layer. At its first use, head sizes and dtype are those
        of `like_k` and `like_v` (1, H, T, D)."""
        if index not in self._layers:
            if index in self.host_layers:
                self._layers[index] = self._pin(like_k, like_v)
            else:
                self._layers[index] = self._allocate(like_k), self._allocate(like_v)
        return self._layers[index]

    def quantized_layer(self, index: int, page_format: PageFormat) -> torch.Tensor:
        """The quantized pages of a layer, uint8 (N, bytes of a page)."""
        if index not in self._quantized:
            shape = self.pool.num_pages, page_format.page_bytes
            self._quantized[index] = self.device.zeros(shape[0] * shape[1])[: shape[0] * shape[1]].view(shape)
        return self._quantized[index]

    def fill(self, value: float) -> None:
        """Fills every allocated page with `value`."""
        for parts in self._layers.values():
            for part in parts:
                (part.view(FLOAT8) if part.dtype is torch.uint8 else part).fill_(value)

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        shape, dtype = self._shape(like), stored_dtype(self.dtype, like.dtype)
        num_bytes = shape.numel() * dtype.itemsize
        return self.device.zeros(num_bytes)[:num_bytes].view(dtype).view(shape)

    def _pin(self, like_k: torch.Tensor, like_v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocates one pinned buffer for all keys, then all values. It is not zeroed, since positions are read only
        after they were written."""
        shapes = self._shape(like_k), self._shape(like_v)
        middle, end = accumulate(shape.numel() * like_k.itemsize for shape in shapes)
        memory = self.device.host_pages(end)
        k, v = memory[:middle].view(like_k.dtype), memory[middle:end].view(like_v.dtype)
        return k.view(shapes[0]), v.view(shapes[1])

    def _shape(self, like: torch.Tensor) -> torch.Size:
        return torch.Size((self.pool.num_pages, PAGE_TOKENS, like.shape[1], like.shape[3]))


def split_pages(
    pages: torch.Tensor, like_k: torch.Tensor, like_v: torch.Tensor, kv_dtype: KVDType = KVDType.auto
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views the bytes of pages (N, bytes) as keys (N, P, H, Dk) and values (N, P, H, Dv). A page has all keys, then all
    values."""
    views, begin, dtype = [], 0, stored_dtype(kv_dtype, like_k.dtype)
    for like in (like_k, like_v):
        shape = (PAGE_TOKENS, like.shape[1], like.shape[3])
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        views.append(pages[:, begin : begin + num_bytes].view(dtype).unflatten(1, shape))
        begin += num_bytes
    return views[0], views[1]


def num_pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


class ContiguousPool(PagePool):
    """A pool that keeps the pages of a lane adjacent. Allocates pages directly after the lane's last page if they are
    free. Otherwise begins in the middle of the longest free span, so that the lane before the span can also grow."""

    def __init__(self, num_pages: int):
        super().__init__(num_pages)
        self._spans = [range(num_pages)] if num_pages else []  # free spans, ascending, never adjacent

    @property
    def num_free(self) -> int:
        return sum(map(len, self._spans))

    def allocate(self, count: int, last_page: int | None = None) -> list[int]:
        self._require(count)
        allocated: list[int] = []
        while len(allocated) < count:
            last = allocated[-1] if allocated else last_page
            allocated += self._take_from_span(self._choose_start(last), count - len(allocated))
        return allocated

    def _release(self, pages: Sequence[int]) -> None:
        for run in consecutive_ranges(pages):
            self._merge_span(run)

    def _choose_start(self, last: int | None) -> int:
        """The page at which to allocate next. `last`: the lane's last page."""
        if last is not None and (index := self._span_index(last + 1)) >= 0 and last + 1 in self._spans[index]:
            return last + 1
        longest = max(self._spans, key=len)
        return longest.start + len(longest) // 2 if longest.start else 0

    def _span_index(self, page: int) -> int:
        """Index of the last span that starts at or before `page`; -1: none."""
        return bisect_right(self._spans, page, key=lambda span: span.start) - 1

    def _take_from_span(self, begin: int, max_pages: int) -> range:
        """Allocates up to `max_pages` pages from `begin` on, to the end of the free span at most."""
        index = self._span_index(begin)
        span = self._spans[index]
        allocated = range(begin, min(begin + max_pages, span.stop))
        remaining = (range(span.start, allocated.start), range(allocated.stop, span.stop))
        self._spans[index : index + 1] = [part for part in remaining if part]
        return allocated

    def _merge_span(self, run: range) -> None:
        """Adds a range of pages to the free spans. Merges it with the spans directly before and after it."""
        index = self._span_index(run.start) + 1
        first = index - 1 if index and self._spans[index - 1].stop == run.start else index
        end = index + 1 if index < len(self._spans) and self._spans[index].start == run.stop else index
        adjacent = [run, *self._spans[first:end]]
        merged = range(min(span.start for span in adjacent), max(span.stop for span in adjacent))
        self._spans[first:end] = [merged]
