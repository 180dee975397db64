"""KV cache of one packed lane: every sequence has its own length and nothing is padded.

Letters: L layers, B sequences of a group, H KV heads, G query heads per KV head, T tokens of the pass, S positions, D
head size.

Sequences whose capacity rounds up to the same number share a **group**, one tensor (B, H, S, D) per layer for keys
and one for
values, so that a decode step attends over a whole group at once. A sequence that finishes gives its row to the
group's last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import Cache

from ..plan.memory import KV_GRANULE_TOKENS
from ..stream.device import ComputeDevice
from ..units import round_up


@dataclass
class Group:
    """`past` holds the number of cached positions of each active row; keys and values appear with the first update."""

    capacity: int
    past: list[int]
    keys: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> (B, H, S, D)
    values: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """Tokens [start, start + new) of the pass belong to one row, which has `past` positions cached already."""

    group: int
    row: int
    past: int
    new: int
    start: int


@dataclass(frozen=True)
class DecodeSpan:
    """Tokens [start, start + B) of the pass are one new token for each row of a group."""

    group: int
    start: int
    num_rows: int
    longest: int  # positions to attend over, the new one included
    past_B: torch.Tensor
    hidden_BS: torch.Tensor | None  # True where a row has no position; None when all rows are equally long


class RaggedKV(Cache):
    """Rows are in the order of the lane's sequences: sorted by capacity, longest first."""

    def __init__(self, capacities: Sequence[int], device: ComputeDevice):
        super().__init__(layers=[])
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

    @property
    def past(self) -> list[int]:
        return [past for group in self.groups for past in group.past]

    def begin_pass(self, new_tokens: Sequence[int]) -> None:
        """Says how many tokens of each row the coming pass carries, in row order; the tokens lie in the same order."""
        self.spans, self.segments = [], []
        position = start = 0
        for index, group in enumerate(self.groups):
            new = new_tokens[position : position + len(group.past)]
            if new and all(n == 1 for n in new) and min(group.past) > 0:
                self.spans.append(self._span(index, group, start))
            else:
                begins = [start + sum(new[:row]) for row in range(len(new))]
                self.segments += [
                    Segment(index, row, group.past[row], n, begins[row]) for row, n in enumerate(new) if n
                ]
            position += len(new)
            start += sum(new)

    def _span(self, index: int, group: Group, start: int) -> DecodeSpan:
        past_B = torch.tensor(group.past, device=self._device)
        longest = max(group.past) + 1
        hidden = None
        if min(group.past) + 1 < longest:
            hidden = torch.arange(longest, device=self._device)[None] > past_B[:, None]
        return DecodeSpan(index, start, len(group.past), longest, past_B, hidden)

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
        """Stores k, v (1, H, T, D) of the pass. Returns them unchanged: ragged attention reads the groups itself."""
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
        return key_states, value_states

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

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are given explicitly and no mask is built, so the model needs no length."""
        return 0
