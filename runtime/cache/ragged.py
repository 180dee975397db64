"""KV cache of one packed lane: every sequence has its own length and nothing is padded.

Letters: L layers, B sequences of a group, H KV heads, G query heads per KV head, T tokens of the pass, S positions, D
head size.

Sequences whose capacity rounds up to the same number share a **group**, one tensor (B, H, S, D) per layer for keys
and one for values, so that a decode step attends over a whole group at once. A sequence that finishes gives its row to
the group's last one. Where layers cache latents that they expand themselves (MLA), `update` hands back all that is
cached of the pass's sequences, one behind the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import torch
from transformers import Cache

from ..plan.memory import KV_GRANULE_TOKENS
from ..stream.device import ComputeDevice
from ..units import round_up
from .views import DecodeSpan, Segment


@dataclass
class Group:
    """`past` holds the number of cached positions of each active row; keys and values appear with the first update."""

    capacity: int
    past: list[int]
    keys: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> (B, H, S, D)
    values: dict[int, torch.Tensor] = field(default_factory=dict)


class RaggedKV(Cache):
    """Rows are in the order of the lane's sequences: sorted by capacity, longest first.

    `expands`: the layers cache latents and want all of them back.
    """

    def __init__(self, capacities: Sequence[int], device: ComputeDevice, *, expands: bool = False):
        super().__init__(layers=[])
        self.expands = expands
        assert list(capacities) == sorted(capacities, reverse=True), "rows of one capacity must be neighbours"
        self._compute = device
        self._device = device.torch_device
        self.groups: list[Group] = []
        for tokens in capacities:
            capacity = round_up(tokens, KV_GRANULE_TOKENS)
            if not self.groups or self.groups[-1].capacity != capacity:
                self.groups.append(Group(capacity, []))
            self.groups[-1].past.append(0)
        self.spans: list[DecodeSpan] = []
        self.segments: list[Segment] = []
        self._new: list[int] = []

    @property
    def past(self) -> list[int]:
        return [past for group in self.groups for past in group.past]

    def begin_pass(self, new_tokens: Sequence[int]) -> None:
        """Says how many tokens of each row the coming pass carries, in row order; the tokens lie in the same order."""
        self.spans, self.segments, self._new = [], [], list(new_tokens)
        position = start = kv_start = 0
        for index, group in enumerate(self.groups):
            new = new_tokens[position : position + len(group.past)]
            position += len(new)
            if new and all(n == 1 for n in new) and min(group.past) > 0:
                past = tuple(group.past)
                self.spans.append(DecodeSpan(index, start, kv_start, past, torch.tensor(past, device=self._device)))
                start += len(new)
                kv_start += len(new) * self.spans[-1].longest
                continue
            for row, n in enumerate(new):
                if n:
                    self.segments.append(Segment(index, row, group.past[row], n, start, kv_start, self._device))
                    start += n
                    kv_start += self.segments[-1].end

    def end_pass(self) -> None:
        """Counts the pass's tokens as cached."""
        for span in self.spans:
            group = self.groups[span.group]
            group.past = [past + 1 for past in group.past]
        for segment in self.segments:
            self.groups[segment.group].past[segment.row] += segment.new

    def remove(self, position: int) -> int:
        """Frees a row and moves its group's last row there. Returns the position that the moved row had."""
        index = begin = 0
        while position >= begin + len(self.groups[index].past):
            begin += len(self.groups[index].past)
            index += 1
        group = self.groups[index]
        row, last = position - begin, len(group.past) - 1
        if row != last:
            for tensor in (*group.keys.values(), *group.values.values()):
                tensor[row, :, : group.past[last]] = tensor[last, :, : group.past[last]]
                tensor[row, :, group.past[last] : group.past[row]] = 0  # a row that failed may leave NaN behind
            group.past[row] = group.past[last]
        group.past.pop()
        return begin + last

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores k, v (1, H, T, D) of the pass. Returns them unchanged, as ragged attention reads the groups itself;
        for layers that expand latents, all positions of the pass's rows (1, H, sum of S, D)."""
        if layer_idx not in self.groups[0].keys:
            self._allocate(layer_idx, key_states, value_states)
        for span in self.spans:
            k, v = self.groups[span.group].keys[layer_idx], self.groups[span.group].values[layer_idx]
            rows = torch.arange(span.num_rows, device=k.device)
            tokens = slice(span.start, span.start + span.num_rows)
            k[rows, :, span.past_B] = key_states[0, :, tokens].transpose(0, 1)
            v[rows, :, span.past_B] = value_states[0, :, tokens].transpose(0, 1)
        for seg in self.segments:
            k, v = self.groups[seg.group].keys[layer_idx], self.groups[seg.group].values[layer_idx]
            tokens, places = slice(seg.start, seg.start + seg.new), slice(seg.past, seg.past + seg.new)
            k[seg.row, :, places] = key_states[0, :, tokens]
            v[seg.row, :, places] = value_states[0, :, tokens]
        if self.expands:
            return self._cached(layer_idx, "keys"), self._cached(layer_idx, "values")
        return key_states, value_states

    def _cached(self, layer: int, which: Literal["keys", "values"]) -> torch.Tensor:
        """In the order of `kv_start`; a span's rows are all as long as its longest."""
        pieces = [
            (span.kv_start, self._tensor(span.group, layer, which)[: span.num_rows, :, : span.longest])
            for span in self.spans
        ]
        pieces += [(s.kv_start, self._tensor(s.group, layer, which)[s.row, None, :, : s.end]) for s in self.segments]
        pieces.sort(key=lambda piece: piece[0])
        return torch.cat([piece.transpose(0, 1).flatten(1, 2) for _, piece in pieces], 1)[None]

    def _tensor(self, group: int, layer: int, which: Literal["keys", "values"]) -> torch.Tensor:
        return getattr(self.groups[group], which)[layer]

    def rows_of(
        self, span: DecodeSpan, layer: int, expanded: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, H, S, D) of a span; `expanded` is what the layer made of the returned latents."""
        if not self.expands:
            group = self.groups[span.group]
            return group.keys[layer][: span.num_rows], group.values[layer][: span.num_rows]
        places, shape = (
            slice(span.kv_start, span.kv_start + span.num_rows * span.longest),
            (span.num_rows, span.longest),
        )
        k, v = (tensor[0, :, places].unflatten(1, shape).transpose(0, 1) for tensor in expanded)
        return k, v

    def row_of(
        self, segment: Segment, layer: int, expanded: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (H, S, D) of a segment."""
        if not self.expands:
            group = self.groups[segment.group]
            return group.keys[layer][segment.row], group.values[layer][segment.row]
        k, v = (tensor[0, :, segment.kv_start : segment.kv_start + segment.end] for tensor in expanded)
        return k, v

    def _allocate(self, layer: int, like_k: torch.Tensor, like_v: torch.Tensor) -> None:
        """One piece of memory for a layer of the lane. K and V may differ in their last dimension.

        It begins as zeros: a hidden position has weight 0, and 0 times whatever lay in fresh memory may be NaN.
        """
        shapes = [
            (len(g.past), like.shape[1], g.capacity, like.shape[3]) for g in self.groups for like in (like_k, like_v)
        ]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = self._compute.zeros(sum(sizes) * like_k.itemsize).view(like_k.dtype)[: sum(sizes)]
        pieces = [piece.view(shape) for piece, shape in zip(flat.split(sizes), shapes, strict=True)]
        for group, k, v in zip(self.groups, pieces[::2], pieces[1::2], strict=True):
            group.keys[layer], group.values[layer] = k, v

    def get_seq_length(  # pyright: ignore[reportIncompatibleMethodOverride] - a tensor, to the layers that ask
        self, layer_idx: int | None = None
    ) -> int | torch.Tensor:
        """Zero to the model: positions are given explicitly and no mask is built, so it needs no length. A layer that
        asks for its own adds it to 0, 1, 2 ... to get the positions of the pass's tokens: it gets what then gives them.
        """
        if layer_idx is None:
            return 0
        offsets = [past - start for past, start in zip(self.past, accumulate(self._new, initial=0), strict=False)]
        repeats = torch.tensor(self._new, device=self._device)
        return torch.tensor(offsets, device=self._device).repeat_interleave(repeats)
