"""Computes the work of each lane (micro-batch) in a pass, from the lengths of its sequences.

It must agree with what the engine runs: `engine/lanes/packed.py`, `padded.py` and `seq2seq.py`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...batching.prefixes import WITHIN_LANES, SharedPrefix, SharingRule
from ..placement.memory import PAGE_TOKENS, MicroBatch, SequenceSize, prefix_shares, prompt_columns
from ..shape.model import ModelShape


@dataclass(frozen=True, kw_only=True)
class LaneWork:
    """The work of one lane in one pass, padding included."""

    num_tokens: int  # tokens that go through the decoder
    num_rows: int  # tokens that need logits
    kv_positions: int = 0  # positions that decoding tokens attend to, in total
    prefill_pairs: int = 0  # pairs of query and key of prompts
    selected_positions: int = 0  # positions that tokens with logits attend to, in total
    held_pages: int = 0  # KV pages of the lane after the pass
    changed_pages: int = 0  # KV pages into which the pass writes
    num_encoder_tokens: int = 0  # tokens that go through the encoder
    num_cross_positions: int = 0  # encoder positions that decoder tokens attend to, in total

    @property
    def skips_unselected(self) -> bool:
        """True if the last layer drops tokens that need no logits, after it has cached their KV."""
        return can_skip_unselected(self.num_tokens, self.num_rows)

    @property
    def num_positions(self) -> int:
        """KV positions after the pass, in whole pages."""
        return self.held_pages * PAGE_TOKENS


@dataclass(frozen=True, kw_only=True)
class PassGroup:
    """Several passes with the same work."""

    lanes: Sequence[LaneWork]
    prefill_share: float  # prompt tokens relative to all tokens
    num_passes: float = 1.0

    @property
    def is_prefill(self) -> bool:
        return self.prefill_share == 1.0


def can_skip_unselected(num_tokens: int, num_selected: int) -> bool:
    """True if it saves time that the last layer drops tokens which need no logits ("unselected").

    The selected tokens then go through the weights before attention twice.
    """
    return 2 * num_selected <= num_tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one sequence that a pass computes."""

    past: int  # cached positions before the pass
    new: int  # tokens that the pass computes
    num_selected: int  # number of `new` tokens that need logits, counted from the end
    num_shared: int = 0  # cached positions in pages of a shared prefix

    @property
    def num_own_pages(self) -> int:
        """The number of KV pages after the pass, without those of a shared prefix."""
        return _num_pages(self.past + self.new) - self.num_shared // PAGE_TOKENS


def packed_work(pieces: Iterable[Piece], num_pages: int = 0) -> LaneWork:
    """Returns the work of a packed lane. Pieces with `new` = 0 have KV pages, but no work.

    `num_pages`: KV pages of the lane that belong to none of the pieces, such as those of shared prefixes.
    """
    tokens = rows = kv_positions = prefill_pairs = selected_positions = last_end = changed_pages = 0
    for piece in pieces:
        end = piece.past + piece.new
        num_pages += piece.num_own_pages
        if not piece.new:
            continue
        tokens, last_end = tokens + piece.new, end
        selected = piece.num_selected
        rows += selected
        selected_positions += selected * end - selected * (selected - 1) // 2  # a token attends to all before it
        changed_pages += _num_pages(end) - piece.past // PAGE_TOKENS
        if piece.new == 1:
            kv_positions += end
        else:  # all pairs with earlier positions, and the causal half of pairs among new tokens
            prefill_pairs += piece.new * piece.past + piece.new * (piece.new + 1) // 2
    return LaneWork(
        num_tokens=tokens,
        num_rows=max(1, rows),  # the head computes at least one row
        kv_positions=kv_positions,
        prefill_pairs=prefill_pairs,
        selected_positions=selected_positions or last_end,
        held_pages=num_pages,
        changed_pages=changed_pages,
    )


def prefill_works(shape: ModelShape, lane: MicroBatch, chunk_tokens: int) -> list[LaneWork]:
    """Returns the lane's work in each of its prefill passes."""
    if not lane:
        return []
    if shape.has_encoder:
        return [_encoder_pass(lane)]
    if not shape.is_packed:
        return list(_padded_prefills(shape, lane, chunk_tokens))
    return [work for work in _prompt_passes([lane], chunk_tokens, WITHIN_LANES)[0] if work is not None]


def with_drafts(work: LaneWork, num_drafted: int) -> LaneWork:
    """Returns the work of a decode pass that also computes `num_drafted` tokens after the last one of each sequence."""
    factor = 1 + num_drafted
    later = work.num_rows * num_drafted * factor // 2  # a drafted token also attends to those before it
    return replace(
        work,
        num_tokens=factor * work.num_tokens,
        num_rows=factor * work.num_rows,
        kv_positions=factor * work.kv_positions + later,
        selected_positions=factor * work.selected_positions + later,
    )


def decode_work(shape: ModelShape, lane: MicroBatch, pass_index: int) -> LaneWork | None:
    """Returns the work of decode pass number `pass_index`; None if all sequences have ended before.

    Assumes that every sequence runs to its token limit.
    """
    rows = [size for size in lane if size.max_new_tokens - 1 > pass_index]
    if not rows:
        return None
    if shape.is_packed:
        shares = prefix_shares(rows)
        if shares is None:
            return packed_work(Piece(size.num_prompt_tokens + pass_index, 1, 1) for size in rows)
        pieces = [
            Piece(size.num_prompt_tokens + pass_index, 1, 1, prefix.num_tokens if prefix is not None else 0)
            for size, prefix in zip(rows, shares.prefixes, strict=True)
        ]
        prefix_pages = (  # whole pages of a prefix count once; each row has a copy of the last, partial page
            prefix.num_tokens // PAGE_TOKENS - (parent.num_tokens // PAGE_TOKENS if parent is not None else 0)
            for prefix, parent in shares.parents.items()
        )
        return packed_work(pieces, sum(prefix_pages))
    width = max(size.num_prompt_tokens for size in lane)
    cached = 1 + pass_index + (1 if shape.has_encoder else width)
    return LaneWork(
        num_tokens=len(rows),
        num_rows=len(rows),
        kv_positions=len(rows) * cached,
        held_pages=len(rows) * _num_pages(cached),
        changed_pages=len(rows),
        num_cross_positions=len(rows) * width if shape.has_encoder else 0,
    )


def _num_pages(num_positions: int) -> int:
    return -(-num_positions // PAGE_TOKENS)


@dataclass(kw_only=True, eq=False)
class _PromptRow:
    """A prompt, or a shared prefix, that is being prefilled."""

    begin: int  # number of tokens of `parent`, with which it starts
    end: int  # number of tokens
    parent: "_PromptRow | None"  # a shared prefix
    size: SequenceSize | None  # None: a shared prefix
    num_done: int = field(init=False)  # tokens computed so far, `parent` included
    end_pass: int | None = None  # first pass in which other rows may use its KV; None: not known yet
    num_pages: int = 0  # own KV pages so far

    def __post_init__(self) -> None:
        self.num_done = self.begin

    def can_begin(self, pass_index: int) -> bool:
        """True if the KV of `parent` may be used in this pass."""
        return self.parent is None or (self.parent.end_pass is not None and self.parent.end_pass <= pass_index)

    def take_piece(self, max_tokens: int) -> Piece:
        """Removes up to `max_tokens` from the tokens left to compute, and returns them as a piece."""
        new, cached = min(max_tokens, self.end - self.num_done), self.num_done
        self.num_done += new
        piece = Piece(cached, new, self.size.num_selected(cached, new) if self.size is not None else 0, self.begin)
        self.num_pages = piece.num_own_pages
        return piece


@dataclass(kw_only=True)
class _WaitingRows:
    """Rows of a lane that wait for prefill."""

    waiting: deque[_PromptRow]  # in order
    num_pages: int = 0  # KV pages of the lane so far

    def next_pass(self, chunk_tokens: int, pass_index: int, delay: int) -> LaneWork | None:
        """Returns the work of the next pass; None if all rows wait for shared prefixes.

        Takes rows in order until the chunk is full, except those that wait; the last row may be taken in part.
        `delay`: number of passes after which other rows may use the KV of a finished row.
        """
        pieces, unfinished = list[Piece](), list[_PromptRow]()
        num_left = chunk_tokens  # tokens that fit into the chunk
        other_pages = self.num_pages  # pages of rows without a piece in this pass
        while self.waiting and num_left:
            row = self.waiting.popleft()
            if row.can_begin(pass_index):
                other_pages -= row.num_pages
                pieces.append(row.take_piece(num_left))
                num_left -= pieces[-1].new
            if row.num_done < row.end:
                unfinished.append(row)
            else:
                row.end_pass = pass_index + delay
        self.waiting.extendleft(reversed(unfinished))
        if not pieces:
            return None
        self.num_pages = other_pages + sum(piece.num_own_pages for piece in pieces)
        return packed_work(pieces, other_pages)


def block_prefills(
    shape: ModelShape, lanes: Sequence[MicroBatch], chunk_tokens: int, rule: SharingRule
) -> list[list[LaneWork | None]]:
    """Returns the work of a block's prefill passes, by lane and pass.

    None: the lane waits in this pass for a shared prefix that another lane computes.
    """
    if not shape.is_packed:
        return [[*prefill_works(shape, lane, chunk_tokens)] for lane in lanes]
    groups = rule.sharing_groups([[i] for i in range(len(lanes))])
    return [works for group in groups for works in _prompt_passes([lanes[i] for [i] in group], chunk_tokens, rule)]


def _prompt_passes(lanes: Sequence[MicroBatch], chunk_tokens: int, rule: SharingRule) -> list[list[LaneWork | None]]:
    """Returns what `block_prefills` returns, for packed lanes that share prefixes with each other."""
    waiting_lanes = [_WaitingRows(waiting=deque(each)) for each in _prompt_rows(lanes, rule)]
    works = [list[LaneWork | None]() for _ in lanes]
    pass_index = 0
    while any(lane.waiting for lane in waiting_lanes):
        for lane, lane_works in zip(waiting_lanes, works, strict=True):
            if lane.waiting:
                lane_works.append(lane.next_pass(chunk_tokens, pass_index, 0 if rule.in_pass else 1))
        pass_index += 1
    return works


def _prompt_rows(lanes: Sequence[MicroBatch], rule: SharingRule) -> list[list[_PromptRow]]:
    """Returns the rows of each lane in order. A shared prefix is a row just before the first prompt that uses it."""
    shares = prefix_shares([size for lane in lanes for size in lane])
    if shares is None:
        return [
            [_PromptRow(begin=0, end=size.num_prompt_tokens, parent=None, size=size) for size in lane] for lane in lanes
        ]
    rows, prefix_rows, lane_prefixes = list[list[_PromptRow]](), dict[SharedPrefix, _PromptRow](), iter(shares.prefixes)

    def prefix_row(prefix: SharedPrefix | None) -> _PromptRow | None:
        """Returns the row of a prefix; at the first call, adds the row (and those of its parents) to the last lane."""
        if prefix is None:
            return None
        if prefix not in prefix_rows:
            parent = prefix_row(shares.parents[prefix])
            begin = parent.end if parent is not None else 0
            prefix_rows[prefix] = _PromptRow(begin=begin, end=rule.num_shared(prefix), parent=parent, size=None)
            rows[-1].append(prefix_rows[prefix])
        return prefix_rows[prefix]

    for lane in lanes:
        rows.append([])
        for size in lane:
            row = prefix_row(next(lane_prefixes))
            begin = row.end if row is not None else 0
            rows[-1].append(_PromptRow(begin=begin, end=size.num_prompt_tokens, parent=row, size=size))
    return rows


def _padded_prefills(shape: ModelShape, lane: MicroBatch, chunk_tokens: int) -> Iterator[LaneWork]:
    """Yields the prefill passes of a padded lane: each computes some columns of all rows."""
    rows, width = len(lane), max(size.num_prompt_tokens for size in lane)
    columns = prompt_columns(shape, rows, width, chunk_tokens)
    first_scored = sorted(width - size.num_scored for size in lane)  # column of each row
    for start in range(0, width, columns):
        end = min(start + columns, width)
        num_scored = sum(max(0, end - max(start, first)) for first in first_scored)
        yield LaneWork(
            num_tokens=rows * (end - start),
            num_rows=num_scored or rows,
            prefill_pairs=rows * (end - start) * end,
            held_pages=rows * _num_pages(end),
            changed_pages=rows * (_num_pages(end) - start // PAGE_TOKENS),
        )


def _encoder_pass(lane: MicroBatch) -> LaneWork:
    """Returns the first pass of an encoder-decoder.

    Prompts go through the encoder. The start token of each row, or all scored tokens, go through the decoder.
    """
    rows, width = len(lane), max(size.num_prompt_tokens for size in lane)
    columns = max(1, *(size.num_scored for size in lane))  # decoder tokens per row
    return LaneWork(
        num_tokens=rows * columns,
        num_rows=max(rows, sum(size.num_scored for size in lane)),
        kv_positions=rows if columns == 1 else 0,
        prefill_pairs=rows * width**2 + (rows * columns**2 if columns > 1 else 0),
        held_pages=rows * _num_pages(columns),
        changed_pages=rows * _num_pages(columns),
        num_encoder_tokens=rows * width,
        num_cross_positions=rows * width * columns,
    )
