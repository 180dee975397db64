"""A lane carries one micro-batch through the model's own forward pass, as a greenlet that parks wherever it needs the
engine.

`PackedLane` puts the tokens of its sequences side by side without padding. `PaddedLane` makes a left-padded rectangle
and lets the
model keep its own cache and masks: for classes that will not take a foreign attention function or that keep recurrent
state.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from ..cache.ragged import RaggedKV
from ..model.events import LaneRun, NeedStage, Weights
from ..stream.device import ComputeDevice
from .sampling import Sampler
from .sequence import FinishReason, Sequence


@dataclass(frozen=True, kw_only=True)
class LanePass:
    """Token counts of one lane in one pass: `real` were computed for a reason, `padded` includes the padding beside
    them."""

    num_sequences: int
    real_tokens: int
    padded_tokens: int
    issued_tokens: int  # new tokens computed, those of rows that had finished before included
    useful_tokens: int  # new tokens that are part of a completion


class Lane(ABC):
    """`begin_pass`, then `advance` until it returns None, then `end_pass`; `sequences` holds those still unfinished."""

    def __init__(self, model: PreTrainedModel, sequences: Rows[Sequence], sampler: Sampler, device: ComputeDevice):
        self._model, self._sampler, self._device = model, sampler, device.torch_device
        self.sequences = list(sequences)
        self._run: LaneRun | None = None
        self._logits_BV: torch.Tensor | None = None
        self._num_passes = 0

    @property
    def is_prefilled(self) -> bool:
        return all(sequence.is_prefilled for sequence in self.sequences)

    @property
    def is_done(self) -> bool:
        return not self.sequences

    def begin_pass(self) -> NeedStage:
        """Starts the forward; returns the first stage that it asks for."""
        self._prepare()
        self._run = LaneRun(self._forward, self.cache)
        event = self._run.switch()
        assert isinstance(event, NeedStage), f"the lane asked for {event!r} instead of a stage"
        return event

    def advance(self, weights: Weights) -> NeedStage | None:
        """Runs on with the weights asked for, up to the next question; None when the forward has ended."""
        assert self._run is not None, "advance before begin_pass"
        event = self._run.switch(weights)
        return None if self._run.dead else event

    def end_pass(self) -> LanePass:
        """Samples, drops finished sequences and says what the pass amounted to."""
        assert self._logits_BV is not None, "the pass has not ended"
        counts = self._finish()
        self._logits_BV, self._run = None, None
        self._num_passes += 1
        return counts

    def _sample(self, sequences: Rows[Sequence], logits_BV: torch.Tensor) -> int:
        self._sampler.step(sequences, logits_BV, self._num_passes)
        return sum(sequence.finish is not FinishReason.error for sequence in sequences)

    @property
    @abstractmethod
    def cache(self) -> object: ...

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def _forward(self) -> None: ...

    @abstractmethod
    def _finish(self) -> LanePass: ...


class PackedLane(Lane):
    def __init__(
        self,
        model: PreTrainedModel,
        sequences: Rows[Sequence],
        sampler: Sampler,
        device: ComputeDevice,
        prefill_chunk_tokens: int,
    ):
        ordered = sorted(sequences, key=lambda s: -s.capacity_tokens)
        super().__init__(model, ordered, sampler, device)
        self._chunk_tokens = prefill_chunk_tokens
        self._cache = RaggedKV([s.capacity_tokens for s in ordered], device)
        self._new: list[int] = []

    @property
    def cache(self) -> RaggedKV:
        return self._cache

    def _prepare(self) -> None:
        """Decode: one token each. Prefill: prompts in order until the chunk is full, the last one perhaps in part."""
        if self.is_prefilled:
            self._new = [1] * len(self.sequences)
            tokens = [s.generated[-1] for s in self.sequences]
        else:
            self._new, tokens, left = [], [], self._chunk_tokens
            for s in self.sequences:
                take = min(left, len(s.request.prompt_ids) - s.num_prefilled)
                tokens += s.request.prompt_ids[s.num_prefilled : s.num_prefilled + take]
                self._new.append(take)
                left -= take
        pasts = self._cache.past
        places = [place for past, new in zip(pasts, self._new, strict=True) for place in range(past, past + new)]
        ends = torch.tensor(self._new).cumsum(0) - 1
        self._ids_1T = torch.tensor([tokens], device=self._device)
        self._positions_1T = torch.tensor([places], device=self._device)
        self._asking = [row for row in range(len(self.sequences)) if self._new[row] and self._ends_prompt(row)]
        kept = [int(ends[row]) for row in self._asking] or [len(tokens) - 1]  # the head wants at least one row
        self._kept_B = torch.tensor(kept, device=self._device)
        self._cache.begin_pass(self._new)

    def _ends_prompt(self, row: int) -> bool:
        sequence = self.sequences[row]
        return sequence.is_prefilled or sequence.num_prefilled + self._new[row] == len(sequence.request.prompt_ids)

    def _forward(self) -> None:
        out = self._model(
            input_ids=self._ids_1T,
            position_ids=self._positions_1T,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=self._kept_B,
        )
        self._logits_BV = out.logits[0]

    def _finish(self) -> LanePass:
        assert self._logits_BV is not None
        self._cache.end_pass()
        was_decode = self.is_prefilled
        if not was_decode:
            for sequence, new in zip(self.sequences, self._new, strict=True):
                sequence.num_prefilled += new
        asking = [self.sequences[row] for row in self._asking]
        useful = self._sample(asking, self._logits_BV) if asking else 0
        counts = LanePass(
            num_sequences=sum(1 for new in self._new if new),
            real_tokens=sum(self._new),
            padded_tokens=sum(self._new),
            issued_tokens=len(asking),
            useful_tokens=useful,
        )
        for position in reversed(range(len(self.sequences))):
            if self.sequences[position].finish is not None:
                moved = self._cache.remove(position)
                self.sequences[position] = self.sequences[moved]
                del self.sequences[moved]
        return counts


class PaddedLane(Lane):
    def __init__(self, model: PreTrainedModel, sequences: Rows[Sequence], sampler: Sampler, device: ComputeDevice):
        super().__init__(model, sequences, sampler, device)
        self._rows = list(
            self.sequences
        )  # rows of the rectangle; a finished one stays where the cache cannot drop rows
        self._cache = DynamicCache(config=model.config)
        width = max(len(s.request.prompt_ids) for s in self._rows)
        self._mask_BS = torch.zeros(len(self._rows), width, dtype=torch.long, device=self._device)
        self._ids_BT = torch.zeros_like(self._mask_BS)
        for row, sequence in enumerate(self._rows):
            prompt = torch.tensor(sequence.request.prompt_ids, device=self._device)
            self._ids_BT[row, width - len(prompt) :] = prompt
            self._mask_BS[row, width - len(prompt) :] = 1

    @property
    def cache(self) -> DynamicCache:
        return self._cache

    def _prepare(self) -> None:
        if self.is_prefilled:
            ids = [s.generated[-1] if s.generated else 0 for s in self._rows]
            self._ids_BT = torch.tensor(ids, device=self._device)[:, None]
            self._mask_BS = torch.cat([self._mask_BS, torch.ones_like(self._ids_BT)], 1)
            self._positions_BT = self._mask_BS.sum(-1, keepdim=True) - 1
        else:
            self._positions_BT = (self._mask_BS.cumsum(-1) - 1).clamp(min=0)

    def _forward(self) -> None:
        out = self._model(
            input_ids=self._ids_BT,
            attention_mask=self._mask_BS,
            position_ids=self._positions_BT,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._logits_BV = out.logits[:, -1]

    def _finish(self) -> LanePass:
        assert self._logits_BV is not None
        was_prefill = not self.is_prefilled
        real = sum(len(s.request.prompt_ids) for s in self.sequences) if was_prefill else len(self.sequences)
        for sequence in self.sequences:
            sequence.num_prefilled = len(sequence.request.prompt_ids)
        open_rows = [row for row, s in enumerate(self._rows) if s.finish is None]
        useful = self._sample([self._rows[row] for row in open_rows], self._logits_BV[open_rows])
        counts = LanePass(
            num_sequences=len(self.sequences),
            real_tokens=real,
            padded_tokens=self._ids_BT.numel(),
            issued_tokens=len(self._rows),
            useful_tokens=useful,
        )
        self.sequences = [s for s in self.sequences if s.finish is None]
        self._drop_finished_rows()
        return counts

    def _drop_finished_rows(self) -> None:
        kept = [row for row, s in enumerate(self._rows) if s.finish is None]
        can_drop = all(hasattr(layer, "batch_select_indices") for layer in self._cache.layers)
        if kept and len(kept) < len(self._rows) and can_drop:
            indices = torch.tensor(kept, device=self._device)
            self._cache.batch_select_indices(indices)
            self._mask_BS = self._mask_BS[indices]
            self._rows = [self._rows[row] for row in kept]
