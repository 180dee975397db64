"""File ranges to read for a stage, and the offsets of its tensors in a host slot and on a device.

O_DIRECT needs file offsets, lengths and memory addresses that are multiples of the disk's block size; tensors in
safetensors files are not aligned. A slot therefore holds aligned *supersets* of the ranges, with tensors as views.

Matrix kernels load 16 bytes at a time and are slow, or fail, on misaligned tensors. Copies to an accelerator therefore
realign tensors, and place a layer's experts in order at equal strides.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...units import MIB, round_down, round_up
from .shapes import Parameter, Stage, TensorSlice

ALIGNMENT_BYTES = 4096
REGISTERED_BYTES = MIB  # from this size on we allocate pinned memory and register it with the driver
LOADING_BYTES = 32 * MIB  # pinned bounce buffer for resident weights
HOST_PIECE_BYTES = 64 * MIB  # of weights in host memory, copied at once
MERGE_GAP_BYTES = 256 * 1024  # reading this much unused data is cheaper than another request

VECTOR_BYTES = 16  # vector load of a kernel
RUN_BYTES = 256  # allocation granularity of device memory
COPY_GAP_BYTES = 4096  # copying this much unused data is cheaper than another copy
FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}  # of tensors that kernels read without conversion
INTEGER_BYTES = {"I32": 4, "I64": 8}
BLOCK_BYTES = 2  # element size in reads of quantized blocks


@dataclass(frozen=True, kw_only=True)
class Extent:
    """An aligned read: `num_bytes` at `offset` of `file` into `slot_offset`."""

    file: str
    offset: int
    num_bytes: int
    used_bytes: int  # up to the end of the last tensor; the file may end there
    slot_offset: int

    def clip(self, begin: int, end: int) -> "Extent | None":
        """Returns the part that lands in bytes [begin, end) of the slot; None if there is none."""
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
    """Returns the extents of reader `index` of `count`: about equal shares, in whole blocks."""
    if not extents:
        return ()
    first, last = extents[0].slot_offset, extents[-1].slot_offset + extents[-1].num_bytes
    begin, end = (first + round_up((last - first) * n // count, ALIGNMENT_BYTES) for n in (index, index + 1))
    return tuple(part for extent in extents if (part := extent.clip(begin, end)) is not None)


def even_reader_share(extents: Sequence[Extent], index: int, count: int) -> tuple[tuple[Extent, ...], int, int]:
    """Returns the extents of reader `index` for shares of exactly equal size, and the slot's byte range [begin, end)
    that is divided. The few blocks after `end` are read by every reader, after its share.
    """
    if not extents:
        return (), 0, 0
    first, last = extents[0].slot_offset, extents[-1].slot_offset + extents[-1].num_bytes
    size = round_down((last - first) // count, ALIGNMENT_BYTES)
    end = first + count * size
    bounds = (first + index * size, first + (index + 1) * size), (end, last)
    return tuple(part for bound in bounds for extent in extents if (part := extent.clip(*bound))), first, end


@dataclass(frozen=True, kw_only=True)
class SlotLayout:
    extents: tuple[Extent, ...]
    tensor_offsets: Mapping[str, int]  # tensor name -> its first byte in the slot
    num_bytes: int

    def page_bounds(self, page: int, num_pages: int) -> tuple[int, int]:
        """Returns bytes [begin, end) of one of `num_pages` about equal pages of the slot, in whole blocks."""
        begin, end = (round_up(self.num_bytes * n // num_pages, ALIGNMENT_BYTES) for n in (page, page + 1))
        return min(begin, self.num_bytes), min(end, self.num_bytes)

    def page_extents(self, page: int, num_pages: int) -> tuple[Extent, ...]:
        """Returns the extents that fill `page_bounds`."""
        return self._within(*self.page_bounds(page, num_pages))

    def windows(self, window_bytes: int) -> Iterator[tuple[int, int, tuple[Extent, ...]]]:
        """Yields bytes [begin, end) of the slot in windows of `window_bytes`, a multiple of `ALIGNMENT_BYTES`, with
        their extents at slot offsets relative to `begin`."""
        for begin in range(0, self.num_bytes, window_bytes):
            end = min(begin + window_bytes, self.num_bytes)
            moved = [replace(part, slot_offset=part.slot_offset - begin) for part in self._within(begin, end)]
            yield begin, end, tuple(moved)

    def _within(self, begin: int, end: int) -> tuple[Extent, ...]:
        return tuple(part for extent in self.extents if (part := extent.clip(begin, end)) is not None)


@dataclass(frozen=True, kw_only=True)
class Move:
    """A copy of `num_bytes` from `begin` of the host slot to `target` of the device slot."""

    begin: int
    num_bytes: int
    target: int

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes


@dataclass(frozen=True, kw_only=True)
class DeviceLayout:
    """Tensor offsets on a device, and the copies that produce them. `moves` are sorted by `end`."""

    moves: tuple[Move, ...]
    tensor_offsets: Mapping[str, int]  # tensor name -> its first byte on the device
    num_bytes: int

    def clip_moves(self, begin: int, end: int) -> Iterator[Move]:
        """Yields the copies of bytes [begin, end) of the host slot."""
        for move in self.moves[bisect_right(self.moves, begin, key=lambda move: move.end) :]:
            first, last = max(begin, move.begin), min(end, move.end)
            if first < last:
                yield Move(begin=first, num_bytes=last - first, target=move.target + first - move.begin)


def group_tied_stages(stages: Iterable[Stage]) -> list[list[Stage]]:
    """Groups stages that share a tensor (tied embeddings and head), so that one buffer holds it once."""
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
    """Returns the layout of stages that share one buffer, large enough for the realigned tensors of a device."""
    slices = {piece.name: piece for stage in stages for p in stage.parameters for piece in p.slices}
    layout = make_layout(slices.values())
    moved_bytes = round_up(device_layout(stages, layout).num_bytes, ALIGNMENT_BYTES)
    return layout if moved_bytes <= layout.num_bytes else replace(layout, num_bytes=moved_bytes)


def slot_layout(stage: Stage) -> SlotLayout:
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
    """Returns the bytes allocated for `num_bytes` of pinned memory, see `stream/pinned.py`: whole pages, or for small
    sizes torch's next power of two, with one more page for manual alignment."""
    if num_bytes >= REGISTERED_BYTES:
        return round_up(num_bytes, ALIGNMENT_BYTES)
    requested = num_bytes + ALIGNMENT_BYTES if is_aligned else num_bytes
    return 1 << (requested - 1).bit_length() if num_bytes else 0


class _DeviceOrder(NamedTuple):
    """Sort key of a tensor on the device."""

    major: int
    minor: int


OUTSIDE_EXPERTS, FIRST_EXPERT = _DeviceOrder(-1, 0), _DeviceOrder(0, 0)  # other tensors come first


def device_layout(stages: Iterable[Stage], layout: SlotLayout) -> DeviceLayout:
    """Returns the accelerator layout of stages that share one buffer with `layout` in host memory. Plain tensors start
    at multiples of 16 bytes, others at multiples of their element size."""
    tensor_offsets = layout.tensor_offsets
    parameters = [parameter for stage in stages for parameter in stage.parameters]
    alignments: dict[str, int] = {}
    for parameter in parameters:
        alignments.update((piece.name, _element_bytes(piece)) for piece in parameter.slices)
        # Not for scales of quantized tensors: kernels read them element by element.
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
    """Returns the bytes of tensors not aligned to their elements in host memory; a CPU computes with copies of them."""
    pieces = {piece.name: piece for parameter in stage.parameters for piece in parameter.slices}
    return sum(piece.num_bytes for piece in pieces.values() if piece.offset % _element_bytes(piece))


def _element_bytes(piece: TensorSlice) -> int:
    return FLOAT_BYTES.get(piece.dtype, INTEGER_BYTES.get(piece.dtype, BLOCK_BYTES))


def _expert_order(parameters: Iterable[Parameter], tensor_offsets: Mapping[str, int]) -> dict[str, _DeviceOrder]:
    """Returns the sort keys of separately stored experts in file order: by expert, or by part (such as all gates)."""
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
