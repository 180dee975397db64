"""KV cache of one padded lane, a micro-batch of left-padded rows: a transformers cache with reserved memory.

The memory of full-attention layers is allocated once, since a cache that grows by concatenation copies itself for every
token. Sliding-window and recurrent layers do not grow; these stay transformers' own. With pipeline parallelism, layers
of other ranks only report a length, since models build masks from the first layer.
Shapes: B rows, H heads, S positions, D head size.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from ..plan.placement.memory import PAGE_TOKENS
from ..stream.device import ComputeDevice
from ..units import round_up
from .pages import KVCache, PagePool, num_pages_for


class SkippedLayer(DynamicLayer):
    """The cache of a layer that another rank computes: counts positions and stores nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._length = 0

    def extend(self, num_tokens: int) -> None:
        self._length += num_tokens

    def get_seq_length(self) -> int:
        return self._length

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Does nothing: all rows have the same length."""


def skip_layers(cache: Cache, layers: Collection[int], num_rows: int, num_tokens: int) -> None:
    """Extends `layers`, which other ranks compute, by `num_tokens` positions in each row. Sliding-window layers store
    one byte per token instead of keys and values."""
    byte = torch.zeros(num_rows, 1, num_tokens, 1, dtype=torch.uint8) if layers else None
    for index in layers:
        layer = cache.layers[index]
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        if isinstance(layer, SkippedLayer):
            layer.extend(num_tokens)
        elif isinstance(layer, DynamicLayer) and byte is not None:
            layer.update(byte, byte)


def row_moves(sources: Sequence[int]) -> Iterator[tuple[int, int] | tuple[None, int] | tuple[int, None]]:
    """Yields moves (target, source), to be done in this order, after which row i has the content that row `sources[i]`
    had. No row is overwritten before its last read. None is a spare row, which breaks cycles."""
    pending = {target: source for target, source in enumerate(sources) if target != source}
    num_readers = Counter(pending.values())
    free = [target for target in pending if not num_readers[target]]
    while pending:
        if not free:
            target, source = next(iter(pending.items()))
            yield None, target  # only cycles are left: save one row in the spare row
            yield from _cycle_moves(target, pending)
            continue
        target = free.pop()
        source = pending.pop(target)
        yield target, source
        num_readers[source] -= 1
        if not num_readers[source] and source in pending:
            free.append(source)


def _cycle_moves(first: int, pending: dict[int, int]) -> Iterator[tuple[int, int] | tuple[int, None]]:
    """Yields the moves of a cycle after row `first` was saved in the spare row. Each row has one reader left."""
    target = first
    while (source := pending.pop(target)) != first:
        yield target, source
        target = source
    yield target, None


class ReservedLayer(DynamicLayer):
    """The cache of a layer. Keys and values (B, H, S, D) are views of memory for `capacity` positions."""

    def __init__(self, capacity: int, device: ComputeDevice):
        super().__init__()
        self._capacity, self._compute = capacity, device
        self._length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._all_keys, self._all_values = self._reserve(key_states), self._reserve(value_states)
        self.is_initialized = True

    def _reserve(self, like: torch.Tensor) -> torch.Tensor:
        shape = (like.shape[0], like.shape[1], self._capacity, like.shape[3])
        num_elements = torch.Size(shape).numel()
        return self._compute.zeros(num_elements * like.itemsize).view(like.dtype)[:num_elements].view(shape)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the states. Returns views of all cached keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, self._length = self._length, self._length + key_states.shape[-2]
        self._all_keys[:, :, begin : self._length] = key_states
        self._all_values[:, :, begin : self._length] = value_states
        return self._update_views()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Gives row i the content that row `beam_idx[i]` had, and drops rows beyond. Allocates one row at most."""
        if self.is_initialized:
            self._select_rows(beam_idx.tolist())
            self._update_views()

    def _select_rows(self, sources: list[int]) -> None:
        """Moves the content of rows, and cuts the memory to `len(sources)` rows."""
        for tensor in (self._all_keys, self._all_values):
            spare = tensor[0]
            for new, old in row_moves(sources):
                if new is None:
                    spare = tensor[old, :, : self._length].clone()
                else:
                    tensor[new, :, : self._length] = spare if old is None else tensor[old, :, : self._length]
        self._all_keys, self._all_values = self._all_keys[: len(sources)], self._all_values[: len(sources)]

    def _update_views(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = self._all_keys[:, :, : self._length], self._all_values[:, :, : self._length]
        return self.keys, self.values


class OffloadedLayer(ReservedLayer):
    """The cache of a layer whose KV is in host memory or on disk. While the lane is in the layer, it uses the memory
    that `bind` got, into which all its KV was copied, and from which all is copied back."""

    def __init__(self, capacity: int, device: ComputeDevice):
        super().__init__(capacity, device)
        self._shapes: list[torch.Size] = []
        self._pending_selections: list[list[int]] = []  # selections of rows to apply at the next `bind`

    def bind(self, pages: torch.Tensor) -> None:
        self._pages, self._flat = pages, pages.reshape(-1)  # `_flat` is a copy if `pages` is not contiguous
        if self.is_initialized:
            self._attach()

    def unbind(self) -> None:
        if self._flat.data_ptr() != self._pages.data_ptr():
            self._pages.copy_(self._flat.view(self._pages.shape))
        del self._pages, self._flat

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        states = key_states, value_states
        self._shapes = [torch.Size((*like.shape[:2], self._capacity, like.shape[3])) for like in states]
        self._attach()
        self.is_initialized = True

    def _attach(self) -> None:
        """Makes keys and values views of the memory that `bind` got, then selects rows as requested meanwhile."""
        ends = list(accumulate(shape.numel() for shape in self._shapes))
        elements = self._flat.view(self.dtype)
        assert ends[1] <= elements.numel(), f"{ends[1]:,} numbers for pages of {elements.numel():,}"
        self._all_keys = elements[: ends[0]].view(self._shapes[0])
        self._all_values = elements[ends[0] : ends[1]].view(self._shapes[1])
        for rows in self._pending_selections:
            self._select_rows(rows)
        self._pending_selections = [list(range(len(self._all_keys)))]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.is_initialized:
            self._pending_selections.append(beam_idx.tolist())
            num_rows = len(beam_idx)
            self._all_keys, self._all_values = self._all_keys[:num_rows], self._all_values[:num_rows]
            self._update_views()  # the lane reads the shapes of keys and values


class RectangleKV(KVCache):
    """The offloaded layers of a padded lane, as pages of a pool. Every pass writes all these pages. Other layers stay
    in compute memory. `capacity`: see `rectangle_cache`."""

    def __init__(self, cache: Cache, num_rows: int, capacity: int, pool: PagePool):
        self._layers = {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, OffloadedLayer)}
        self._pool = pool
        self._pages = pool.allocate(num_rows * num_pages_for(capacity)) if self._layers else []

    @property
    def pages(self) -> list[int]:
        return self._pages

    @property
    def dirty_pages(self) -> range:
        return range(len(self._pages))

    def bind(self, layer: int, pages: torch.Tensor) -> None:
        if layer in self._layers:
            self._layers[layer].bind(pages)

    def unbind(self, layer: int) -> None:
        if layer in self._layers:
            self._layers[layer].unbind()

    def close(self) -> None:
        self._pool.free(self._pages)
        self._pages = []


def rectangle_cache(
    config: PreTrainedConfig,
    capacity: int,
    device: ComputeDevice,
    offloaded_layers: frozenset[int] = frozenset(),
    skipped_layers: frozenset[int] = frozenset(),
) -> DynamicCache:
    """Builds the cache of a padded lane. `capacity`: number of positions of the longest sequence, with padding.
    `offloaded_layers` get their memory by `bind`. `skipped_layers` store nothing."""
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and index in skipped_layers:
            cache.layers[index] = SkippedLayer()
        elif type(layer) is DynamicLayer:
            kind = OffloadedLayer if index in offloaded_layers else ReservedLayer
            cache.layers[index] = kind(round_up(capacity, PAGE_TOKENS), device)
    return cache


def cross_rectangle_cache(
    config: PreTrainedConfig,
    num_decoded: int,
    num_encoded: int,
    device: ComputeDevice,
    offloaded_layers: frozenset[int],
) -> EncoderDecoderCache:
    """Builds the cache of an encoder-decoder. `config`: the decoder's. `num_decoded`, `num_encoded`: positions of the
    decoder and the encoder. The cache of cross-attention stays in compute memory."""
    self_attention = rectangle_cache(config, num_decoded, device, offloaded_layers)
    return EncoderDecoderCache(self_attention, rectangle_cache(config, num_encoded, device))
