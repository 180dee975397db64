"""Which byte ranges of which files to read for a stage, and where each tensor then lies in its slot and on a device.

O_DIRECT wants file offsets, lengths and memory addresses in multiples of the disk's block; tensors in a safetensors
file have no such alignment. So a slot holds the aligned *supersets* of the ranges as they are on disk, and a tensor
is a view into it.

Kernels of matrix products read 16 bytes at a time and are slow, or refuse, where a tensor begins elsewhere. So on their
way to an accelerator runs of bytes are moved, and the experts of a layer come to lie in their order, at equal
distances.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...units import MIB, round_down, round_up
from .shapes import Parameter, Stage, TensorSlice

ALIGNMENT_BYTES = 4096
REGISTERED_BYTES = MIB  # pinned memory from this size on is our own, registered with the device's driver
LOADING_BYTES = 32 * MIB  # pinned, through which resident weights come
HOST_PIECE_BYTES = 64 * MIB  # of weights in host memory that are copied at a time
MERGE_GAP_BYTES = 256 * 1024  # reading this much too much is cheaper than another request

VECTOR_BYTES = 16  # what a kernel reads at a time
RUN_BYTES = 256  # a device's memory is handed out in these
COPY_GAP_BYTES = 4096  # between two tensors: to copy it along is cheaper than another copy
FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}  # of tensors that kernels take as they are
INTEGER_BYTES = {"I32": 4, "I64": 8}
BLOCK_BYTES = 2  # what quantised blocks of any kind are read as


@dataclass(frozen=True, kw_only=True)
class Extent:
    """`num_bytes` from `offset` of `file` (both aligned) go to `slot_offset`. Tensors end at `used_bytes`; so may the
    file."""

    file: str
    offset: int
    num_bytes: int
    used_bytes: int
    slot_offset: int

    def clip(self, begin: int, end: int) -> "Extent | None":
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


def reader_share(extents: Sequence[Extent], index: int, count: int) -> tuple[Extent, ...]:
    """The part of them that one of `count` readers reads: about as many bytes as any other's, in whole blocks."""
    if not extents:
        return ()
    first, last = extents[0].slot_offset, extents[-1].slot_offset + extents[-1].num_bytes
    begin, end = (first + round_up((last - first) * n // count, ALIGNMENT_BYTES) for n in (index, index + 1))
    return tuple(part for extent in extents if (part := extent.clip(begin, end)) is not None)


def even_reader_share(extents: Sequence[Extent], index: int, count: int) -> tuple[tuple[Extent, ...], int, int]:
    """The part of them that one of `count` readers reads where all shares are of one size, and the first and last byte
    (exclusive) of the slot that these lie in, in the order of readers. It ends with the few blocks that cannot be
    divided so, which each reads."""
    if not extents:
        return (), 0, 0
    first, last = extents[0].slot_offset, extents[-1].slot_offset + extents[-1].num_bytes
    size = round_down((last - first) // count, ALIGNMENT_BYTES)
    end = first + count * size
    bounds = (first + index * size, first + (index + 1) * size), (end, last)
    return tuple(part for each in bounds for extent in extents if (part := extent.clip(*each))), first, end


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

    def windows(self, window_bytes: int) -> Iterator[tuple[int, int, tuple[Extent, ...]]]:
        """All of it through memory of so many bytes, a multiple of `ALIGNMENT_BYTES`: bytes [begin, end) of the slot,
        and the extents that fill them, counted from there."""
        for begin in range(0, self.num_bytes, window_bytes):
            end = min(begin + window_bytes, self.num_bytes)
            moved = [replace(part, slot_offset=part.slot_offset - begin) for part in self._within(begin, end)]
            yield begin, end, tuple(moved)

    def _within(self, begin: int, end: int) -> tuple[Extent, ...]:
        return tuple(part for extent in self.extents if (part := extent.clip(begin, end)) is not None)


@dataclass(frozen=True, kw_only=True)
class Move:
    """`num_bytes` from `begin` of the host's slot go to `target` of the device's."""

    begin: int
    num_bytes: int
    target: int

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes


@dataclass(frozen=True, kw_only=True)
class DeviceLayout:
    """`moves` ascend by their `end`."""

    moves: tuple[Move, ...]
    tensor_offsets: Mapping[str, int]  # tensor name -> its first byte on the device
    num_bytes: int

    def clip_moves(self, begin: int, end: int) -> Iterator[Move]:
        """What moves bytes [begin, end) of the host's slot."""
        for move in self.moves[bisect_right(self.moves, begin, key=lambda move: move.end) :]:
            first, last = max(begin, move.begin), min(end, move.end)
            if first < last:
                yield Move(begin=first, num_bytes=last - first, target=move.target + first - move.begin)


def group_tied_stages(stages: Iterable[Stage]) -> list[list[Stage]]:
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
    layout = make_layout(slices.values())
    moved_bytes = round_up(device_layout(stages, layout).num_bytes, ALIGNMENT_BYTES)
    return layout if moved_bytes <= layout.num_bytes else replace(layout, num_bytes=moved_bytes)


def slot_layout(stage: Stage) -> SlotLayout:
    """The layout of one stage; slots are as large as the largest layout among the stages that pass through them."""
    return group_layout([stage])


def make_layout(slices: Iterable[TensorSlice]) -> SlotLayout:
    groups: list[list[TensorSlice]] = []
    for piece in sorted(slices, key=lambda s: (s.file, s.offset)):
        last = groups[-1][-1] if groups else None
        if last and piece.file == last.file and piece.offset <= last.offset + last.num_bytes + MERGE_GAP_BYTES:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    extents: list[Extent] = []
    offsets: dict[str, int] = {}
    used = 0
    for group in groups:
        start = round_down(group[0].offset, ALIGNMENT_BYTES)
        used_bytes = max(s.offset + s.num_bytes for s in group) - start
        num_bytes = round_up(used_bytes, ALIGNMENT_BYTES)
        extents.append(
            Extent(file=group[0].file, offset=start, num_bytes=num_bytes, used_bytes=used_bytes, slot_offset=used)
        )
        offsets.update({s.name: used + s.offset - start for s in group})
        used += num_bytes
    return SlotLayout(extents=tuple(extents), tensor_offsets=offsets, num_bytes=used)


def pinned_bytes(num_bytes: int, *, is_aligned: bool = True) -> int:
    """The bytes of a piece of pinned memory: whole pages, see `stream/pinned.py`. A small one is torch's, whose
    allocator rounds up to a power of two; to align it by hand, a page more is asked for."""
    if num_bytes >= REGISTERED_BYTES:
        return round_up(num_bytes, ALIGNMENT_BYTES)
    requested = num_bytes + ALIGNMENT_BYTES if is_aligned else num_bytes
    return 1 << (requested - 1).bit_length() if num_bytes else 0


class _DeviceOrder(NamedTuple):
    """Places ascend on the device. What belongs to no expert comes first."""

    major: int
    minor: int


OUTSIDE_EXPERTS, FIRST_EXPERT = _DeviceOrder(-1, 0), _DeviceOrder(0, 0)


def device_layout(stages: Iterable[Stage], layout: SlotLayout) -> DeviceLayout:
    """Where tensors of stages that share one buffer lie on an accelerator, if `layout` is theirs in host memory. Every
    plain tensor begins at a multiple of 16 bytes, any other at one of its elements' size."""
    tensor_offsets = layout.tensor_offsets
    parameters = [parameter for stage in stages for parameter in stage.parameters]
    alignments: dict[str, int] = {}
    for parameter in parameters:
        alignments.update((piece.name, _element_bytes(piece)) for piece in parameter.slices)
        # Factors of quantised tensors, which are not among these, are looked up one by one.
        alignments.update((piece.name, VECTOR_BYTES) for piece in _plain_slices(parameter))
    expert_order = _expert_order(parameters, tensor_offsets)
    ordered = sorted(
        (piece for parameter in parameters for piece in parameter.slices),
        key=lambda piece: (expert_order.get(piece.name, OUTSIDE_EXPERTS), tensor_offsets[piece.name]),
    )
    moves, offsets, used = list[Move](), dict[str, int](), 0
    for piece in ordered:
        name, begin = piece.name, tensor_offsets[piece.name]
        if name in offsets:
            continue
        last = moves[-1] if moves else None
        is_near = last is not None and last.begin <= begin <= last.end + COPY_GAP_BYTES
        if last is None or not is_near or (last.target + begin - last.begin) % alignments[name]:
            used = round_up(used, VECTOR_BYTES if expert_order.get(name, OUTSIDE_EXPERTS) > FIRST_EXPERT else RUN_BYTES)
            last = Move(begin=begin, num_bytes=0, target=used)
            moves.append(last)
        end = max(last.end, begin + piece.num_bytes)
        moves[-1] = Move(begin=last.begin, num_bytes=end - last.begin, target=last.target)
        offsets[name] = last.target + begin - last.begin
        used = last.target + end - last.begin
    return DeviceLayout(moves=tuple(sorted(moves, key=lambda move: move.end)), tensor_offsets=offsets, num_bytes=used)


def misaligned_bytes(stage: Stage) -> int:
    """The bytes of tensors that begin between two of their elements, as they lie in files and in host memory: a CPU
    computes with copies of them."""
    pieces = {piece.name: piece for parameter in stage.parameters for piece in parameter.slices}
    return sum(piece.num_bytes for piece in pieces.values() if piece.offset % _element_bytes(piece))


def _element_bytes(piece: TensorSlice) -> int:
    return FLOAT_BYTES.get(piece.dtype, INTEGER_BYTES.get(piece.dtype, BLOCK_BYTES))


def _expert_order(parameters: Iterable[Parameter], tensor_offsets: Mapping[str, int]) -> dict[str, _DeviceOrder]:
    """The places of experts that are stored one by one: each part of them, such as the rows of a gate, in the order of
    experts. One expert behind the other, or one part, as the file has them."""
    stacks = [
        p.pieces for p in parameters if p.is_stacked and len(_plain_slices(p)) == len(p.pieces) * len(p.pieces[0])
    ]
    parts = [part for stack in stacks for part in zip(*stack, strict=True)]
    parts.sort(key=lambda part: tensor_offsets[part[0].name])
    if not parts or len(parts[0]) < 2:
        return {}
    is_by_expert = tensor_offsets[parts[-1][0].name] < tensor_offsets[parts[0][1].name]
    return {
        piece.name: _DeviceOrder(expert, turn) if is_by_expert else _DeviceOrder(turn, expert)
        for turn, part in enumerate(parts)
        for expert, piece in enumerate(part)
    }


def _plain_slices(parameter: Parameter) -> Collection[TensorSlice]:
    return [piece for rows in parameter.pieces for piece in rows if not piece.format and piece.dtype in FLOAT_BYTES]
