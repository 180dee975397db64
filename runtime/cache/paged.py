"""KV cache of one packed lane: every sequence has its own length and its own pages, and nothing is padded.

Letters: B rows that decode, T tokens of the pass, S positions, N pages, P positions of a page, n pages of a row, H KV
heads, D head size.

`PageTable` says which pages a row has; here is what layers store in them and see of them. Where layers cache latents
that they expand themselves (MLA), `update` hands back all that is cached of the pass's rows, one behind the other.
Layers in `travels` keep their pages in another tier: the engine binds the memory that those of this lane have been
brought to, in row order, before the lane enters the layer. Pages that stay in host memory are `HostLane`'s.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
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
    """What layers see of a pass: of each row `new` tokens behind `past` cached positions."""

    past: Sequence[int]
    new: Sequence[int]
    decoding: DecodeRows | None
    prompts: Prompts
    layout: PassLayout
    offloaded_layout: PassLayout | None  # of layers that travel
    layer_kv: dict[int, LayerKV] = field(default_factory=dict)  # of layers that do not

    @property
    def num_rows(self) -> int:
        return len(self.new)

    @cached_property
    def offsets_T(self) -> torch.Tensor:
        """Each token's position in its sequence less that in the pass: (T,)."""
        starts = accumulate(self.new, initial=0)
        each = zip(self.past, starts, self.new, strict=False)
        return upload([past - start for past, start, new in each for _ in range(new)], self.prompts.device)


@dataclass(frozen=True, kw_only=True)
class _Copies:
    """Positions that layers copy, from where and to where; `there`: those that travel."""

    resident: tuple[Places, Places]
    offloaded: tuple[Places, Places] | None
    host: tuple[Places, Places] | None  # the same as `here`, for a CPU

    def apply(self, kv: LayerKV, *, is_offloaded: bool) -> None:
        """Copies one layer's keys and values."""
        copies = self.offloaded if is_offloaded else self.resident
        assert copies is not None, "the pass was begun before layers travelled"
        copy_places(kv, copies)


class HeadShare(Protocol):
    """Which of a layer's heads are cached here."""

    def has_all_heads(self, layer: int, states: torch.Tensor) -> bool:
        """Whether keys or values (1, H, T, D) are of more heads than these."""
        ...

    def select(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        """Those heads of keys or values."""
        ...

    def slice_heads(self, states: torch.Tensor, dim: int) -> torch.Tensor:
        """What belongs to those heads of what lies along `dim` head by head."""
        ...

    def gather_heads(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The parts of all ranks, head by head."""
        ...


class LayerStored(Exception):
    """A layer has stored keys and values, and nobody wants more of it."""


class PagedKV(Cache, KVCache):
    """What layers store in a pass, and see of it, in the pages that `table` says are its rows'.

    `expands`: the layers cache latents and want all of them back. `heads`: those of this rank, None: all.
    """

    def __init__(
        self,
        pages: KVPages,
        *,
        expands: bool = False,
        offloaded_layers: frozenset[int] = frozenset(),
        heads: HeadShare | None = None,
    ):
        super().__init__(layers=[])
        assert not (expands and pages.host_layers), "latents are expanded where the model computes"
        self.expands, self.travels, self.heads = expands, offloaded_layers, heads
        assert not (expands and pages.dtype.is_quantized), "latents are expanded as they are cached"
        self._pages = pages
        self._tails = PartialPages(pages.device) if pages.dtype.is_quantized else None
        self._host = HostLane(pages, pages.exchange) if pages.exchange is not None else None
        self._device = pages.device.torch_device
        self.table = PageTable(pages.pool, self._tails, keeps_open_pages_adjacent=bool(offloaded_layers))
        self._new: list[int] = []
        self._selected: list[int] = []  # of each row, how many of its last tokens
        self._bound: dict[int, torch.Tensor] = {}
        self._copies: _Copies | None = None
        self._view = self._make_view([], [])
        self._is_already_stored = (
            False  # whether the layer has all tokens of the pass, and is asked for the selected ones
        )
        self._stop_after: int | None = None
        self._cut_layer: int | None = None  # whose keys and values were of more heads than are cached
        self._last_update: tuple[int, weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None = None

    @property
    def view(self) -> PassView:
        """What layers see of the pass."""
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
        """Whether layers compute there, wherever pages are."""
        return self._pages.device.is_accelerator

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the pass."""
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

    def begin_pass(self, new_tokens: Sequence[int], selected: Sequence[int] | None = None) -> None:
        """Says how many tokens of each row the coming pass carries, in row order; the tokens lie in the same order.
        `selected`: how many of each row's, the last ones, the head is to see; None: one of each. It wants to see one at
        least: if nobody asks, the last of the pass."""
        self._new = list(new_tokens)
        self._selected = [min(1, new) for new in self._new] if selected is None else list(selected)
        if not any(self._selected):
            self._selected[max(i for i, new in enumerate(self._new) if new)] = 1
        self.table.begin_pass(self._new)
        self._copies = self._find_copies()
        self._view = self._make_view(self.table.past, self._new)
        ends = zip(accumulate(self._new), self._selected, strict=True)
        self.selected_B = upload([token for end, count in ends for token in range(end - count, end)], self._device)
        if self._host is not None:
            copies = self._copies.host if self._copies is not None else None
            self._host.begin_pass(self.table.pages, self.decoding, self.segments, copies)

    @contextmanager
    def stop_after_storing(self, layer: int) -> Iterator[None]:
        """Within it `StoredAlone` is raised as soon as the keys and values of this layer are stored."""
        self._stop_after = layer
        try:
            yield
        finally:
            self._stop_after = None

    @contextmanager
    def restrict_to_selected(self) -> Iterator[None]:
        """Within it the pass has the tokens `selected_B` alone, and those before them are cached."""
        whole = self._view
        sizes = zip(whole.past, whole.new, self._selected, strict=True)
        self._view = self._make_view([past + new - count for past, new, count in sizes], self._selected)
        self._is_already_stored = self._tails is not None
        try:
            yield
        finally:
            self._view, self._is_already_stored = whole, False

    def padded_view(self, num_rows: int) -> PassView:
        """A pass of rows that decode, as one of so many: the first comes again behind the others, and writes the same
        to the same places."""
        past = self.table.past
        numbers = [*range(len(past)), *[0] * (num_rows - len(past))]
        return self._make_view([past[row] for row in numbers], [1] * num_rows, numbers)

    def replace_view(self, view: PassView, selected_B: torch.Tensor) -> None:
        """Has layers see this for the pass that has begun."""
        self._view, self.selected_B = view, selected_B

    @property
    def is_decode_only(self) -> bool:
        """Whether each row carries one token in the pass, and none copies another's."""
        return self._copies is None and not self.segments and all(new == 1 for new in self._new)

    def _make_view(
        self, past: Sequence[int], new_tokens: Sequence[int], numbers: Sequence[int] | None = None
    ) -> PassView:
        """`numbers`: of the rows; None: all, in order."""
        starts = accumulate(new_tokens, initial=0)
        rows = range(len(new_tokens)) if numbers is None else numbers
        sizes = list(zip(rows, zip(past, new_tokens, starts, strict=False), strict=True))
        single = [(i, before, start) for i, (before, new, start) in sizes if new == 1 and before]
        decoding = None
        if single:
            rows, cached, tokens = zip(*single, strict=True)
            decoding = DecodeRows(rows, cached, tokens, self._device)
        begin = len(single) * decoding.longest if decoding else 0
        segments = list[Segment]()
        for i, (before, new, start) in sizes:
            if new > 1 or (new and not before):
                segments.append(Segment(i, before, new, start, begin, self._device))
                begin += before + new
        places = [(i, before, before + new) for i, (before, new, _) in sizes]

        def layout(pages: Sequence[Sequence[int]]) -> PassLayout:
            return PassLayout(pages, places, decoding, segments, self._device, expands=self.expands, slots=slots)

        slots, pages, there = self.table.tails, self.table.pages, None
        if self.travels:
            place_of = self.table.page_places
            there = layout([[place_of[page] for page in own] for own in pages])
        return PassView(
            past=past,
            new=new_tokens,
            decoding=decoding,
            prompts=Prompts(segments, self._device),
            layout=layout(pages),
            offloaded_layout=there,
        )

    def end_pass(self) -> None:
        """Counts the pass's tokens as cached."""
        self.table.end_pass()

    def _find_copies(self) -> "_Copies | None":
        each = self.table.copies
        if not each:
            return None

        def pairs(number: Callable[[int], int], device: torch.device) -> tuple[Places, Places]:
            sources, targets = (
                upload([number(row[which]) * PAGE_TOKENS + at for row in each for at in range(row[2])], device)
                for which in (0, 1)
            )
            return Places(sources), Places(targets)

        return _Copies(
            resident=pairs(int, self._device),
            offloaded=pairs(self.table.page_places.__getitem__, self._device) if self.travels else None,
            host=pairs(int, CPU) if self._host is not None else None,
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores k, v (1, H, T, D) of the pass, of `heads` alone where not all are cached here. Returns those
        unchanged, as attention reads the pages itself; for layers that expand latents, all positions of the pass's rows
        (1, H, sum of S, D). What the CPU is to attend to is stored by `HostVisit.attend`."""
        if self.heads is not None:
            self._cut_layer = layer_idx if self.heads.has_all_heads(layer_idx, key_states) else None
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
            self._copies.apply(kv, is_offloaded=layer_idx in self.travels)
        if layer_idx == self._stop_after:
            raise LayerStored
        if kv.layout.cached_S is None:
            return key_states, value_states
        cached = (kv.layout.cached_S.gather(pages).transpose(0, 1)[None] for pages in (kv.k_NPHD, kv.v_NPHD))
        k, v = (cast_to_compute(pages, key_states.dtype) for pages in cached)
        return k, v

    def _round_to_storage(self, states: torch.Tensor) -> torch.Tensor:
        """What pages will hold of them, which every token of the pass is to see, however prompts are cut."""
        stored = stored_dtype(self._pages.dtype, states.dtype)
        return cast_to_compute(cast_to_stored(states, stored), states.dtype)

    def applied_head_share(self, layer: int) -> HeadShare | None:
        """Who made keys and values of this rank's heads of those that the layer has just made; None where the layer
        makes none but these."""
        return self.heads if self._cut_layer == layer else None

    def is_last_update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether these are what the last `update` was handed, for this layer."""
        if self._last_update is None or self._last_update[0] != layer:
            return False
        return self._last_update[1]() is key and self._last_update[2]() is value

    def layer(self, index: int, like_k: torch.Tensor, like_v: torch.Tensor) -> LayerKV | QuantizedKV:
        """The keys and values of one layer, for tokens (1, H, T, D) such as these, which are the pass's where pages
        stay in host memory."""
        if self._tails is not None:
            return self._quantized_kv(self._tails, index, like_k, like_v, self._tails.spans(self.segments))
        return self._layer_kv(index, like_k, like_v)

    def _layer_kv(self, index: int, like_k: torch.Tensor, like_v: torch.Tensor) -> LayerKV:
        """Where numbers are kept one by one."""
        kept = self._view.layer_kv
        if index in kept:
            return kept[index]
        dtype = None if self._pages.dtype is KVDType.auto else like_k.dtype
        if self._host is not None and index in self._pages.host_layers:
            return self._host.layer(index, like_k, like_v)
        if index not in self.travels:
            kept[index] = LayerKV(*self._pages.layer(index, like_k, like_v), self._view.layout, dtype=dtype)
            return kept[index]
        assert self._view.offloaded_layout is not None, "the pass was begun before layers travelled"
        pages = split_pages(self._bound[index], like_k, like_v, self._pages.dtype)
        return LayerKV(*pages, self._view.offloaded_layout, dtype=dtype)

    def _quantized_kv(
        self, tails: PartialPages, index: int, like_k: torch.Tensor, like_v: torch.Tensor, spans: dict[int, Pair]
    ) -> QuantizedKV:
        page_format, layout = PageFormat.from_dtypes(self._pages.dtype, like_k, like_v), self._view.layout
        if index in self.travels:
            assert self._view.offloaded_layout is not None, "the pass was begun before layers travelled"
            pages, layout = self._bound[index], self._view.offloaded_layout
        else:
            pages = self._pages.quantized_layer(index, page_format)
        return QuantizedKV(page_format, pages, tails.layer(index, like_k, like_v), spans, layout)

    def begin_host_attention(
        self, index: int, q_1HTD: torch.Tensor, k_1HTD: torch.Tensor, v_1HTD: torch.Tensor, sinks_H: torch.Tensor | None
    ) -> HostAttention | None:
        """Begins the way of the rows that decode to their pages, where those stay in host memory."""
        if self._host is None or self.decoding is None or index not in self._pages.host_layers:
            return None
        return self._host.begin_attention(index, self.decoding.tokens_B, (q_1HTD, k_1HTD, v_1HTD), sinks_H)

    def get_seq_length(  # pyright: ignore[reportIncompatibleMethodOverride] - a tensor, to the layers that ask
        self, layer_idx: int | None = None
    ) -> int | torch.Tensor:
        """Zero to the model: positions are given explicitly and no mask is built, so it needs no length. A layer that
        asks for its own adds it to 0, 1, 2 ... to get the positions of the pass's tokens: it gets what then gives them.
        """
        if layer_idx is None:
            return 0
        return self._view.offsets_T
