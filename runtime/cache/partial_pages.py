"""The **tails** of a packed lane (micro-batch) with quantized KV pages. A tail is the last, partial page of one row,
unquantized, in compute memory.

A page is quantized when it is full, from the values as computed, so its content does not depend on the chunks of a
prefill. The span of a prompt chunk is its tokens, preceded by the earlier tokens of its first page.

Shapes: R tails, M pages that become full in the pass, F of them by decoding rows; other letters as in paged.py.
"""

from collections.abc import Sequence

import torch

from ..attention.layout import Pair, QuantizedKV
from ..attention.upload import upload
from ..attention.views import DecodeRows, Segment
from ..plan.placement.memory import PAGE_TOKENS
from ..stream.device import ComputeDevice


class PartialPages:
    """The tails of one lane. A row's slot is the index of its tail."""

    def __init__(self, device: ComputeDevice):
        self._device = device
        self._free: list[int] = []
        self._num_slots = 0
        self._layers: dict[int, Pair] = {}
        self._spans: dict[int, Pair] = {}  # row -> keys and values of its span, in the layer that was stored last

    def allocate(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_slots += 1
        return self._num_slots - 1

    def free(self, slot: int) -> None:
        self._free.append(slot)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies tail `sources[i]` to tail `targets[i]` in all layers. A tail may be both source and target."""
        for pair in self._layers.values():
            for tails in pair:
                # The right side is a copy, which is complete before the assignment.
                tails[upload(targets, tails.device)] = tails[upload(sources, tails.device)]

    def layer(self, index: int, like_k: torch.Tensor, like_v: torch.Tensor) -> Pair:
        """The keys and values (R, P, H, D) of a layer's tails. If rows were added, these are new tensors."""
        tails = self._layers.get(index)
        if tails is not None and len(tails[0]) == self._num_slots:
            return tails
        new_tails = self._zeros(like_k), self._zeros(like_v)
        for new, old in zip(new_tails, tails or (), strict=False):
            new[: len(old)] = old
        self._layers[index] = new_tails
        return new_tails

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((self._num_slots, PAGE_TOKENS, like.shape[1], like.shape[3]))
        num_bytes = shape.numel() * like.itemsize
        return self._device.zeros(num_bytes)[:num_bytes].view(like.dtype).view(shape)

    def store(self, kv: QuantizedKV, states: Pair, decoding: DecodeRows | None, segments: Sequence[Segment]) -> None:
        """Stores the pass's keys and values (1, H, T, D) in the tails of their rows, and quantizes full pages."""
        new = states[0][0].transpose(0, 1), states[1][0].transpose(0, 1)
        full: list[Pair] = []
        if decoding is not None:
            layout = kv.layout
            for tails, x_THD in zip(kv.tails, new, strict=True):
                tails[layout.slots_B, layout.offsets_B] = x_THD[decoding.tokens_B]
            full.append((kv.tails[0][layout.filling_F], kv.tails[1][layout.filling_F]))
        self._spans = {segment.row: _join_span(kv, new, segment) for segment in segments}
        full += [_store_tail(kv, self._spans[segment.row], segment) for segment in segments]
        if len(kv.layout.filled_M):
            k_MPHD, v_MPHD = (torch.cat(pages) for pages in zip(*full, strict=True))
            kv.pages[kv.layout.filled_M] = kv.format.encode(k_MPHD, v_MPHD)

    def spans(self, segments: Sequence[Segment]) -> dict[int, Pair]:
        """The spans of `segments` by row. Each must be the end of a segment of the last `store`."""
        spans = {}
        for segment in segments:
            k_SHD, v_SHD = self._spans[segment.row]
            num_tokens = segment.end - segment.past // PAGE_TOKENS * PAGE_TOKENS
            spans[segment.row] = k_SHD[len(k_SHD) - num_tokens :], v_SHD[len(v_SHD) - num_tokens :]
        return spans


def _join_span(kv: QuantizedKV, new: Pair, segment: Segment) -> Pair:
    """Keys and values of a segment's span: its tokens, preceded by the earlier tokens of its first page."""
    num_cached, slot = segment.past % PAGE_TOKENS, kv.layout.slot(segment.row)
    k_THD, v_THD = (x_THD[segment.start : segment.start + segment.new] for x_THD in new)
    if not num_cached:
        return k_THD, v_THD
    return torch.cat([kv.tails[0][slot, :num_cached], k_THD]), torch.cat([kv.tails[1][slot, :num_cached], v_THD])


def _store_tail(kv: QuantizedKV, span: Pair, segment: Segment) -> Pair:
    """Stores the tokens of the span's last page in the row's tail. Returns the span's full pages, (pages, P, H, D)."""
    slot, num = kv.layout.slot(segment.row), len(span[0])
    begin = (num - 1) // PAGE_TOKENS * PAGE_TOKENS
    for tails, x_SHD in zip(kv.tails, span, strict=True):
        tails[slot, : num - begin] = x_SHD[begin:]
    num_full = num // PAGE_TOKENS
    k, v = (x_SHD[: num_full * PAGE_TOKENS].unflatten(0, (num_full, PAGE_TOKENS)) for x_SHD in span)
    return k, v
