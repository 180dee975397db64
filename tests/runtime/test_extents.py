"""Extents are aligned, disjoint in the slot, and cover every tensor's bytes; seeded random layouts."""

import random

import pytest

from runtime.plan.shape.extents import (
    ALIGNMENT_BYTES,
    MERGE_GAP_BYTES,
    make_layout,
    pinned_bytes,
    slot_layout,
)
from runtime.plan.shape.shapes import TensorSlice
from tests.toy import toy_shape


def draw(seed: int) -> list[TensorSlice]:
    rng = random.Random(seed)
    slices = []
    for file in ("a", "b", "c")[: rng.randint(1, 3)]:
        offset = rng.randint(8, 5000)
        for turn in range(rng.randint(1, 12)):
            num_bytes = rng.choice([0, 1, 4095, 4096, rng.randint(1, 300_000)])
            slices.append(
                TensorSlice(
                    name=f"{file}{turn}", file=file, offset=offset, num_bytes=num_bytes, dtype="U8", shape=(num_bytes,)
                )
            )
            offset += num_bytes + rng.choice([0, 0, 1, 4096, MERGE_GAP_BYTES, MERGE_GAP_BYTES + 1, 10**6])
    rng.shuffle(slices)
    return slices


@pytest.mark.parametrize("seed", range(60))
def test_every_tensor_lies_where_its_bytes_will_be(seed: int) -> None:
    slices = draw(seed)
    layout = make_layout(slices)
    for piece in slices:
        place = layout.tensor_offsets[piece.name]
        inside = [
            e
            for e in layout.extents
            if e.slot_offset <= place and place + piece.num_bytes <= e.slot_offset + e.used_bytes
        ]
        assert any(e.file == piece.file and e.offset + place - e.slot_offset == piece.offset for e in inside)


@pytest.mark.parametrize("seed", range(60))
def test_extents_are_aligned_and_fill_the_slot_without_overlap(seed: int) -> None:
    layout = make_layout(draw(seed))
    end = 0
    for extent in layout.extents:
        assert extent.slot_offset == end
        assert extent.offset % ALIGNMENT_BYTES == extent.num_bytes % ALIGNMENT_BYTES == 0
        assert 0 <= extent.num_bytes - extent.used_bytes < ALIGNMENT_BYTES
        end += extent.num_bytes
    assert end == layout.num_bytes


@pytest.mark.parametrize(("gap", "num_extents"), [(0, 1), (MERGE_GAP_BYTES, 1), (MERGE_GAP_BYTES + 1, 2)])
def test_neighbours_share_a_read_and_distant_tensors_do_not(gap: int, num_extents: int) -> None:
    first = TensorSlice(name="a", file="f", offset=8192, num_bytes=100, dtype="U8", shape=(100,))
    second = TensorSlice(name="b", file="f", offset=8292 + gap, num_bytes=100, dtype="U8", shape=(100,))
    assert len(make_layout([second, first]).extents) == num_extents


def test_a_tensor_named_twice_is_read_once() -> None:
    stage = toy_shape(is_tied=True).stages[0]
    twice = type(stage)(index=0, name="x", kind=stage.kind, parameters=stage.parameters * 2)
    assert slot_layout(twice) == slot_layout(stage)


def test_nothing_takes_no_space() -> None:
    assert (make_layout([]).extents, make_layout([]).num_bytes) == ((), 0)


def test_a_layer_of_mixtral_pins_hardly_more_than_its_bytes() -> None:
    """Of torch's allocator it would take 4 GiB."""
    num_bytes = 2 * (8 * 3 * 4096 * 14336 + 2 * 4096 * (4096 + 1024) + 4096 * 8 + 2 * 4096)
    assert num_bytes <= pinned_bytes(num_bytes) < 1.03 * num_bytes
