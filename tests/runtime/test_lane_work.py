"""Work is counted as lanes do it: the same tokens, rows and passes as the engine's, from sizes alone."""

from runtime.plan.cost.lane_work import Piece, decode_work, packed_work, prefill_works
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
