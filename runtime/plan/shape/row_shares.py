"""The rows of a parameter that one of several ranks holds, as the bytes of files that they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .shapes import Companion, Parameter, TensorSlice


@dataclass(frozen=True, kw_only=True)
class Share:
    """One of `count` equal runs of rows."""

    index: int
    count: int

    def divides(self, num_rows: int) -> bool:
        return num_rows % self.count == 0

    def of(self, num_rows: int) -> range:
        """Its rows of so many."""
        height = num_rows // self.count
        return range(self.index * height, (self.index + 1) * height)


def cut(parameter: Parameter, share: Share, *, num_runs: int = 1) -> Parameter | None:
    """The parameter with a share of the rows of each of `num_runs` equal runs, one below the other; of a stack, of each
    of its matrices. None where a tensor's rows are not bytes to themselves, or a run would end inside a block with one
    scale."""
    is_stack = parameter.is_stacked or len(parameter.shape) == 3
    entries = parameter.pieces
    if is_stack and not parameter.is_stacked:
        [[whole]] = entries
        entries = tuple((whole.expert(index),) for index in range(whole.shape[0]))
    height = sum(piece.shape[0] for piece in entries[0])
    if parameter.is_transposed or not share.divides(height // num_runs) or height % num_runs:
        return None
    run = height // num_runs
    own = [range(turn * run + share.of(run).start, turn * run + share.of(run).stop) for turn in range(num_runs)]
    parts = [_entry(entry, own) for entry in entries]
    pieces = tuple(part for part in parts if part is not None)
    if len(pieces) < len(parts):
        return None
    rows_at = 1 if is_stack else 0
    shape = (*parameter.shape[:rows_at], height // share.count, *parameter.shape[rows_at + 1 :])
    return replace(parameter, shape=shape, pieces=pieces, is_stacked=is_stack)


def _entry(pieces: Sequence[TensorSlice], runs: Sequence[range]) -> tuple[TensorSlice, ...] | None:
    """Those rows of a matrix that is put together from `pieces`."""
    found = list[TensorSlice]()
    for run in runs:
        begin = 0
        for piece in pieces:
            first, last = max(run.start, begin), min(run.stop, begin + piece.shape[0])
            if first < last:
                part = rows_between(piece, first - begin, last - begin)
                if part is None:
                    return None
                found.append(part)
            begin += piece.shape[0]
    return tuple(found)


def rows_between(piece: TensorSlice, first: int, last: int) -> TensorSlice | None:
    """Rows [first, last) of a tensor; None where they cannot be told apart."""
    height, tail = piece.shape[0], piece.shape[1:]
    if piece.is_interleaved:
        return replace(piece, shape=(last - first, *tail), first_row=piece.first_row + first)
    row_bytes, rest = divmod(piece.num_bytes, height)
    order = _order_between(piece.row_order, first, last)
    companions = [_companion_between(each, first, last, height) for each in piece.companions]
    if rest or piece.is_transposed or order is None or None in companions:
        return None
    return replace(
        piece,
        name=f"{piece.name}[{first}:{last}]",
        offset=piece.offset + first * row_bytes,
        num_bytes=(last - first) * row_bytes,
        shape=(last - first, *tail),
        companions=tuple(each for each in companions if each is not None),
        row_order=order,
        first_row=piece.first_row + first,
    )


def _companion_between(companion: Companion, first: int, last: int, height: int) -> Companion | None:
    if companion.is_shared:
        return companion
    block = companion.block_rows
    if first % block or (last % block and last != height):
        return None
    rows = rows_between(companion.tensor, first // block, -(-last // block))
    return None if rows is None else replace(companion, tensor=rows)


def _order_between(order: Sequence[range], first: int, last: int) -> tuple[range, ...] | None:
    """The order of rows [first, last), which must be those of the file between the same places."""
    if not order:
        return ()
    rows = [row for run in order for row in run][first:last]
    if sorted(rows) != list(range(first, last)):
        return None
    return tuple(range(row - first, row - first + 1) for row in rows)
