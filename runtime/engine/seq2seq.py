"""Lanes of encoder-decoders: the prompts are the encoder's input, read whole in the first pass together with the
decoder's first token; what they became stays with the lane, and every later pass is the decoder's alone.
"""

from collections.abc import Sequence as Rows

import torch

from ..cache.rectangle import RectangleKV, cross_rectangle_cache
from .lane import LaneKit
from .records import PassCounts
from .rectangle import RectangleLane
from .sequence import Sequence


class Seq2SeqLane(RectangleLane):
    """A right-padded rectangle of prompts; no padding among generated tokens, as all rows begin together."""

    def __init__(self, kit: LaneKit, sequences: Rows[Sequence], start_token_id: int):
        width = max(len(s.request.prompt_ids) for s in sequences)
        longest = max(s.request.max_new_tokens for s in sequences)
        cache = cross_rectangle_cache(kit.model.get_decoder().config, longest, width, kit.device, kit.travels)
        kv = RectangleKV(cache.self_attention_cache, len(sequences), longest, kit.pool)
        super().__init__(kit, sequences, cache, kv, padding_side="right")
        self._start_token_id = start_token_id
        self._encoded_BSD: torch.Tensor | None = None

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

    def _finish(self, logits_BV: torch.Tensor) -> PassCounts:
        is_prefill = not self.is_prefilled
        tokens_BS = self._prompts_BS if is_prefill else self._ids_B1
        real = int(self._mask_BS.sum()) if is_prefill else tokens_BS.numel()
        for sequence in self.sequences:
            sequence.num_cached = sequence.num_known
        counts = PassCounts(
            num_sequences=len(self.sequences),
            real_tokens=real,
            padded_tokens=tokens_BS.numel(),
            prompt_tokens=real if is_prefill else 0,
            issued_tokens=len(self.sequences),
            useful_tokens=self._sample(self.sequences, logits_BV),
        )
        self._drop_finished_rows()
        return counts

    def _keep(self, rows_B: torch.Tensor) -> None:
        super()._keep(rows_B)
        assert self._encoded_BSD is not None, "a pass has ended"
        self._encoded_BSD = self._encoded_BSD[rows_B]
