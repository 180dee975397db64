"""KV cache of one packed lane, a micro-batch whose sequences have different lengths and no padding.

`PageTable` assigns pages to rows (sequences). This module stores keys and values in the pages, and gives each layer a
view of them. For layers that cache compressed KV (MLA latents) and expand it, `update` returns all cached positions of
the pass's rows, concatenated. `HostLane` handles pages that stay in host memory. A row decodes if it has one new token
in the pass; otherwise its tokens are a segment of a prompt.

Shapes: B rows that decode, T tokens of the pass, S positions, N pages, P positions of a page, n pages of a row, H KV
heads, D head size.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from transformers import Cache

from ..attention.layout import LayerKV, Pair, PassLayout, Places, QuantizedKV, copy_places
from ..attention.page_codes import PageFormat, cast_to_compute, cast_to_stored, stored_dtype
from ..attention.upload import upload
from ..attention.views import DecodeRows, Prompts, Segment
from ..config.settings import KVDType
from ..plan.placement.memory import PAGE_TOKENS
from .host_lane import CPU, HostAttention, HostLane
from .page_table import PageTable
from .pages import KVCache, KVPages, split_pages
from .partial_pages import PartialPages


@dataclass(frozen=True)
class PassView:
    """What layers need to know of a pass. Row i has `new[i]` tokens after `past[i]` cached positions. `decoding`: the
    rows that decode. `prompts`: the segments of rows that do not. `layout`: where keys and values are in pages."""

    past: Sequence[int]
    new: Sequence[int]
    decoding: DecodeRows | None
    prompts: Prompts
    layout: PassLayout
    offloaded_layout: PassLayout | None  # for offloaded layers
    layer_kv: dict[int, LayerKV] = field(default_factory=dict)  # layer -> its KV, for layers that are not offloaded

    @property
    def num_rows(self) -> int:
        return len(self.new)

    @cached_property
    def offsets_T(self) -> torch.Tensor:
        """The offset of each token: its position in its sequence minus its index in the pass."""
        starts = accumulate(self.new, initial=0)
        rows = zip(self.past, starts, self.new, strict=False)
        return upload([past - start for past, start, new in rows for _ in range(new)], self.prompts.device)


@dataclass(frozen=True, kw_only=True)
class _Copies:
    """The (source, target) positions that each layer copies when rows diverge within a page. `offloaded`: for offloaded
    layers; `resident`: for other layers."""

    resident: tuple[Places, Places]
    offloaded: tuple[Places, Places] | None
    host: tuple[Places, Places] | None  # the same as `resident`, with CPU tensors

    def apply(self, kv: LayerKV, *, is_offloaded: bool) -> None:
        """Copies one layer's keys and values."""
        copies = self.offloaded if is_offloaded else self.resident
        assert copies is not None, "the pass began without offloaded layers"
        copy_places(kv, copies)


class HeadShare(Protocol):
    """The share of a layer's KV heads that this rank (process of a tensor-parallel run) caches."""

    def has_all_heads(self, layer: int, states: torch.Tensor) -> bool:
        """True if keys or values (1, H, T, D) have more heads than this rank's share."""
        ...

    def select(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        """Selects this rank's heads of keys or values."""
        ...

    def slice_heads(self, states: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's slice of `dim`, which is ordered by head."""
        ...

    def gather_heads(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenates the slices of all ranks along `dim`."""
        ...


class LayerStored(Exception):
    """Ends a layer's forward when its keys and values are stored; see `PagedKV.stop_after_storing`."""


class PagedKV(Cache, KVCache):
    """The cache that a model's layers update in each pass. `table` assigns the pages.

    `expands`: layers cache latents, and `update` returns those of all positions. `heads`: the share of KV heads that
    this rank caches; None: all heads. `may_hold_ahead`: see `PageTable`.
    """

    def __init__(
        self,
        pages: KVPages,
        *,
        expands: bool = False,
        offloaded_layers: frozenset[int] = frozenset(),
        heads: HeadShare | None = None,
        may_hold_ahead: bool = False,
    ):
        super().__init__(layers=[])
        assert not (expands and pages.host_layers), "latents need their pages in compute memory"
        self.expands, self.offloaded_layers, self.heads = expands, offloaded_layers, heads
        assert not (expands and pages.dtype.is_quantized), "latents cannot be cached in quantized pages"
        self._pages = pages
        self._tails = PartialPages(pages.device) if pages.dtype.is_quantized else None
        self._host = HostLane(pages, pages.exchange) if pages.exchange is not None else None
        self._device = pages.device.torch_device
        self.table = PageTable(
            pages.pool,
            self._tails,
            keeps_open_pages_adjacent=bool(offloaded_layers),
            may_hold_ahead=may_hold_ahead and not pages.host_layers,
        )
        self._new: list[int] = []
        self._decoding_rows = frozenset[int]()
        self._selected: list[int] = []  # for each row, how many of its last tokens get logits
        self._bound: dict[int, torch.Tensor] = {}  # offloaded layer -> the memory that `bind` got
        self._copies: _Copies | None = None
        self._view = self._make_view([], [])
        self._is_already_stored = False  # quantized pages have all tokens; the view has only the selected tokens
        self._stop_after: int | None = None
        self._sliced_layer: int | None = None  # the layer of the last update, if it had more heads than were stored
        self._last_update: tuple[int, weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None = None

    @property
    def view(self) -> PassView:
        """The current pass as layers see it."""
        return self._view

    @property
    def decoding(self) -> DecodeRows | None:
        return self._view.decoding

    @property
    def prompts(self) -> Prompts:
        return self._view.prompts

    @property
    def segments(self) -> Sequence[Segment]:
        return self._view.prompts.segments

    @property
    def is_on_accelerator(self) -> bool:
        """True if layers compute on an accelerator, wherever the pages are."""
        return self._pages.device.is_accelerator

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the pass."""
        return sum(self._new)

    @property
    def num_selected(self) -> int:
        return sum(self._selected)

    @property
    def pages(self) -> list[int]:
        return list(self.table.page_places)

    @property
    def dirty_pages(self) -> list[int]:
        return self.table.dirty_pages

    def close(self) -> None:
        self.table.close()

    def bind(self, layer: int, pages: torch.Tensor) -> None:
        self._bound[layer] = pages

    def unbind(self, layer: int) -> None:
        del self._bound[layer]

    def begin_pass(
        self,
        new_tokens: Sequence[int],
        selected: Sequence[int] | None = None,
        *,
        decoding_rows: Collection[int] = (),
    ) -> None:
        """Begins a pass with `new_tokens[i]` tokens of row i. `selected`: for each row, how many of its last tokens get
        logits; None means one. If none gets logits, the last token of the pass is selected. `decoding_rows`: rows that
        decode several tokens; layers see each of these tokens as a row of its own."""
        self._new, self._decoding_rows = list(new_tokens), frozenset(decoding_rows)
        self._selected = [min(1, new) for new in self._new] if selected is None else list(selected)
        if not any(self._selected):
            self._selected[max(i for i, new in enumerate(self._new) if new)] = 1
        self.table.begin_pass(self._new)
        self._copies = self._find_copies()
        self._view = self._make_view(*self._as_rows(self.table.past, self._new))
        ends = zip(accumulate(self._new), self._selected, strict=True)
        self.selected_B = upload([token for end, count in ends for token in range(end - count, end)], self._device)
        if self._host is not None:
            copies = self._copies.host if self._copies is not None else None
            self._host.begin_pass(self.table.pages, self.decoding, self.segments, copies)

    @contextmanager
    def stop_after_storing(self, layer: int) -> Iterator[None]:
        """A context in which `update` raises `LayerStored` when this layer's keys and values are stored."""
        self._stop_after = layer
        try:
            yield
        finally:
            self._stop_after = None

    @contextmanager
    def restrict_to_selected(self) -> Iterator[None]:
        """A context in which the pass has only the tokens that get logits; tokens before them count as cached."""
        full_view, sizes = self._view, zip(self.table.past, self._new, self._selected, strict=True)
        past = [past + new - count for past, new, count in sizes]
        self._view = self._make_view(*self._as_rows(past, self._selected))
        self._is_already_stored = self._tails is not None
        try:
            yield
        finally:
            self._view, self._is_already_stored = full_view, False

    def padded_view(self, num_rows: int) -> PassView:
        """The view of a decode-only pass, padded to `num_rows` for CUDA graphs. The padding rows are copies of row 0,
        so they write equal values to the same positions."""
        past = self.table.past
        row_numbers = [*range(len(past)), *[0] * (num_rows - len(past))]
        return self._make_view([past[row] for row in row_numbers], [1] * num_rows, row_numbers)

    def replace_view(self, view: PassView, selected_B: torch.Tensor) -> None:
        """Makes layers see `view` in the current pass."""
        self._view, self.selected_B = view, selected_B

    @property
    def is_decode_only(self) -> bool:
        """True if each row has one token in the pass and no row copies a page."""
        return self._copies is None and not self.segments and all(new == 1 for new in self._new)

    def _as_rows(
        self, past: Sequence[int], new_tokens: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int], Sequence[int] | None]:
        """The arguments of `_make_view`, with each token of the pass's decoding rows as a row of its own."""
        if not self._decoding_rows:
            return past, new_tokens, None
        rows = [
            (past + i, 1, row) if row in self._decoding_rows else (past, new, row)
            for row, (past, new) in enumerate(zip(past, new_tokens, strict=True))
            for i in range(new if row in self._decoding_rows else 1)
        ]
        past, new_tokens, numbers = zip(*rows, strict=True)
        return past, new_tokens, numbers

    def _make_view(
        self, past: Sequence[int], new_tokens: Sequence[int], row_numbers: Sequence[int] | None = None
    ) -> PassView:
        """Makes the view of a pass. `row_numbers`: the row in the page table of each row of the pass; None: the
        same."""
        rows = range(len(new_tokens)) if row_numbers is None else row_numbers
        starts = accumulate(new_tokens, initial=0)
        sizes = list(zip(rows, zip(past, new_tokens, starts, strict=False), strict=True))
        decode_rows = [(i, before, start) for i, (before, new, start) in sizes if new == 1 and before]
        decoding = None
        if decode_rows:
            rows, cached, tokens = zip(*decode_rows, strict=True)
            decoding = DecodeRows(rows, cached, tokens, self._device)
        # `begin`: first position of a segment in the result of `update`, if layers expand latents. Decoding rows come
        # first there, all padded to the longest of them.
        begin = len(decode_rows) * decoding.longest if decoding else 0
        segments = list[Segment]()
        for i, (before, new, start) in sizes:
            if new > 1 or (new and not before):
                segments.append(Segment(i, before, new, start, begin, self._device))
                begin += before + new
        new_places = [(i, before, before + new) for i, (before, new, _) in sizes]

        def layout(pages: Sequence[Sequence[int]]) -> PassLayout:
            return PassLayout(pages, new_places, decoding, segments, self._device, expands=self.expands, slots=slots)

        slots, pages, offloaded_layout = self.table.tails, self.table.pages, None
        if self.offloaded_layers:
            page_places = self.table.page_places
            offloaded_layout = layout([[page_places[page] for page in row_pages] for row_pages in pages])
        return PassView(
            past=past,
            new=new_tokens,
            decoding=decoding,
            prompts=Prompts(segments, self._device),
            layout=layout(pages),
            offloaded_layout=offloaded_layout,
        )

    def end_pass(self, num_kept: Sequence[int] | None = None) -> None:
        """Counts the first `num_kept[i]` tokens of row i as cached; None: all tokens of the pass."""
        self.table.end_pass(num_kept)

    def _find_copies(self) -> "_Copies | None":
        """The partial pages to copy in this pass, as positions; None if there are none."""
        copies = self.table.copies
        if not copies:
            return None

        def positions(index_of: Callable[[int], int], device: torch.device) -> tuple[Places, Places]:
            """(sources, targets). `index_of`: page number -> index of the page in the layer's memory."""
            sources = [index_of(source) * PAGE_TOKENS + i for source, _, count in copies for i in range(count)]
            targets = [index_of(target) * PAGE_TOKENS + i for _, target, count in copies for i in range(count)]
            return Places(upload(sources, device)), Places(upload(targets, device))

        return _Copies(
            resident=positions(int, self._device),
            offloaded=positions(self.table.page_places.__getitem__, self._device) if self.offloaded_layers else None,
            host=positions(int, CPU) if self._host is not None else None,
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the pass's keys and values (1, H, T, D), and returns those of this rank's heads. For layers that
        expand latents, returns all positions of the pass's rows instead, (1, H, sum of S, D). For pages in host memory,
        stores only prompts: `HostAttention.attend` stores decoding tokens. Raises LayerStored within
        `stop_after_storing`."""
        if self.heads is not None:
            self._sliced_layer = layer_idx if self.heads.has_all_heads(layer_idx, key_states) else None
            key_states, value_states = (self.heads.select(layer_idx, each) for each in (key_states, value_states))
        if self._pages.dtype in (KVDType.bfloat16, KVDType.float8):
            key_states, value_states = self._round_to_storage(key_states), self._round_to_storage(value_states)
        self._last_update = layer_idx, weakref.ref(key_states), weakref.ref(value_states)
        if self._host is not None and layer_idx in self._pages.host_layers:
            self._host.store_prompts(layer_idx, key_states, value_states)
            return key_states, value_states
        if self._tails is not None:
            if not self._is_already_stored:
                quantized = self._quantized_kv(self._tails, layer_idx, key_states, value_states, {})
                self._tails.store(quantized, (key_states, value_states), self.decoding, self.segments)
            if layer_idx == self._stop_after:
                raise LayerStored
            return key_states, value_states
        kv = self._layer_kv(layer_idx, key_states, value_states)
        new_T = kv.layout.new_T
        for pages, states in ((kv.k_NPHD, key_states), (kv.v_NPHD, value_states)):
            new_T.scatter(pages, cast_to_stored(states.squeeze(0).transpose(0, 1), pages.dtype))
        if self._copies is not None:
            self._copies.apply(kv, is_offloaded=layer_idx in self.offloaded_layers)
        if layer_idx == self._stop_after:
            raise LayerStored
        if kv.layout.cached_S is None:
            return key_states, value_states
        cached = (kv.layout.cached_S.gather(pages).transpose(0, 1)[None] for pages in (kv.k_NPHD, kv.v_NPHD))
        k, v = (cast_to_compute(pages, key_states.dtype) for pages in cached)
        return k, v

    def _round_to_storage(self, states: torch.Tensor) -> torch.Tensor:
        """Rounds keys or values to the pages' dtype."""
        # Tokens of this pass must also use the rounded values. Otherwise results would depend on prefill chunks.
        stored = stored_dtype(self._pages.dtype, states.dtype)
        return cast_to_compute(cast_to_stored(states, stored), states.dtype)

    def applied_head_share(self, layer: int) -> HeadShare | None:
        """Returns `heads` if the last update was of this layer and had more heads than were stored; else None."""
        return self.heads if self._sliced_layer == layer else None

    def is_last_update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> bool:
        """True if the last `update` was for this layer, with these tensors."""
        if self._last_update is None or self._last_update[0] != layer:
            return False
        return self._last_update[1]() is key and self._last_update[2]() is value

    def layer(self, index: int, like_k: torch.Tensor, like_v: torch.Tensor) -> LayerKV | QuantizedKV:
        """The keys and values of one layer. `like_k` and `like_v` (1, H, T, D) determine head sizes and dtype. For
        pages in host memory they must be the keys and values of the pass."""
        if self._tails is not None:
            return self._quantized_kv(self._tails, index, like_k, like_v, self._tails.spans(self.segments))
        return self._layer_kv(index, like_k, like_v)

    def _layer_kv(self, index: int, like_k: torch.Tensor, like_v: torch.Tensor) -> LayerKV:
        """The keys and values of a layer whose pages are not quantized."""
        layer_kv = self._view.layer_kv
        if index in layer_kv:
            return layer_kv[index]
        dtype = None if self._pages.dtype is KVDType.auto else like_k.dtype
        if self._host is not None and index in self._pages.host_layers:
            return self._host.layer(index, like_k, like_v)
        if index not in self.offloaded_layers:
            layer_kv[index] = LayerKV(*self._pages.layer(index, like_k, like_v), self._view.layout, dtype=dtype)
            return layer_kv[index]
        assert self._view.offloaded_layout is not None, "the pass began without offloaded layers"
        pages = split_pages(self._bound[index], like_k, like_v, self._pages.dtype)
        return LayerKV(*pages, self._view.offloaded_layout, dtype=dtype)

    def _quantized_kv(
        self, tails: PartialPages, index: int, like_k: torch.Tensor, like_v: torch.Tensor, spans: dict[int, Pair]
    ) -> QuantizedKV:
        """The keys and values of a layer with quantized pages. `spans`: see `PartialPages.spans`."""
        page_format, layout = PageFormat.from_dtypes(self._pages.dtype, like_k, like_v), self._view.layout
        if index in self.offloaded_layers:
            assert self._view.offloaded_layout is not None, "the pass began without offloaded layers"
            pages, layout = self._bound[index], self._view.offloaded_layout
        else:
            pages = self._pages.quantized_layer(index, page_format)
        return QuantizedKV(page_format, pages, tails.layer(index, like_k, like_v), spans, layout)

    def begin_host_attention(
        self, index: int, q_1HTD: torch.Tensor, k_1HTD: torch.Tensor, v_1HTD: torch.Tensor, sinks_H: torch.Tensor | None
    ) -> HostAttention | None:
        """Starts CPU attention for the decoding rows, if there are any and this layer's pages stay in host memory. Else
        returns None."""
        if self._host is None or self.decoding is None or index not in self._pages.host_layers:
            return None
        return self._host.begin_attention(index, self.decoding.tokens_B, (q_1HTD, k_1HTD, v_1HTD), sinks_H)

    def get_seq_length(  # pyright: ignore[reportIncompatibleMethodOverride] - a tensor, for layers
        self, layer_idx: int | None = None
    ) -> int | torch.Tensor:
        """Returns 0 for the model, which gets positions as an argument and builds no mask. Layers add the result to the
        token indices 0, 1, 2 ... to get positions, so for layers it is the offset of each token, (T,)."""
        if layer_idx is None:
            return 0
        return self._view.offsets_T
