"""File ranges to read for a stage, and the offsets of its tensors in a host slot and on a device.

A **slot** is a buffer into which a stage is read. O_DIRECT needs file offsets, lengths and memory addresses that are
multiples of the disk's block size, but tensors in safetensors files are not aligned. So a slot holds **extents**:
aligned file ranges that include the tensors. Tensors are views into them. A slot is copied to a device in parts, its
**pages**.

Matrix kernels load 16 bytes at a time and are slow, or fail, on misaligned tensors. So copies to an accelerator realign
tensors, and place a layer's experts in order at equal distances.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...units import MIB, round_down, round_up
from .shapes import Parameter, Stage, TensorSlice

ALIGNMENT_BYTES = 4096  # block size of disks, and size of a memory page
REGISTERED_BYTES = MIB  # pinned buffers from this size on are mapped by us and registered with the driver
LOADING_BYTES = 32 * MIB  # size of the pinned buffer through which resident weights are read
HOST_PIECE_BYTES = 64 * MIB  # largest single copy from weights in host memory
MERGE_GAP_BYTES = 256 * 1024  # one read across this many unused bytes takes less time than two reads

VECTOR_BYTES = 16  # vector load of a kernel
RUN_BYTES = 256  # allocation granularity of device memory
COPY_GAP_BYTES = 4096  # one copy across this many unused bytes takes less time than two copies
FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}  # element sizes of plain floats, by safetensors dtype
INTEGER_BYTES = {"I32": 4, "I64": 8}  # element sizes
BLOCK_BYTES = 2  # kernels read quantized blocks in elements of this size


@dataclass(frozen=True, kw_only=True)
class Extent:
    """An aligned read of `num_bytes` from `offset` of `file` to `slot_offset` of a slot."""

    file: str
    offset: int
    num_bytes: int
    used_bytes: int  # bytes up to the end of the last tensor; the file may end there
    slot_offset: int

    def clip(self, begin: int, end: int) -> "Extent | None":
        """Returns the part that is read into bytes [begin, end) of the slot; None if there is none."""
        # Offsets from the start of the extent.
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
    """Divides extents about equally among `count` readers, in whole disk blocks; returns those of reader `index`."""
    if not extents:
        return ()
    first, last = extents[0].slot_offset, extents[-1].slot_offset + extents[-1].num_bytes
    begin, end = (first + round_up((last - first) * n // count, ALIGNMENT_BYTES) for n in (index, index + 1))
    return tuple(part for extent in extents if (part := extent.clip(begin, end)) is not None)


def even_reader_share(extents: Sequence[Extent], index: int, count: int) -> tuple[tuple[Extent, ...], int, int]:
    """Divides extents into exactly equal shares for `count` readers, for collectives that need equal sizes.

    Returns the extents of reader `index`, and the slot's byte range [begin, end) that is divided. Every reader also
    reads the few blocks after `end` that cannot be divided: they are the last of its extents.
    """
    if not extents:
        return (), 0, 0
    first, last = extents[0].slot_offset, extents[-1].slot_offset + extents[-1].num_bytes
    size = round_down((last - first) // count, ALIGNMENT_BYTES)
    end = first + count * size
    ranges = (first + index * size, first + (index + 1) * size), (end, last)  # the reader's share, the undivided end
    parts = [extent.clip(*share) for share in ranges for extent in extents]
    return tuple(part for part in parts if part is not None), first, end


@dataclass(frozen=True, kw_only=True)
class SlotLayout:
    """The layout of a slot in host memory."""

    extents: tuple[Extent, ...]  # in the order of their slot offsets
    tensor_offsets: Mapping[str, int]  # first byte in the slot, by tensor name
    num_bytes: int

    def page_bounds(self, page: int, num_pages: int) -> tuple[int, int]:
        """Returns the bytes [begin, end) of page number `page`. All pages are about equal, in whole disk blocks."""
        begin, end = (round_up(self.num_bytes * n // num_pages, ALIGNMENT_BYTES) for n in (page, page + 1))
        return min(begin, self.num_bytes), min(end, self.num_bytes)

    def page_extents(self, page: int, num_pages: int) -> tuple[Extent, ...]:
        """Returns the extents that fill `page_bounds`."""
        return self._within(*self.page_bounds(page, num_pages))

    def windows(self, window_bytes: int) -> Iterator[tuple[int, int, tuple[Extent, ...]]]:
        """Divides the slot into windows of `window_bytes`, a multiple of `ALIGNMENT_BYTES`.

        Yields the bytes [begin, end) of each window, and its extents with slot offsets relative to `begin`.
        """
        for begin in range(0, self.num_bytes, window_bytes):
            end = min(begin + window_bytes, self.num_bytes)
            moved = [replace(part, slot_offset=part.slot_offset - begin) for part in self._within(begin, end)]
            yield begin, end, tuple(moved)

    def _within(self, begin: int, end: int) -> tuple[Extent, ...]:
        return tuple(part for extent in self.extents if (part := extent.clip(begin, end)) is not None)


@dataclass(frozen=True, kw_only=True)
class Move:
    """A copy of `num_bytes` from offset `begin` in the host slot to offset `target` in the device slot."""

    begin: int
    num_bytes: int
    target: int

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes


@dataclass(frozen=True, kw_only=True)
class DeviceLayout:
    """Tensor offsets in a device slot, and the copies that put the tensors there."""

    moves: tuple[Move, ...]  # sorted by `end`
    tensor_offsets: Mapping[str, int]  # first byte in the device slot, by tensor name
    num_bytes: int

    def clip_moves(self, begin: int, end: int) -> Iterator[Move]:
        """Yields the copies of bytes [begin, end) of the host slot: moves, cut to this range."""
        for move in self.moves[bisect_right(self.moves, begin, key=lambda move: move.end) :]:
            first, last = max(begin, move.begin), min(end, move.end)
            if first < last:
                yield Move(begin=first, num_bytes=last - first, target=move.target + first - move.begin)


def group_tied_stages(stages: Iterable[Stage]) -> list[list[Stage]]:
    """Groups stages that share a tensor, such as tied embeddings and head: one buffer then holds that tensor once."""
    # Disjoint groups of tensor names and stages. A stage that shares names with several groups joins them.
    groups: list[tuple[set[str], list[Stage]]] = []
    for stage in stages:
        names = {piece.name for parameter in stage.parameters for piece in parameter.slices}
        members = [stage]
        for group in [group for group in groups if group[0] & names]:
            groups.remove(group)
            group_names, group_members = group
            names |= group_names
            members = group_members + members
        groups.append((names, members))
    return [members for _, members in groups]


def group_layout(stages: Sequence[Stage]) -> SlotLayout:
    """Returns the layout of stages that share one buffer.

    The buffer may be larger than the extents need, as a device slot of the same size must hold the realigned tensors.
    """
    slices = {piece.name: piece for stage in stages for p in stage.parameters for piece in p.slices}
    layout = make_layout(slices.values())
    moved_bytes = round_up(device_layout(stages, layout).num_bytes, ALIGNMENT_BYTES)
    return layout if moved_bytes <= layout.num_bytes else replace(layout, num_bytes=moved_bytes)


def slot_layout(stage: Stage) -> SlotLayout:
    return group_layout([stage])


def make_layout(slices: Iterable[TensorSlice]) -> SlotLayout:
    """Returns the slot layout of these tensors. One extent reads neighbors in a file, and small gaps between them."""
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
    """Returns the bytes allocated for `num_bytes` of pinned memory, see `stream/pinned.py`.

    Large buffers are rounded up to whole memory pages. Small buffers come from torch, which rounds up to a power of two
    and does not align to pages. So with `is_aligned` they are larger by one page before rounding.
    """
    if num_bytes >= REGISTERED_BYTES:
        return round_up(num_bytes, ALIGNMENT_BYTES)
    requested = num_bytes + ALIGNMENT_BYTES if is_aligned else num_bytes
    return 1 << (requested - 1).bit_length() if num_bytes else 0


class _DeviceOrder(NamedTuple):
    """Sort key of a tensor in a device slot: numbers of expert and part, or of part and expert."""

    major: int
    minor: int


OUTSIDE_EXPERTS, FIRST_EXPERT = _DeviceOrder(-1, 0), _DeviceOrder(0, 0)  # tensors outside of experts come first


def device_layout(stages: Iterable[Stage], layout: SlotLayout) -> DeviceLayout:
    """Returns the device layout of stages that share one buffer, which has `layout` in host memory.

    Plain tensors start at multiples of 16 bytes, others at multiples of their element size. Tensors keep their order in
    the host slot, but experts come last, sorted so that kernels can step over them at equal distances.
    """
    tensor_offsets = layout.tensor_offsets
    parameters = [parameter for stage in stages for parameter in stage.parameters]
    alignments: dict[str, int] = {}
    for parameter in parameters:
        alignments.update((piece.name, _element_bytes(piece)) for piece in parameter.slices)
        # Scales of quantized tensors keep the element alignment: kernels read them element by element.
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
        # Extends the last move if the tensor follows it closely in the host slot and would be aligned on the device.
        last = moves[-1] if moves else None
        is_near = last is not None and last.begin <= begin <= last.end + COPY_GAP_BYTES
        if last is None or not is_near or (last.target + begin - last.begin) % alignments[name]:
            # After the first expert, distances must be equal, so that moves cannot start at multiples of 256 bytes.
            is_later_expert = expert_order.get(name, OUTSIDE_EXPERTS) > FIRST_EXPERT
            used = round_up(used, VECTOR_BYTES if is_later_expert else RUN_BYTES)
            last = Move(begin=begin, num_bytes=0, target=used)
            moves.append(last)
        end = max(last.end, begin + piece.num_bytes)
        moves[-1] = Move(begin=last.begin, num_bytes=end - last.begin, target=last.target)
        offsets[name] = last.target + begin - last.begin
        used = last.target + end - last.begin
    return DeviceLayout(moves=tuple(sorted(moves, key=lambda move: move.end)), tensor_offsets=offsets, num_bytes=used)


def misaligned_bytes(stage: Stage) -> int:
    """Returns the bytes of tensors that are not aligned to their element size in the file, and so in a host slot.

    A CPU computes with aligned copies of them.
    """
    pieces = {piece.name: piece for parameter in stage.parameters for piece in parameter.slices}
    return sum(piece.num_bytes for piece in pieces.values() if piece.offset % _element_bytes(piece))


def _element_bytes(piece: TensorSlice) -> int:
    return FLOAT_BYTES.get(piece.dtype, INTEGER_BYTES.get(piece.dtype, BLOCK_BYTES))


def _expert_order(parameters: Iterable[Parameter], tensor_offsets: Mapping[str, int]) -> dict[str, _DeviceOrder]:
    """Returns sort keys for the tensors of stacks with separately stored experts, by tensor name.

    A part is one kind of matrix, such as the gates of all experts. Files store either all parts of an expert together,
    or all experts of a part; the keys keep that order.
    """
    stacks = [
        p.pieces for p in parameters if p.is_stacked and len(_plain_slices(p)) == len(p.pieces) * len(p.pieces[0])
    ]
    # One entry per part: its tensor of each expert.
    parts = [part for stack in stacks for part in zip(*stack, strict=True)]
    parts.sort(key=lambda part: tensor_offsets[part[0].name])
    if not parts or len(parts[0]) < 2:
        return {}
    # True if the last part of the first expert comes before the first part of the second.
    is_by_expert = tensor_offsets[parts[-1][0].name] < tensor_offsets[parts[0][1].name]
    return {
        piece.name: _DeviceOrder(expert, number) if is_by_expert else _DeviceOrder(number, expert)
        for number, part in enumerate(parts)
        for expert, piece in enumerate(part)
    }


def _plain_slices(parameter: Parameter) -> Collection[TensorSlice]:
    """Returns the slices of plain floats, without companions."""
    return [piece for rows in parameter.pieces for piece in rows if not piece.format and piece.dtype in FLOAT_BYTES]
