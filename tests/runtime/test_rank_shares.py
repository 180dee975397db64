"""The bytes of a parameter that one of several ranks holds: rows of its matrices, or some of its experts."""

from dataclasses import replace

import torch

from runtime.plan.shape.rank_shares import RowShare, cut_rows, slice_experts, split_evenly
from runtime.plan.shape.shapes import Companion, Parameter, TensorSlice


def piece_of(shape: tuple[int, ...], *companions: Companion, **more: object) -> TensorSlice:
    num_bytes = 2 * torch.Size(shape).numel()
    piece = TensorSlice(name="w", file="f", offset=1000, num_bytes=num_bytes, dtype="BF16", shape=shape)
    return replace(piece, companions=companions, **more)


def test_the_shares_of_a_matrix_are_its_rows_with_what_belongs_to_them() -> None:
    scales = Companion(role="scales", tensor=replace(piece_of((4, 3)), name="s", offset=0), block_rows=2)
    shared = Companion(role="table", tensor=replace(piece_of((16,)), name="t"))
    whole = Parameter(name="w", shape=(8, 6), pieces=((piece_of((8, 6), scales, shared),),))
    for index in range(2):
        part = cut_rows(whole, RowShare(index=index, count=2))
        assert part is not None
        [[piece]] = part.pieces
        assert (part.shape, piece.offset, piece.num_bytes) == ((4, 6), 1000 + index * 48, 48)
        assert [(each.tensor.offset, each.tensor.shape) for each in piece.companions] == [
            (index * 12, (2, 3)),
            (1000, (16,)),
        ]
    assert cut_rows(whole, RowShare(index=0, count=8)) is None, "a share would end inside a block with one scale"
    assert cut_rows(whole, RowShare(index=0, count=3)) is None
    flipped = replace(whole, pieces=((piece_of((8, 6), is_transposed=True),),))
    assert cut_rows(flipped, RowShare(index=0, count=2)) is None


def test_gates_and_what_they_let_through_are_cut_each_by_itself_in_every_expert() -> None:
    stack = Parameter(name="w", shape=(2, 8, 3), pieces=((piece_of((2, 8, 3)),),))
    part = cut_rows(stack, RowShare(index=1, count=2), num_fused=2)
    assert part is not None
    assert (part.shape, part.is_stacked) == ((2, 4, 3), True)
    rows = [[(piece.offset - 1000) // 6 for piece in entry] for entry in part.pieces]
    assert rows == [[2, 6], [10, 14]]
    assert len({piece.name for entry in part.pieces for piece in entry}) == 4


def test_whole_experts_are_bytes_side_by_side_and_the_first_ranks_have_one_more() -> None:
    stack = Parameter(name="w", shape=(5, 4, 3), pieces=((piece_of((5, 4, 3)),),), is_experts=True)
    matrices = replace(stack, pieces=tuple(((piece_of((4, 3)),)) for _ in range(5)), is_stacked=True)
    runs = split_evenly(5, 3)
    assert runs == [range(2), range(2, 4), range(4, 5)]
    for own in runs:
        of_one, of_many = slice_experts(stack, own), slice_experts(matrices, own)
        assert of_one is not None
        assert of_many is not None
        assert of_one.shape == of_many.shape == (len(own), 4, 3)
        assert of_one.num_experts == of_many.num_experts == 5
        [[piece]] = of_one.pieces
        assert (piece.offset, piece.num_bytes) == (1000 + own.start * 24, len(own) * 24)
        assert of_many.pieces == matrices.pieces[own.start : own.stop]
    mixed_up = replace(stack, pieces=((piece_of((20, 3)),),))
    assert slice_experts(mixed_up, range(2)) is None, "whose rows are whose is not said"


def test_rows_in_another_order_are_cut_where_the_order_stays_within() -> None:
    ordered = Parameter(
        name="w", shape=(8, 3), pieces=((piece_of((8, 3), row_order=(range(3, -1, -1), range(4, 8))),),)
    )
    part = cut_rows(ordered, RowShare(index=0, count=2))
    assert part is not None
    assert [row for run in part.pieces[0][0].row_order for row in run] == [3, 2, 1, 0]
    assert cut_rows(ordered, RowShare(index=0, count=4)) is None
