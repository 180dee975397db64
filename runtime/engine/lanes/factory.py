"""Creates lanes of the type that a model's class supports."""

from collections.abc import Sequence as Rows  # `Sequence` is a running request
from dataclasses import dataclass, replace

from ...batching.prefixes import WITHIN_LANES, SharingRule
from ...cache.paged import PagedKV
from ...cache.pages import KVPages
from ...model.loading import LoadedModel
from ...sequences.sequence import Sequence
from .encoder import Seq2SeqLane, WholePromptsLane
from .lane import Lane, LaneContext
from .packed import PackedLane
from .padded import PaddedLane, SeparateRowsLane


@dataclass(frozen=True, kw_only=True)
class LaneFactory:
    """Creates the lanes of a run, which share `pages` and `context`."""

    model: LoadedModel
    context: LaneContext
    pages: KVPages
    rule: SharingRule = WITHIN_LANES  # of the placement

    @property
    def num_free_pages(self) -> int:
        return self.pages.pool.num_free

    @property
    def sharing(self) -> SharingRule | None:
        """The rule for sharing prefixes. None for padded lanes, which have no pages, and if rotary embeddings, and so
        keys of equal tokens, depend on a sequence's length."""
        if not self.model.shape.is_packed or self.context.rope_lengths is not None:
            return None
        return self.rule

    def packed(
        self, sequences: Rows[Sequence], chunk_tokens: int | None = None, *, has_all_pages: bool = False
    ) -> PackedLane:
        """Creates a packed lane. `has_all_pages`: there are enough for all sequences at their token limits."""
        model = self.model
        cache = PagedKV(
            self.pages,
            expands=model.expands_latents,
            offloaded_layers=self.context.offloaded_layers,
            heads=model.split_heads,
            may_hold_ahead=has_all_pages,
        )
        return PackedLane(self._context(chunk_tokens), sequences, cache)

    def lane(self, sequences: Rows[Sequence], chunk_tokens: int | None = None) -> Lane:
        """Creates a lane of at least one sequence. `chunk_tokens`: prefill tokens per pass; None: the policy's."""
        if self.model.shape.is_packed:
            return self.packed(sequences, chunk_tokens, has_all_pages=True)
        if self.model.looks_ahead:
            return WholePromptsLane(self.context, sequences)
        context, start = self._context(chunk_tokens), self.model.start_token_id
        if start is not None:
            return Seq2SeqLane(context, sequences, start)
        return (SeparateRowsLane if self.model.padding.separate_rows_reason else PaddedLane)(context, sequences)

    def _context(self, chunk_tokens: int | None) -> LaneContext:
        return self.context if chunk_tokens is None else replace(self.context, prefill_chunk_tokens=chunk_tokens)
