"""Lanes without padding: the tokens of all sequences of a micro-batch side by side, as one row."""

from collections.abc import Sequence as Rows

import torch
from transformers import PreTrainedModel

from ..cache.ragged import RaggedKV
from ..stream.device import ComputeDevice
from .lane import Lane, LanePass
from .sampling import Sampler
from .sequence import Sequence


class PackedLane(Lane):
    def __init__(
        self,
        model: PreTrainedModel,
        sequences: Rows[Sequence],
        sampler: Sampler,
        device: ComputeDevice,
        prefill_chunk_tokens: int,
        *,
        expands_latents: bool,
    ):
        ordered = sorted(sequences, key=lambda s: -s.capacity_tokens)
        super().__init__(model, ordered, sampler, device)
        self._chunk_tokens = prefill_chunk_tokens
        self._cache = RaggedKV([s.capacity_tokens for s in ordered], device, expands=expands_latents)
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
