"""Lanes without padding: the tokens of all sequences of a micro-batch are packed into one row."""

import sys
from collections.abc import Sequence as Rows  # `Sequence` is a running request
from itertools import accumulate

import torch

from ...attention.upload import upload
from ...cache.paged import PagedKV, PassView
from ...cache.pages import SharedPages
from ...model.head import HasLogits
from ...sequences.drafts import NO_DRAFT, Draft, Drafts
from ...sequences.reading import PoolingTargets
from ...sequences.sequence import Sequence
from ..records import PassCounts
from .lane import Lane, LaneContext


class PackedLane(Lane):
    """Sequences may enter and leave between passes, and a pass may mix prefill and decode."""

    def __init__(self, context: LaneContext, sequences: Rows[Sequence], cache: PagedKV):
        super().__init__(context, [])
        self._chunk_tokens, self._cache = context.prefill_chunk_tokens, cache
        self._new_tokens: list[int] = []
        self._num_selected: list[int] = []
        self._has_decoded = False
        self._drafts, self._drafts_beside_prompts = context.drafts, context.drafts_beside_prompts
        self._drafted: list[Draft] = []  # of each sequence in the pass
        self._drafted_logits_BV: torch.Tensor | None = None  # of all selected tokens, if some are drafted
        self.hidden_TD: torch.Tensor | None = None  # of the tokens of the last pass, with `LaneContext.keeps_hidden`
        for sequence in sequences:
            self.enter(sequence)

    @property
    def cache(self) -> PagedKV:
        return self._cache

    @property
    def kv(self) -> PagedKV:
        return self._cache

    @property
    def is_prefilling(self) -> bool:
        """True until all sequences have decoded once; later restarts prefill while the others decode."""
        return not self._has_decoded and not self.is_prefilled

    def enter(self, sequence: Sequence, *, past: int = 0) -> None:
        """Adds a sequence and recomputes its cache, except a shared prefix. `past`: positions that count as cached, for
        profiling."""
        sequence.num_cached = sequence.parent_prefix.num_tokens if sequence.parent_prefix is not None else past
        self.sequences.append(sequence)
        self._cache.table.add(past, owned_prefix=sequence.fills_prefix, prefix=sequence.parent_prefix)

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence and frees its pages."""
        if sequence.fills_prefix is not None:
            sequence.fills_prefix.num_computed = sequence.num_cached
        position = self._position(sequence)
        self._cache.table.remove(position)
        del self.sequences[position]
        if self._drafts is not None:
            self._drafts.leave(sequence)

    def _position(self, sequence: Sequence) -> int:
        return next(i for i, other in enumerate(self.sequences) if other is sequence)

    def take_back(self, sequence: Sequence, num_cached: int) -> None:
        """Uncaches the tokens of a sequence after the first `num_cached` ones. Its pages must not be quantized."""
        sequence.num_cached = num_cached
        self._cache.table.take_back(self._position(sequence), num_cached)

    def release(self, shared: SharedPages) -> None:
        """Drops one user of shared pages that has not entered the lane."""
        self._cache.table.release(shared)

    def close(self) -> None:
        for sequence in list(self.sequences):
            self.leave(sequence)

    def marked_rows(self, marks: torch.Tensor) -> list[bool]:
        # The last layer may hold only the selected tokens, or a dummy token if none is selected.
        if (sliced := self._marked_slice_rows(marks)) is not None:
            return sliced
        marked, counts = marks.flatten().cpu(), self._new_tokens
        if len(marked) != sum(counts):
            counts = self._num_selected
        if not any(counts):
            return [False] * len(counts)
        return [bool(part.any()) for part in marked.split(counts)]

    def choose_tokens(self) -> list[int]:
        """The default number of tokens of each sequence in the next pass. Decode: one each. Prefill: prompts in order
        until the chunk is full, the last one in part; 0 for sequences that wait for their prefix. Restarted sequences
        fill the chunk while the others decode."""
        if self.is_prefilled:
            return [1] * len(self.sequences)
        num_decode = 0 if self.is_prefilling else 1
        new, left = [], self._chunk_tokens
        if any(s.request.num_beams > 1 for s in self.sequences):
            left = max(left, len(self.sequences))  # the last tokens of all beams must run in one pass
        if num_decode:
            left = max(left, len(self.sequences)) - sum(s.is_prefilled for s in self.sequences)
        for s in self.sequences:
            may_begin = s.parent_prefix is None or s.parent_prefix.is_complete
            new.append(num_decode if s.is_prefilled else min(left, s.num_known - s.num_cached) if may_begin else 0)
            left -= 0 if s.is_prefilled else new[-1]
            if s.fills_prefix is not None:
                s.fills_prefix.num_computed = s.num_cached + new[-1] * s.fills_prefix.in_pass
        return _align_beams(self.sequences, new)

    def _draft(self, new_tokens: Rows[int]) -> list[Draft]:
        """Guesses tokens after the last known one of each sequence that decodes. In passes with prompts, as many as
        fill the chunk, for which memory is planned."""
        is_decode = self.is_prefilled
        if self._drafts is None or not (is_decode or self._drafts_beside_prompts):
            return [NO_DRAFT] * len(new_tokens)
        wanted = list[tuple[Sequence, int]]()  # at most so many tokens of each
        for row, (sequence, new) in enumerate(zip(self.sequences, new_tokens, strict=True)):
            request = sequence.request
            left = request.max_new_tokens - len(sequence.generated) - 1  # after the token that the pass chooses anyway
            if new and sequence.is_prefilled and request.num_beams == 1:
                wanted.append((sequence, min(left, self._cache.table.num_free_positions(row, new))))
            else:
                wanted.append((sequence, 0))
        num_free = sys.maxsize if is_decode else max(0, self._chunk_tokens - sum(new_tokens))
        return self._drafts.guess_all(wanted, num_free)

    def prepare_pass(self, new_tokens: Rows[int] | None = None) -> None:
        """`new_tokens`: number of known tokens of each sequence in the pass; None: `choose_tokens`. Drafts are
        added."""
        known = list(new_tokens) if new_tokens is not None else self.choose_tokens()
        self._drafted = self._draft(known)
        self._new_tokens = [new + len(draft.tokens) for new, draft in zip(known, self._drafted, strict=True)]
        self._has_decoded |= self.is_prefilled
        super().prepare_pass(new_tokens)

    @property
    def is_pure_decode(self) -> bool:
        """True if the prepared pass decodes exactly one token of each sequence."""
        return self._targets is None and self._cache.is_decode_only and all(count == 1 for count in self._num_selected)

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and positions of the prepared pass, (1, T) each."""
        return self._ids_1T, self._positions_1T

    def substitute_inputs(
        self, inputs: tuple[torch.Tensor, torch.Tensor], view: PassView, selected_B: torch.Tensor
    ) -> None:
        """Replaces the inputs of the prepared pass: its own rows followed by padding rows."""
        self._ids_1T, self._positions_1T = inputs
        self._cache.replace_view(view, selected_B)

    def take_logits(self, logits_BV: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the logits of the pass, or `logits_BV`, and keeps those of the lane's own rows for sampling."""
        all_logits_BV = self._logits_BV if logits_BV is None else logits_BV
        assert all_logits_BV is not None, "the pass has not ended"
        self._logits_BV = all_logits_BV[: len(self.sequences)]
        return all_logits_BV

    def _prepare(self) -> None:
        tokens = list[int]()  # known tokens that are not cached yet
        for s, new, draft in zip(self.sequences, self._new_tokens, self._drafted, strict=True):
            if s.is_prefilled:  # fast path: do not build the list of all known tokens
                tokens += [s.generated[-1], *draft.tokens] if new else ()
            else:
                tokens += s.known_ids[s.num_cached : s.num_cached + new]
        pasts = zip(self._cache.table.past, self._new_tokens, strict=True)
        positions = [position for past, new in pasts for position in range(past, past + new)]
        self._ids_1T = upload([tokens], self._device)
        self._positions_1T = upload([positions], self._device)
        self._num_selected = [
            1 + len(draft.tokens) if draft.tokens else sequence.num_selected(new)
            for sequence, new, draft in zip(self.sequences, self._new_tokens, self._drafted, strict=True)
        ]
        rows = [row for row, draft in enumerate(self._drafted) if draft.tokens]
        self._cache.begin_pass(self._new_tokens, self._num_selected, decoding_rows=rows)
        self._targets = None
        if self._reads_prompts:
            past_R, ends = self._cache.table.past, accumulate(self._new_tokens)
            items = zip(self.sequences, past_R, self._new_tokens, ends, strict=True)
            self._targets = self._make_targets((s, end, s.target_tokens(past, new)) for s, past, new, end in items)

    def _lengths(self) -> torch.Tensor | None:
        if self._rope_lengths is None:
            return None
        items = zip(self.sequences, self._cache.table.past, self._new_tokens, strict=True)
        return torch.tensor([[n for s, past, new in items for n in self._lengths_of(s, range(past, past + new))]])

    def _forward(self) -> None:
        if self._targets is not None and (self._targets.positions or isinstance(self._targets, PoolingTargets)):
            self._read_targets(self._call_model)
            return
        out = self._call_model(self._cache.selected_B)
        if self._keeps_hidden and self._run is not None and self._run.hidden_1TD is not None:
            self.hidden_TD = self._run.hidden_1TD[0]
        logits_TV = out.logits[0]
        has_selected_only = len(logits_TV) == len(self._cache.selected_B)  # some classes ignore logits_to_keep
        self._logits_BV = logits_TV if has_selected_only else logits_TV[self._cache.selected_B]

    def _call_model(self, logits_to_keep: torch.Tensor | int = 0) -> HasLogits:
        extra = {"logits_to_keep": logits_to_keep} if self._model.can_generate() else {}
        return self._model(
            input_ids=self._ids_1T,
            position_ids=self._positions_1T,
            past_key_values=self._cache,
            use_cache=True,
            **extra,
        )

    def sample(self) -> torch.Tensor:
        """Queues the sampling of the token after the last known one of each sequence. `end_pass` samples those after
        accepted drafts."""
        if any(draft.tokens for draft in self._drafted):
            assert self._logits_BV is not None, "the pass has not ended"
            self._drafted_logits_BV = self._logits_BV
            ends = zip(accumulate(self._num_selected), self._num_selected, self._num_undrafted, strict=True)
            rows = [row for end, count, sampled in ends for row in range(end - count, end - count + sampled)]
            self._logits_BV = self._logits_BV[upload(rows, self._device)]
        return super().sample()

    def _sampled_sequences(self) -> list[Sequence]:
        if self._targets is not None:
            return []
        pairs = zip(self.sequences, self._num_undrafted, strict=True)
        return [sequence for sequence, count in pairs for _ in range(count)]

    @property
    def _num_undrafted(self) -> list[int]:
        """Number of tokens of each sequence that `sample` samples after: the selected ones, except drafts."""
        pairs = zip(self._num_selected, self._drafted, strict=True)
        return [count - len(draft.tokens) for count, draft in pairs]

    def _accept_drafts(self) -> tuple[int, int]:
        """Samples after each drafted token that equals the one sampled at its position, and appends the results.
        Returns the number of samples, and of those that a returned completion has."""
        logits_BV, self._drafted_logits_BV = self._drafted_logits_BV, None
        rows = zip(self.sequences, self._drafted, accumulate(self._num_selected), strict=True)
        # (sequence, its draft, index of the logits after the token before the draft)
        running = [(s, draft.tokens, end - 1 - len(draft.tokens)) for s, draft, end in rows if draft.tokens]
        num_sampled = num_useful = index = 0
        while running := [each for each in running if self._is_right(each[0], each[1], index)]:
            assert logits_BV is not None, "drafts have logits"
            index += 1
            sampled = [sequence for sequence, _, _ in running]
            self._sampled = sampled
            rows_B = upload([first + index for _, _, first in running], self._device)
            num_useful += self._accept(self._sampler.sample(sampled, logits_BV[rows_B]).cpu())
            num_sampled += len(sampled)
        return num_sampled, num_useful

    def _is_right(self, sequence: Sequence, draft: Rows[int], index: int) -> bool:
        """True if the sequence continues, and the token that was appended last is drafted token number `index`."""
        return sequence.finish is None and index < len(draft) and sequence.generated[-1] == draft[index]

    def _finish(self, drawn: torch.Tensor) -> PassCounts:
        num_decoded = sum(new for s, new in zip(self.sequences, self._new_tokens, strict=True) if s.is_prefilled)
        num_spared = sum(_num_skipped(s, new) for s, new in zip(self.sequences, self._new_tokens, strict=True) if new)
        num_known = [sequence.num_known for sequence in self.sequences]
        begins = [sequence.num_cached for sequence in self.sequences]
        for sequence, new, draft in zip(self.sequences, self._new_tokens, self._drafted, strict=True):
            sequence.num_cached += new - len(draft.tokens)
        sampled, num_useful = self._sampled, self._accept(drawn)
        num_sampled, num_accepted = self._accept_drafts()
        num_kept = list[int]()
        rows = zip(self.sequences, num_known, self._drafted, self._new_tokens, strict=True)
        for sequence, known, draft, new in rows:
            num_right = 0
            if draft.tokens and self._drafts is not None:  # the token after the right ones was sampled too
                num_right = max(0, sequence.num_known - known - 1)
                self._drafts.learn(draft, num_right)
            sequence.num_cached += num_right
            num_kept.append(new - len(draft.tokens) + num_right)
        self._cache.end_pass(num_kept)
        if self._drafts is not None and self.hidden_TD is not None:
            self._show_hidden(self._drafts, self.hidden_TD, begins, num_kept)
        counts = PassCounts(
            num_sequences=sum(
                1 for s, new in zip(self.sequences, self._new_tokens, strict=True) if new and s.fills_prefix is None
            ),
            real_tokens=sum(num_kept),
            padded_tokens=sum(self._new_tokens),
            prompt_tokens=sum(self._new_tokens) - num_decoded,
            issued_tokens=len(sampled) + num_sampled,
            useful_tokens=num_useful + num_accepted,
            spared_tokens=num_spared,
            drafted_tokens=sum(len(draft.tokens) for draft in self._drafted),
            accepted_tokens=num_sampled,
        )
        if (sources := self._take_sources()) is not None:
            self._cache.table.reorder_rows(sources)
        for sequence in [s for s in self.sequences if s.finish is not None or s.is_filled]:
            self.leave(sequence)
        for sequence in [s for s in sampled if self._needs_restart(s)]:
            self.leave(sequence)
            self.enter(sequence)
        return counts

    def _show_hidden(self, drafts: Drafts, hidden_TD: torch.Tensor, begins: Rows[int], num_kept: Rows[int]) -> None:
        """Shows the hidden states of the first `num_kept` tokens of each sequence to the model that guesses. `begins`:
        their positions."""
        parts, self.hidden_TD = hidden_TD.split(self._new_tokens), None
        rows = zip(self.sequences, begins, parts, num_kept, strict=True)
        drafts.show_hidden(
            [
                (sequence, begin, part[:kept])
                for sequence, begin, part, kept in rows
                if kept and sequence.finish is None and sequence.fills_prefix is None
            ]
        )


def _align_beams(sequences: Rows[Sequence], new: Rows[int]) -> list[int]:
    """Defers the last token of beams if other beams of the same search do not reach theirs in this pass."""
    ends = [s.num_cached + count == s.num_known for s, count in zip(sequences, new, strict=True)]
    waiting_ids = {s.request.id for s, end in zip(sequences, ends, strict=True) if s.request.num_beams > 1 and not end}
    if not waiting_ids:
        return list(new)
    items = zip(sequences, new, ends, strict=True)
    return [count - 1 if end and count and s.request.id in waiting_ids else count for s, count, end in items]


def _num_skipped(sequence: Sequence, new: int) -> int:
    """Prompt tokens that a shared prefix saves in this pass; negative for the sequence that computes a prefix."""
    if sequence.fills_prefix is not None:
        return -new
    begin = sequence.parent_prefix.num_tokens if sequence.parent_prefix is not None else 0
    return begin if sequence.num_cached == begin else 0
