"""Lanes of classes with an encoder, which reads whole prompts. An encoder-only model takes one pass and caches nothing.
In an encoder-decoder, the encoder runs in the first pass with the decoder's first token; later passes run the decoder
only, on the stored encoder output."""

from collections.abc import Sequence as Rows  # `Sequence` is a running request

import torch
from transformers import Cache, EncoderDecoderCache

from ...attention.upload import upload
from ...cache.pages import KVCache
from ...cache.rectangle import RectangleKV, cross_rectangle_cache
from ...model.head import HasLogits
from ...model.stages import accepted_arguments
from ...probing.layer_lists import config_behind_encoder
from ...sequences.reading import ScoringTargets
from ...sequences.sequence import Sequence
from ..records import PassCounts
from .lane import Lane, LaneContext
from .padded import RectangleLane


class WholePromptsLane(Lane):
    """Lane of an encoder-only model: right-padded prompts with an attention mask, as one segment each."""

    def __init__(self, context: LaneContext, sequences: Rows[Sequence]):
        super().__init__(context, sequences)
        self._pad_id = getattr(self._model.config, "pad_token_id", None) or 0

    @property
    def cache(self) -> None:
        """Always None: nothing is cached."""

    @property
    def kv(self) -> KVCache:
        return _NoKV()

    def close(self) -> None:
        """Does nothing: the lane holds no pages."""

    def marked_rows(self, marks: torch.Tensor) -> list[bool]:
        """Ignores padding."""
        if (sliced := self._marked_slice_rows(marks)) is not None:
            return sliced
        return (marks & self._mask_BS.bool()).any(-1).tolist()

    def _prepare(self) -> None:
        rows = [list(s.request.prompt_ids) for s in self.sequences]
        width = max(map(len, rows))
        self._ids_BS = upload([row + [self._pad_id] * (width - len(row)) for row in rows], self._device)
        self._mask_BS = upload([[1] * len(row) + [0] * (width - len(row)) for row in rows], self._device)
        encodings = [s.request.encoding for s in self.sequences]
        if any(encoding is not None and encoding.masked for encoding in encodings):  # predictions at masked positions
            self._targets = ScoringTargets.from_sequences(
                (s, row * width + position, [(s.request.prompt_ids[position],)])
                for row, (s, encoding) in enumerate(zip(self.sequences, encodings, strict=True))
                for position in (encoding.masked if encoding is not None else ())
            )
            return
        lengths = (len(s.request.prompt_ids) for s in self.sequences)
        items = enumerate(zip(self.sequences, lengths, strict=True))
        self._targets = self._make_targets(
            (s, row * width + length, s.target_tokens(0, length)) for row, (s, length) in items
        )

    def _forward(self) -> None:
        encoding = self.sequences[0].request.encoding
        if encoding is not None and encoding.has_classes:
            self._readout = self._call_model().logits.float().view(torch.int32)
        else:
            self._read_targets(self._call_model)

    def _call_model(self) -> HasLogits:
        arguments = {"input_ids": self._ids_BS, "attention_mask": self._mask_BS, "use_cache": False}
        return self._model(**accepted_arguments(self._model.forward, arguments))

    def _sampled_sequences(self) -> list[Sequence]:
        return []

    def _finish(self, drawn: torch.Tensor) -> PassCounts:
        for sequence in self.sequences:
            sequence.num_cached = len(sequence.request.prompt_ids)
        num_real = sum(sequence.num_cached for sequence in self.sequences)
        counts = PassCounts(
            num_sequences=len(self.sequences),
            real_tokens=num_real,
            padded_tokens=self._ids_BS.numel(),
            prompt_tokens=num_real,
            issued_tokens=len(self._sampled),
            useful_tokens=self._accept(drawn),
        )
        self.sequences = [sequence for sequence in self.sequences if sequence.finish is None]
        return counts


class _NoKV(KVCache):
    """Empty KV cache of a lane that caches nothing."""

    @property
    def pages(self) -> Rows[int]:
        return ()

    @property
    def dirty_pages(self) -> Rows[int]:
        return ()

    def bind(self, layer: int, pages: torch.Tensor) -> None:
        """Does nothing: no layer is offloaded."""

    def unbind(self, layer: int) -> None:
        """Does nothing: no layer is offloaded."""

    def close(self) -> None:
        """Does nothing: there are no pages."""


class Seq2SeqLane(RectangleLane):
    """Lane of an encoder-decoder: right-padded prompts, and generated tokens without padding, as all rows start
    together. Resumed rows have generated equally many tokens; the decoder gets them in chunks of columns, since its
    head computes logits of every column. Targets to score are decoded in the first pass, right-padded: causal attention
    does not see the padding."""

    def __init__(self, context: LaneContext, sequences: Rows[Sequence], start_token_id: int):
        width = max(len(s.request.prompt_ids) for s in sequences)
        longest = max(max(s.request.max_new_tokens, s.request.num_scored) for s in sequences)
        assert len({len(s.generated) for s in sequences}) == 1, "rows of a lane have generated equally many tokens"
        config = config_behind_encoder(context.model)
        cache = cross_rectangle_cache(config, longest, width, context.device, context.offloaded_layers)
        kv = RectangleKV(cache.self_attention_cache, len(sequences), longest, context.pool)
        super().__init__(context, sequences, cache, kv, padding_side="right")
        self._start_token_id = start_token_id
        self._chunk_columns = max(1, context.prefill_chunk_tokens // len(sequences))
        self._num_cached = 0  # decoder positions in the cache
        self._encoded_BSD: torch.Tensor | None = None

    @property
    def is_prefilling(self) -> bool:
        """True until the encoder has run."""
        return self._encoded_BSD is None

    def _prompt(self, sequence: Sequence) -> Rows[int]:
        """The encoder's input."""
        return sequence.request.prompt_ids

    def _real_tokens(self, width: int) -> torch.Tensor | None:
        return self._mask_BS if width == self._mask_BS.shape[1] else None

    def _prepare(self) -> None:
        if self._reads_prompts:  # all targets at once
            rows = [[self._start_token_id, *s.request.decoder_ids] for s in self.sequences]
            width = max(map(len, rows))
            self._ids_BT = upload([row + [0] * (width - len(row)) for row in rows], self._device)
            items = enumerate(zip(self.sequences, rows, strict=True))
            self._targets = ScoringTargets.from_sequences(
                (s, number * width, s.target_tokens(0, len(row))) for number, (s, row) in items
            )
            return
        begin, end = max(0, self._num_cached - 1), self._num_cached + self._chunk_columns - 1
        start = [] if self._num_cached else [self._start_token_id]
        self._ids_BT = upload([start + s.generated[begin:end] for s in self.sequences], self._device)

    def _forward(self) -> None:
        if self._targets is not None:
            self._read_targets(self._call_model)
            return
        self._logits_BV = self._call_model().logits[:, -1].contiguous()  # copied, to free the logits of other columns

    def _call_model(self) -> HasLogits:
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
        if self._targets is not None:
            return []
        end = self._num_cached + self._ids_BT.shape[1] - 1
        return [s for s in self.sequences if len(s.request.prompt_ids) + end == s.num_known]

    def _finish(self, drawn: torch.Tensor) -> PassCounts:
        num_rows, num_columns = self._ids_BT.shape
        is_first, is_prefill = self._num_cached == 0, not all(s.is_prefilled for s in self.sequences)
        self._num_cached += num_columns
        for sequence in self.sequences:
            sequence.num_cached = len(sequence.request.prompt_ids) + self._num_cached - 1
        num_decoder_tokens = num_rows * (num_columns - is_first)  # the start token is not counted
        num_real = num_decoder_tokens
        if self._targets is not None:
            num_real = sum(len(s.request.decoder_ids) for s in self.sequences)
        num_tokens = num_real + (sum(len(s.request.prompt_ids) for s in self.sequences) if is_first else 0)
        counts = PassCounts(
            num_sequences=num_rows,
            real_tokens=num_tokens,
            padded_tokens=num_decoder_tokens + (self._prompts_BS.numel() if is_first else 0),
            prompt_tokens=num_tokens if is_prefill else 0,
            issued_tokens=self.num_sampled,
            useful_tokens=self._accept(drawn),
        )
        self._move_beams()
        self._drop_finished_rows()
        return counts

    @property
    def _generated_cache(self) -> Cache:
        """The decoder's self-attention cache. The cross-attention cache is the same for all beams of a prompt."""
        assert isinstance(self._cache, EncoderDecoderCache), "an encoder-decoder has two caches"
        return self._cache.self_attention_cache

    def _select_rows(self, rows_B: torch.Tensor) -> None:
        super()._select_rows(rows_B)
        assert self._encoded_BSD is not None, "a pass has ended"
        self._encoded_BSD = self._encoded_BSD[rows_B]
