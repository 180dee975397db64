"""Work is counted as lanes do it: the same tokens, rows and passes as the engine's, from sizes alone."""

import pytest

from runtime.batching.prefixes import SharedPrefix, SharingRule
from runtime.plan.cost.lane_work import Piece, block_prefills, decode_work, packed_work, prefill_works
from runtime.plan.placement.memory import PAGE_TOKENS, kv_tokens, pass_tokens
from tests.toy import sizes_of, toy_shape

PACKED, PADDED, BEHIND = toy_shape(), toy_shape(is_packed=False), toy_shape(is_packed=False, num_encoder_layers=2)


def test_pairs_and_positions_are_those_that_are_looked_at() -> None:
    """A prompt of 3 behind 4 cached positions looks at 5 + 6 + 7; a single token at all 10; one is not in the pass."""
    work = packed_work([Piece(4, 3, 1), Piece(9, 1, 1), Piece(20, 0, 0)])
    assert (work.num_tokens, work.num_rows, work.kv_positions, work.prefill_pairs) == (4, 2, 10, 18)
    assert (work.held_pages, work.changed_pages) == (1 + 1 + 2, 2)
    assert work.selected_positions == 7 + 10


def test_prompts_fill_chunks_in_order_and_the_head_takes_those_that_end() -> None:
    works = prefill_works(PACKED, sizes_of([5, 17, 3]), 10)
    assert [work.num_tokens for work in works] == [10, 10, 5]
    assert [work.num_rows for work in works] == [1, 1, 2]
    assert works[0].prefill_pairs == 5 * 6 // 2 + 5 * 6 // 2
    assert works[1].prefill_pairs == 10 * 5 + 10 * 11 // 2
    assert [work.selected_positions for work in prefill_works(PACKED, sizes_of([5, 17, 3]), 6)] == [5, 7, 13, 17, 3]


def test_chunks_carry_every_token_of_every_prompt_once() -> None:
    for lengths in ([1], [512], [513, 1], [7, 90, 301, 4]):
        for chunk in (1, 16, 512):
            works = prefill_works(PACKED, sizes_of(lengths), chunk)
            assert sum(work.num_tokens for work in works) == sum(lengths)
            assert len(works) == -(-sum(lengths) // chunk)


def test_padded_lanes_compute_the_whole_rectangle() -> None:
    works = prefill_works(PADDED, sizes_of([5, 17, 3]), 30)
    assert [work.num_tokens for work in works] == [30, 21]
    assert sum(work.prefill_pairs for work in works) == 3 * (10 * 10 + 7 * 17)
    assert decode_work(PADDED, sizes_of([5, 17, 3]), 2).kv_positions == 3 * (17 + 3)  # type: ignore[union-attr]


def test_sequences_leave_when_they_have_run_to_their_limit() -> None:
    lane = [*sizes_of([10], max_new_tokens=2), *sizes_of([20], max_new_tokens=4)]
    works = [decode_work(PACKED, lane, turn) for turn in range(4)]
    assert [None if work is None else work.kv_positions for work in works] == [11 + 21, 22, 23, None]


def test_behind_an_encoder_prompts_are_the_encoders() -> None:
    (work,) = prefill_works(BEHIND, sizes_of([5, 17]), 512)
    assert (work.num_encoder_tokens, work.num_tokens, work.prefill_pairs) == (34, 2, 2 * 17**2)
    assert decode_work(BEHIND, sizes_of([5, 17]), 0).num_cross_positions == 34  # type: ignore[union-attr]


PARENT = SharedPrefix(num_tokens=40)
CHILD = SharedPrefix(num_tokens=70, parent=PARENT)
ALIKE = [
    size.with_prefix(prefix)
    for size, prefix in zip(sizes_of([90, 75, 60, 50, 33], 20), (CHILD, CHILD, PARENT, PARENT, None), strict=True)
]


def test_rows_that_decode_hold_what_they_share_once() -> None:
    """The parent has 2 whole pages, the child 2 more; of the pages that are not full each row has its own."""
    work, alone = decode_work(PACKED, ALIKE, 0), decode_work(PACKED, sizes_of([90, 75, 60, 50, 33], 20), 0)
    assert work is not None
    assert alone is not None
    assert work.held_pages == alone.held_pages - (2 * 4 + 2 * 2) + (2 + 2)
    assert (work.kv_positions, work.changed_pages) == (alone.kv_positions, alone.changed_pages)
    last = decode_work(PACKED, ALIKE, 18)
    assert last is not None
    assert last.held_pages * PAGE_TOKENS <= kv_tokens(PACKED, [ALIKE])


def test_a_prefix_with_one_row_left_is_its_own() -> None:
    sizes = [ALIKE[0], *sizes_of([75, 60], 1)]
    work = decode_work(PACKED, [sizes[0], *(size.with_prefix(CHILD) for size in sizes[1:])], 3)
    assert work == decode_work(PACKED, sizes_of([90], 20), 3)


@pytest.mark.parametrize("chunk", [7, 64, 1024])
@pytest.mark.parametrize("among_lanes", [False, True])
@pytest.mark.parametrize("page_tokens", [1, PAGE_TOKENS])
def test_no_pass_has_more_tokens_than_a_lane_is_said_to_carry(chunk: int, among_lanes: bool, page_tokens: int) -> None:
    lanes = [ALIKE[:3], ALIKE[3:]]
    rule = SharingRule(among_lanes=among_lanes, page_tokens=page_tokens)
    for lane, works in zip(lanes, block_prefills(PACKED, lanes, chunk, rule), strict=True):
        assert max(work.num_tokens for work in works if work is not None) <= pass_tokens(PACKED, lane, chunk)
