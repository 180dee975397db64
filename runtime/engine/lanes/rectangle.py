"""What lanes with padding have in common: a rectangle of prompts, its mask, and a cache that loses its rows with it."""

from abc import abstractmethod
from collections.abc import Sequence as Rows

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache

from ...attention.upload import upload
from ...cache.rectangle import RectangleKV
from ...sequences.sequence import Sequence
from .lane import Lane, LaneContext


class RectangleLane(Lane):
    """`kv`: the layers of `cache` that travel. Rows of finished sequences leave the rectangle."""

    def __init__(
        self, context: LaneContext, sequences: Rows[Sequence], cache: Cache, kv: RectangleKV, *, padding_side: str
    ):
        super().__init__(context, sequences)
        self._padding_side = padding_side
        self._fill(cache, kv)

    def _fill(self, cache: Cache, kv: RectangleKV) -> None:
        """Begins with all that is known of the sequences, of which an empty cache holds nothing yet."""
        self._cache, self._kv = cache, kv
        prompts = [torch.tensor(self._prompt(s), device=self._device) for s in self.sequences]
        masks = [torch.ones_like(prompt) for prompt in prompts]
        self._prompts_BS, self._mask_BS = (
            pad_sequence(rows, batch_first=True, padding_side=self._padding_side) for rows in (prompts, masks)
        )

    def _prompt(self, sequence: Sequence) -> Rows[int]:
        """What the row begins with."""
        return sequence.known_ids

    @property
    def cache(self) -> Cache:
        return self._cache

    @property
    def kv(self) -> RectangleKV:
        return self._kv

    def close(self) -> None:
        self._kv.close()

    def rows_with(self, marks: torch.Tensor) -> list[bool]:
        """Padding may be whatever it is."""
        if (sliced := self._sliced_rows(marks)) is not None:
            return sliced
        real = self._real_tokens(marks.shape[1])
        return (marks if real is None else marks & real.bool()).any(-1).tolist()

    @abstractmethod
    def _real_tokens(self, width: int) -> torch.Tensor | None:
        """The mask of a hidden state of the pass that is `width` tokens wide; None: all are real."""

    def _move_beams(self) -> None:
        """What each row has cached becomes that of the beam which it goes on from. Nothing else of a row differs from
        that of its neighbours: their prompts are the same."""
        if (sources := self._take_sources()) is not None:
            self._own_cache.reorder_cache(upload(sources, self._device))  # pyright: ignore[reportArgumentType]

    @property
    def _own_cache(self) -> Cache:
        """What is cached of the tokens that a model has generated behind."""
        return self._cache

    def _drop_finished_rows(self) -> None:
        kept = [row for row, s in enumerate(self.sequences) if s.finish is None]
        if kept and len(kept) < len(self.sequences):
            self._keep(upload(kept, self._device))
        self.sequences = [self.sequences[row] for row in kept]

    def _keep(self, rows_B: torch.Tensor) -> None:
        """Lets go of all rows but these, which ascend."""
        self._cache.reorder_cache(rows_B)  # pyright: ignore[reportArgumentType] - a legacy type, as in processors.py
        self._mask_BS = self._mask_BS[rows_B]
