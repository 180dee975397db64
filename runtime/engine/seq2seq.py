"""Lanes of encoder-decoders: the prompts are the encoder's input, read whole in the first pass together with the
decoder's first token; what they became stays with the lane, and every later pass is the decoder's alone.
"""

from collections.abc import Sequence as Rows

import torch
from transformers import PreTrainedModel

from ..cache.pages import PagePool
from ..cache.rectangle import RectangleKV, cross_rectangle_cache
from ..plan.memory import PAGE_TOKENS
from ..stream.device import ComputeDevice
from ..units import round_up
from .lane import Lane, LanePass
from .sampling import Sampler
from .sequence import Sequence


class Seq2SeqLane(Lane):
    """A right-padded rectangle of prompts; no padding among generated tokens, as all rows begin together. Rows of
    finished sequences leave both."""

    def __init__(
        self,
        model: PreTrainedModel,
        sequences: Rows[Sequence],
        sampler: Sampler,
        device: ComputeDevice,
        start_token_id: int,
        pool: PagePool,
        travels: frozenset[int] = frozenset(),
    ):
        super().__init__(model, sequences, sampler, device)
        self._start_token_id = start_token_id
        width = max(len(s.request.prompt_ids) for s in self.sequences)
        longest = max(s.request.max_new_tokens for s in self.sequences)
        self._cache = cross_rectangle_cache(model.get_decoder().config, longest, width, device, travels)
        own = self._cache.self_attention_cache
        self._kv = RectangleKV(own, len(self.sequences), round_up(longest, PAGE_TOKENS), pool)
        self._prompts_BS = torch.zeros(len(self.sequences), width, dtype=torch.long, device=self._device)
        self._mask_BS = torch.zeros_like(self._prompts_BS)
        for row, sequence in enumerate(self.sequences):
            prompt = torch.tensor(sequence.request.prompt_ids, device=self._device)
            self._prompts_BS[row, : len(prompt)] = prompt
            self._mask_BS[row, : len(prompt)] = 1
        self._encoded_BSD: torch.Tensor | None = None

    @property
    def cache(self) -> object:
        return self._cache

    @property
    def kv(self) -> RectangleKV:
        return self._kv

    def close(self) -> None:
        self._kv.close()

    def _prepare(self) -> None:
        tokens = [s.generated[-1] if s.generated else self._start_token_id for s in self.sequences]
        self._ids_B1 = torch.tensor(tokens, device=self._device)[:, None]

    def _forward(self) -> None:
        encoded = self._encoded_BSD
        out = self._model(
            input_ids=self._prompts_BS if encoded is None else None,
            encoder_outputs=None if encoded is None else (encoded,),
            attention_mask=self._mask_BS,
            decoder_input_ids=self._ids_B1,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._encoded_BSD = out.encoder_last_hidden_state
        self._logits_BV = out.logits[:, -1]

    def _finish(self) -> LanePass:
        assert self._logits_BV is not None
        is_prefill = not self.is_prefilled
        tokens_BS = self._prompts_BS if is_prefill else self._ids_B1
        real = int(self._mask_BS.sum()) if is_prefill else tokens_BS.numel()
        for sequence in self.sequences:
            sequence.num_cached = sequence.num_known
        counts = LanePass(
            num_sequences=len(self.sequences),
            real_tokens=real,
            padded_tokens=tokens_BS.numel(),
            prompt_tokens=real if is_prefill else 0,
            issued_tokens=len(self.sequences),
            useful_tokens=self._sample(self.sequences, self._logits_BV),
        )
        self._drop_finished_rows()
        return counts

    def _drop_finished_rows(self) -> None:
        kept = [row for row, s in enumerate(self.sequences) if s.finish is None]
        if kept and len(kept) < len(self.sequences):
            assert self._encoded_BSD is not None, "a pass has ended"
            indices = torch.tensor(kept, device=self._device)
            self._cache.reorder_cache(indices)  # pyright: ignore[reportArgumentType] - a legacy type, as in processors.py
            self._mask_BS, self._encoded_BSD = self._mask_BS[indices], self._encoded_BSD[indices]
        self.sequences = [self.sequences[row] for row in kept]
