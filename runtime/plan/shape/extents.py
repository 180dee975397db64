"""Which byte ranges of which files to read for a stage, and where each tensor then lies in its slot.

O_DIRECT wants file offsets, lengths and memory addresses in multiples of the disk's block; tensors in a safetensors
file have no such alignment. So a slot holds the aligned *supersets* of the ranges as they are on disk, and a tensor
is a view into it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...units import MIB, round_down, round_up
from .moves import DeviceLayout, moved
from .shapes import Stage, TensorSlice

ALIGNMENT_BYTES = 4096
REGISTERED_BYTES = MIB  # pinned memory from this size on is our own, registered with the device's driver
LOADING_BYTES = 32 * MIB  # pinned, through which resident weights come
HOST_PIECE_BYTES = 64 * MIB  # of weights in host memory that are copied at a time
MERGE_GAP_BYTES = 256 * 1024  # reading this much too much is cheaper than another request


@dataclass(frozen=True, kw_only=True)
class Extent:
    """`num_bytes` from `offset` of `file` (both aligned) go to `slot_offset`. Tensors end at `used_bytes`; so may the
    file."""

    file: str
    offset: int
    num_bytes: int
    used_bytes: int
    slot_offset: int

    def within(self, begin: int, end: int) -> "Extent | None":
        """The part that goes to bytes [begin, end) of the slot."""
        first = max(begin, self.slot_offset) - self.slot_offset
        last = min(end, self.slot_offset + self.num_bytes) - self.slot_offset
        if first >= last:
            return None
        return Extent(
            file=self.file,
            offset=self.offset + first,
            num_bytes=last - first,
            used_bytes=max(0, min(self.used_bytes, last) - first),
            slot_offset=self.slot_offset + first,
        )


def share_of(extents: Sequence[Extent], index: int, count: int) -> tuple[Extent, ...]:
    """The part of them that one of `count` readers reads: about as many bytes as any other's, in whole blocks."""
    if not extents:
        return ()
    first, last = extents[0].slot_offset, extents[-1].slot_offset + extents[-1].num_bytes
    begin, end = (first + round_up((last - first) * n // count, ALIGNMENT_BYTES) for n in (index, index + 1))
    return tuple(part for extent in extents if (part := extent.within(begin, end)) is not None)


def even_shares_of(extents: Sequence[Extent], index: int, count: int) -> tuple[tuple[Extent, ...], int, int]:
    """The part of them that one of `count` readers reads where all shares are of one size, and the first and last byte
    (exclusive) of the slot that these lie in, in the order of readers. It ends with the few blocks that cannot be
    divided so, which each reads."""
    if not extents:
        return (), 0, 0
    first, last = extents[0].slot_offset, extents[-1].slot_offset + extents[-1].num_bytes
    size = round_down((last - first) // count, ALIGNMENT_BYTES)
    end = first + count * size
    bounds = (first + index * size, first + (index + 1) * size), (end, last)
    return tuple(part for each in bounds for extent in extents if (part := extent.within(*each))), first, end


@dataclass(frozen=True, kw_only=True)
class SlotLayout:
    extents: tuple[Extent, ...]
    tensor_offsets: Mapping[str, int]  # tensor name -> its first byte in the slot
    num_bytes: int

    def page_bounds(self, page: int, num_pages: int) -> tuple[int, int]:
        """First and last byte (exclusive) of one of `num_pages` pieces of the slot, about equal, in whole blocks."""
        begin, end = (round_up(self.num_bytes * n // num_pages, ALIGNMENT_BYTES) for n in (page, page + 1))
        return min(begin, self.num_bytes), min(end, self.num_bytes)

    def page_extents(self, page: int, num_pages: int) -> tuple[Extent, ...]:
        """What fills `page_bounds`."""
        return self._within(*self.page_bounds(page, num_pages))

    def windows(self, window_bytes: int) -> Iterator["Window"]:
        """All of it through memory of so many bytes, a multiple of `ALIGNMENT_BYTES`."""
        for begin in range(0, self.num_bytes, window_bytes):
            end = min(begin + window_bytes, self.num_bytes)
            moved = [replace(part, slot_offset=part.slot_offset - begin) for part in self._within(begin, end)]
            yield Window(begin=begin, end=end, extents=tuple(moved))

    def _within(self, begin: int, end: int) -> tuple[Extent, ...]:
        return tuple(part for extent in self.extents if (part := extent.within(begin, end)) is not None)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Bytes [begin, end) of a slot; `extents` count from `begin`."""

    begin: int
    end: int
    extents: tuple[Extent, ...]


def resident_groups(stages: Iterable[Stage]) -> list[list[Stage]]:
    """Stages that share a tensor (tied embeddings and head) lie in one buffer, so that it is there once."""
    groups: list[tuple[set[str], list[Stage]]] = []
    for stage in stages:
        names = {piece.name for parameter in stage.parameters for piece in parameter.slices}
        members = [stage]
        for shared in [group for group in groups if group[0] & names]:
            groups.remove(shared)
            names |= shared[0]
            members = shared[1] + members
        groups.append((names, members))
    return [members for _, members in groups]


def group_layout(stages: Sequence[Stage]) -> SlotLayout:
    """The layout of stages that share one buffer. Its bytes hold them on an accelerator too, where they are moved."""
    slices = {piece.name: piece for stage in stages for p in stage.parameters for piece in p.slices}
    layout = layout_of(slices.values())
    moved_bytes = round_up(device_layout(stages, layout).num_bytes, ALIGNMENT_BYTES)
    return layout if moved_bytes <= layout.num_bytes else replace(layout, num_bytes=moved_bytes)


def device_layout(stages: Sequence[Stage], layout: SlotLayout) -> DeviceLayout:
    """Where tensors of stages that share one buffer lie on an accelerator, if `layout` is theirs in host memory."""
    return moved(stages, layout.tensor_offsets)


def slot_layout(stage: Stage) -> SlotLayout:
    """The layout of one stage; slots are as large as the largest layout among the stages that pass through them."""
    return group_layout([stage])


def layout_of(slices: Iterable[TensorSlice]) -> SlotLayout:
    extents: list[Extent] = []
    offsets: dict[str, int] = {}
    used = 0
    for group in _neighbours(sorted(slices, key=lambda s: (s.file, s.offset))):
        start = round_down(group[0].offset, ALIGNMENT_BYTES)
        used_bytes = max(s.offset + s.num_bytes for s in group) - start
        num_bytes = round_up(used_bytes, ALIGNMENT_BYTES)
        extents.append(
            Extent(file=group[0].file, offset=start, num_bytes=num_bytes, used_bytes=used_bytes, slot_offset=used)
        )
        offsets.update({s.name: used + s.offset - start for s in group})
        used += num_bytes
    return SlotLayout(extents=tuple(extents), tensor_offsets=offsets, num_bytes=used)


def _neighbours(slices: list[TensorSlice]) -> Iterable[list[TensorSlice]]:
    group: list[TensorSlice] = []
    for piece in slices:
        if group and (piece.file != group[-1].file or piece.offset > _end(group) + MERGE_GAP_BYTES):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _end(group: list[TensorSlice]) -> int:
    return group[-1].offset + group[-1].num_bytes


def pinned_bytes(num_bytes: int, *, is_aligned: bool = True) -> int:
    """The bytes of a piece of pinned memory: whole pages, see `stream/pinned.py`. A small one is torch's, whose
    allocator rounds up to a power of two; to align it by hand, a page more is asked for."""
    if num_bytes >= REGISTERED_BYTES:
        return round_up(num_bytes, ALIGNMENT_BYTES)
    asked = num_bytes + ALIGNMENT_BYTES if is_aligned else num_bytes
    return 1 << (asked - 1).bit_length() if num_bytes else 0
