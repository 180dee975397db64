"""Lanes with padding: a left-padded rectangle for which the model keeps its own masks.

For classes that will not take a foreign attention function, or that keep recurrent state, whose boundaries no class
but a CUDA kernel's knows in a packed row.
"""

from collections.abc import Sequence as Rows

import torch
from transformers import Cache

from ...attention.upload import upload
from ...cache.passed import pass_over
from ...cache.rectangle import RectangleKV, rectangle_cache
from ...plan.placement.memory import chunk_columns
from ...probing.generating import PassInputs
from ...sequences.pooling import Picked
from ...sequences.scoring import Given
from ...sequences.sequence import Sequence
from ..records import PassCounts
from .lane import LaneContext
from .rectangle import RectangleLane


class PaddedLane(RectangleLane):
    """Prefilled in chunks of columns. Where one row begins again the whole rectangle does, in the memory that it had:
    what others have generated is as wide as their answers were planned."""

    def __init__(self, context: LaneContext, sequences: Rows[Sequence]):
        self._context = context
        super().__init__(context, sequences, *self._empty(sequences), padding_side="left")

    def _empty(self, sequences: Rows[Sequence]) -> tuple[Cache, RectangleKV]:
        """A cache for all that the sequences may come to, and its travelling layers."""
        context = self._context
        self._num_prompt = {s.request.key: s.num_known for s in sequences}  # with what was generated earlier
        self._width = max(self._num_prompt.values())
        self._columns = self._width
        if not context.has_whole_prompts:
            self._columns = chunk_columns(len(sequences), self._width, context.prefill_chunk_tokens)
        self._done = 0  # columns that the cache holds
        capacity = self._width + max(s.request.max_new_tokens - len(s.generated) for s in sequences)
        config, passed = context.model.config, context.passed_layers
        cache = rectangle_cache(config, capacity, context.device, context.travels, passed)
        return cache, RectangleKV(cache, len(sequences), capacity, context.pool)

    def _real_tokens(self, width: int) -> torch.Tensor | None:
        mask = self._mask_BS[:, self._done : self._end]
        return mask[:, -width:] if width <= mask.shape[1] else None

    def _prepare(self) -> None:
        if self._done >= self._width:
            self._ids_BT = upload([[s.generated[-1]] for s in self.sequences], self._device)
            self._mask_BS = torch.cat([self._mask_BS, torch.ones_like(self._ids_BT)], 1)
        else:
            self._ids_BT = self._prompts_BS[:, self._done : self._done + self._columns]
        self._end = self._done + self._ids_BT.shape[1]
        self._positions_BT = (self._mask_BS.cumsum(-1) - 1).clamp(min=0)[:, self._done : self._end]
        self._given = self._scored() if self._is_read else None

    def _scored(self) -> Given | Picked:
        """What the pass scores or reads: all prompts end in the last column."""
        parts = list[tuple[Sequence, int, list[tuple[int, ...]]]]()
        num_columns = self._ids_BT.shape[1]
        for row, s in enumerate(self.sequences):
            num_pads = self._width - self._num_prompt[s.request.key]
            past, end = max(0, self._done - num_pads), max(0, self._end - num_pads)
            tokens = s.given(past, end - past)
            parts.append((s, (row + 1) * num_columns - len(tokens), tokens))
        return self._given_of(parts)

    def _lengths(self) -> torch.Tensor | None:
        if self._rope_lengths is None:
            return None
        columns = [(s, self._width - self._num_prompt[s.request.key]) for s in self.sequences]
        return torch.tensor([self._lengths_of(s, range(self._done - pads, self._end - pads)) for s, pads in columns])

    def _forward(self) -> None:
        inputs = PassInputs(
            ids_BT=self._ids_BT,
            positions_BT=self._positions_BT,
            mask_BS=self._mask_BS[:, : self._end],
            is_first=self._done < self._width,
        )
        arguments = inputs.of(self._model, self._cache)
        if self._given is not None and (self._given.places or isinstance(self._given, Picked)):
            every = {**arguments, "logits_to_keep": 0} if "logits_to_keep" in arguments else arguments
            self._read_given(lambda: self._model(**every))
            return
        self._logits_BV = self._model(**arguments).logits[:, -1]

    def _sampled_sequences(self) -> list[Sequence]:
        if self._given is not None:
            return []
        return self.sequences if self._end >= self._width else []

    def _finish(self, drawn: torch.Tensor) -> PassCounts:
        pass_over(self._cache, self._context.passed_layers, *self._ids_BT.shape)
        real = 0
        is_prefill = self._done < self._width
        for sequence in self.sequences:
            num_pads = self._width - self._num_prompt[sequence.request.key]
            real += max(0, self._end - max(self._done, num_pads))
            sequence.num_cached = max(0, self._end - num_pads)
        self._done = self._end
        sampled = self._drawing
        counts = PassCounts(
            num_sequences=len(self.sequences),
            real_tokens=real,
            padded_tokens=self._ids_BT.numel(),
            prompt_tokens=real if is_prefill else 0,
            issued_tokens=len(sampled),
            useful_tokens=self._tell(drawn),
        )
        self._move_beams()
        self._drop_finished_rows()
        if any(self._begins_again(s) for s in sampled):
            self._begin_again()
        return counts

    def _begin_again(self) -> None:
        self._kv.close()
        for sequence in self.sequences:
            sequence.num_cached = 0
        self._fill(*self._empty(self.sequences))
