"""Lanes of encoder-decoders: the prompts are the encoder's input, read whole in the first pass together with the
decoder's first token; what they became stays with the lane, and every later pass is the decoder's alone.
"""

from collections.abc import Sequence as Rows

import torch
from transformers import Cache, EncoderDecoderCache

from ...attention.upload import upload
from ...cache.rectangle import RectangleKV, cross_rectangle_cache
from ...model.head import HasLogits
from ...probing.decoder_config import config_behind_encoder
from ...sequences.scoring import Given
from ...sequences.sequence import Sequence
from ..records import PassCounts
from .lane import LaneContext
from .rectangle import RectangleLane


class Seq2SeqLane(RectangleLane):
    """A right-padded rectangle of prompts; no padding among generated tokens, as all rows begin together. Rows that go
    on bring equally many, which the decoder is given in chunks of columns: its head makes logits of each. What is
    scored the decoder is given whole in the first pass, right-padded: no token sees those behind it."""

    def __init__(self, context: LaneContext, sequences: Rows[Sequence], start_token_id: int):
        width = max(len(s.request.prompt_ids) for s in sequences)
        longest = max(max(s.request.max_new_tokens, s.request.num_scored) for s in sequences)
        assert len({len(s.generated) for s in sequences}) == 1, "rows that begin together have generated equally much"
        config = config_behind_encoder(context.model)
        cache = cross_rectangle_cache(config, longest, width, context.device, context.travels)
        kv = RectangleKV(cache.self_attention_cache, len(sequences), longest, context.pool)
        super().__init__(context, sequences, cache, kv, padding_side="right")
        self._start_token_id = start_token_id
        self._columns = max(1, context.prefill_chunk_tokens // len(sequences))
        self._done = 0  # positions of the decoder that the cache holds
        self._encoded_BSD: torch.Tensor | None = None

    @property
    def is_filling(self) -> bool:
        """Once the encoder has run, all that is left is the decoder's, if it be several tokens at once."""
        return self._encoded_BSD is None

    def _prompt(self, sequence: Sequence) -> Rows[int]:
        """The encoder's input."""
        return sequence.request.prompt_ids

    def _real_tokens(self, width: int) -> torch.Tensor | None:
        return self._mask_BS if width == self._mask_BS.shape[1] else None

    def _prepare(self) -> None:
        """The next columns of the start token and all that was generated: nearly always the last one alone."""
        if self._is_read:
            self._given = self._prepare_scored()
            return
        begin, end = max(0, self._done - 1), self._done + self._columns - 1
        start = [] if self._done else [self._start_token_id]
        self._ids_BT = upload([start + s.generated[begin:end] for s in self.sequences], self._device)

    def _prepare_scored(self) -> Given:
        """The decoder's whole input, and what is scored of it."""
        rows = [[self._start_token_id, *s.request.decoder_ids] for s in self.sequences]
        width = max(map(len, rows))
        self._ids_BT = upload([row + [0] * (width - len(row)) for row in rows], self._device)
        given = (s.given(0, len(row)) for s, row in zip(self.sequences, rows, strict=True))
        each = zip(self.sequences, given, strict=True)
        return Given.of((s, number * width, tokens) for number, (s, tokens) in enumerate(each))

    def _forward(self) -> None:
        if self._given is not None:
            self._read_given(self._called)
            return
        self._logits_BV = self._called().logits[:, -1].contiguous()  # the others' memory is given back

    def _called(self) -> HasLogits:
        encoded = self._encoded_BSD
        out = self._model(
            input_ids=self._prompts_BS if encoded is None else None,
            encoder_outputs=None if encoded is None else (encoded,),
            attention_mask=self._mask_BS,
            decoder_input_ids=self._ids_BT,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._encoded_BSD = out.encoder_last_hidden_state
        return out

    def _sampled_sequences(self) -> list[Sequence]:
        if self._given is not None:
            return []
        end = self._done + self._ids_BT.shape[1] - 1
        return [s for s in self.sequences if len(s.request.prompt_ids) + end == s.num_known]

    def _finish(self, drawn: torch.Tensor) -> PassCounts:
        num_rows, num_columns = self._ids_BT.shape
        is_first, is_behind = self._done == 0, not all(s.is_prefilled for s in self.sequences)
        self._done += num_columns
        for sequence in self.sequences:
            sequence.num_cached = len(sequence.request.prompt_ids) + self._done - 1
        num_decoder = num_rows * (num_columns - is_first)  # the start token counts as none
        num_real = num_decoder
        if self._given is not None:
            num_real = sum(len(s.request.decoder_ids) for s in self.sequences)
        real = num_real + (sum(len(s.request.prompt_ids) for s in self.sequences) if is_first else 0)
        counts = PassCounts(
            num_sequences=num_rows,
            real_tokens=real,
            padded_tokens=num_decoder + (self._prompts_BS.numel() if is_first else 0),
            prompt_tokens=real if is_behind else 0,
            issued_tokens=self.num_drawn,
            useful_tokens=self._tell(drawn),
        )
        self._move_beams()
        self._drop_finished_rows()
        return counts

    @property
    def _own_cache(self) -> Cache:
        """The decoder's own: what it keeps of the encoder's positions is the same for all beams of a prompt."""
        assert isinstance(self._cache, EncoderDecoderCache), "behind an encoder"
        return self._cache.self_attention_cache

    def _keep(self, rows_B: torch.Tensor) -> None:
        super()._keep(rows_B)
        assert self._encoded_BSD is not None, "a pass has ended"
        self._encoded_BSD = self._encoded_BSD[rows_B]
