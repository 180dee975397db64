"""Where a stage's tensors lie in an accelerator's memory.

In host memory they lie as in their files, at any address: direct reads want it so. Kernels of matrix products read 16
bytes at a time and are slow, or refuse, where a tensor begins elsewhere. So on their way to the device runs of bytes
are moved, and the experts of a layer come to lie in their order, at equal distances.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...units import round_up
from .shapes import Parameter, Stage, TensorSlice

VECTOR_BYTES = 16  # what a kernel reads at a time
RUN_BYTES = 256  # a device's memory is handed out in these
MOST_GAP_BYTES = 4096  # between two tensors: to copy it along is cheaper than another copy
NUMBER_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}  # of tensors that kernels take as they are
OTHER_BYTES = {"I32": 4, "I64": 8}
BLOCK_BYTES = 2  # what quantised blocks of any kind are read as


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

    def within(self, begin: int, end: int) -> Iterator[Move]:
        """What moves bytes [begin, end) of the host's slot."""
        for move in self.moves[bisect_right(self.moves, begin, key=lambda move: move.end) :]:
            first, last = max(begin, move.begin), min(end, move.end)
            if first < last:
                yield Move(begin=first, num_bytes=last - first, target=move.target + first - move.begin)


class _Place(NamedTuple):
    """Places ascend on the device. What belongs to no expert comes first."""

    major: int
    minor: int


OUTSIDE, FIRST = _Place(-1, 0), _Place(0, 0)


def moved(stages: Iterable[Stage], tensor_offsets: Mapping[str, int]) -> DeviceLayout:
    """`tensor_offsets`: where the stages' tensors lie in the host's slot. Every plain tensor begins at a multiple of 16
    bytes, any other at one of its elements' size."""
    parameters = [parameter for stage in stages for parameter in stage.parameters]
    alignments, places = _alignments(parameters), _places(parameters, tensor_offsets)
    ordered = sorted(
        (piece for parameter in parameters for piece in parameter.slices),
        key=lambda piece: (places.get(piece.name, OUTSIDE), tensor_offsets[piece.name]),
    )
    moves, offsets, used = list[Move](), dict[str, int](), 0
    for piece in ordered:
        name, begin = piece.name, tensor_offsets[piece.name]
        if name in offsets:
            continue
        last = moves[-1] if moves else None
        if last is None or not _goes_on(last, begin, alignments[name]):
            used = round_up(used, VECTOR_BYTES if places.get(name, OUTSIDE) > FIRST else RUN_BYTES)
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
    return NUMBER_BYTES.get(piece.dtype, OTHER_BYTES.get(piece.dtype, BLOCK_BYTES))


def _goes_on(last: Move, begin: int, alignment: int) -> bool:
    """Whether a tensor can be copied with the one before."""
    return last.begin <= begin <= last.end + MOST_GAP_BYTES and not (last.target + begin - last.begin) % alignment


def _alignments(parameters: Iterable[Parameter]) -> dict[str, int]:
    """The alignment of each tensor. Factors of quantised ones are looked up one by one."""
    found: dict[str, int] = {}
    for parameter in parameters:
        for piece in parameter.slices:
            found[piece.name] = _element_bytes(piece)
        found.update((piece.name, VECTOR_BYTES) for piece in _plain(parameter))
    return found


def _places(parameters: Iterable[Parameter], tensor_offsets: Mapping[str, int]) -> dict[str, _Place]:
    """The places of experts that are stored one by one: each part of them, such as the rows of a gate, in the order of
    experts. One expert behind the other, or one part, as the file has them."""
    stacks = [p.pieces for p in parameters if p.is_stacked and len(_plain(p)) == len(p.pieces) * len(p.pieces[0])]
    parts = [part for stack in stacks for part in zip(*stack, strict=True)]
    parts.sort(key=lambda part: tensor_offsets[part[0].name])
    if not parts or len(parts[0]) < 2:
        return {}
    is_by_expert = tensor_offsets[parts[-1][0].name] < tensor_offsets[parts[0][1].name]
    return {
        piece.name: _Place(expert, turn) if is_by_expert else _Place(turn, expert)
        for turn, part in enumerate(parts)
        for expert, piece in enumerate(part)
    }


def _plain(parameter: Parameter) -> Collection[TensorSlice]:
    return [piece for rows in parameter.pieces for piece in rows if not piece.format and piece.dtype in NUMBER_BYTES]
