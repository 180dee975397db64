"""Lanes of encoders: a rectangle of whole prompts that passes the model once, and leaves nothing behind."""

from collections.abc import Sequence as Rows

import torch

from ...attention.upload import upload
from ...cache.base import KVCache
from ...model.head import HasLogits
from ...model.traits import accepted
from ...sequences.pooling import Picked
from ...sequences.scoring import Given
from ...sequences.sequence import Sequence
from ..records import PassCounts
from .lane import Lane, LaneContext


class WholeLane(Lane):
    """Right-padded: the class finds the first token of each row where it looks for it, and its mask hides padding from
    the others. Positions and token types are the class's own, as of one segment."""

    def __init__(self, context: LaneContext, sequences: Rows[Sequence]):
        super().__init__(context, sequences)
        self._pad_id = getattr(self._model.config, "pad_token_id", None) or 0

    @property
    def cache(self) -> None:
        """The class keeps nothing of a prompt."""

    @property
    def kv(self) -> KVCache:
        return _NoKV()

    def close(self) -> None:
        """The lane holds nothing that others want."""

    def rows_with(self, marks: torch.Tensor) -> list[bool]:
        """Padding may be whatever it is."""
        if (sliced := self._sliced_rows(marks)) is not None:
            return sliced
        return (marks & self._mask_BS.bool()).any(-1).tolist()

    def _prepare(self) -> None:
        rows = [list(s.request.prompt_ids) for s in self.sequences]
        width = max(map(len, rows))
        self._ids_BS = upload([row + [self._pad_id] * (width - len(row)) for row in rows], self._device)
        self._mask_BS = upload([[1] * len(row) + [0] * (width - len(row)) for row in rows], self._device)
        self._given = self._asked(width)

    def _asked(self, width: int) -> Given | Picked:
        """What is read of the rows: tokens in masks' places, or hidden states."""
        encodings = [s.request.encoding for s in self.sequences]
        if any(encoding is not None and encoding.masked for encoding in encodings):
            return Given.of(
                (s, row * width + place, [(s.request.prompt_ids[place],)])
                for row, (s, encoding) in enumerate(zip(self.sequences, encodings, strict=True))
                for place in (encoding.masked if encoding is not None else ())
            )
        given = (s.given(0, len(s.request.prompt_ids)) for s in self.sequences)
        ends = (row * width + len(s.request.prompt_ids) for row, s in enumerate(self.sequences))
        return Picked.of(
            (s, end - len(tokens), tokens) for s, end, tokens in zip(self.sequences, ends, given, strict=True)
        )

    def _forward(self) -> None:
        encoding = self.sequences[0].request.encoding
        if encoding is not None and encoding.has_classes:
            self._read = self._called().logits.float().view(torch.int32)
        else:
            self._read_given(self._called)

    def _called(self) -> HasLogits:
        arguments = {"input_ids": self._ids_BS, "attention_mask": self._mask_BS, "use_cache": False}
        return self._model(**accepted(self._model.forward, arguments))

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
            issued_tokens=len(self._drawing),
            useful_tokens=self._tell(drawn),
        )
        self.sequences = [sequence for sequence in self.sequences if sequence.finish is None]
        return counts


class _NoKV(KVCache):
    """Keys and values that are gone with the layer that made them."""

    @property
    def pages(self) -> Rows[int]:
        return ()

    @property
    def changed(self) -> Rows[int]:
        return ()

    def bind(self, layer: int, pages: torch.Tensor) -> None:
        """The call has no effect: no layer travels."""

    def unbind(self, layer: int) -> None:
        """The call has no effect: no layer travels."""

    def close(self) -> None:
        """The lane holds nothing that others want."""
