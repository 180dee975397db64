"""The experts that one of several ranks holds whole, as the bytes of files that they are."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ...config.settings import DividedExperts
from .shapes import Parameter, Stage, TensorSlice


def runs_of(count: int, num_parts: int) -> Sequence[range]:
    """So many things in runs of equal length, or with one more in each of the first."""
    least, more = divmod(count, num_parts)
    begins = [part * least + min(part, more) for part in range(num_parts + 1)]
    return [range(begin, end) for begin, end in pairwise(begins)]


def sends_less_whole(hidden_size: int, inner_size: int, num_ranks: int) -> bool:
    """Whether ranks that hold experts whole send one another less than those that hold rows of each. Of a visit it is
    its output, to the rank that adds up the token's, instead of what lies between the matrices, to all. Either way all
    are sent the sum."""
    return hidden_size <= inner_size * num_ranks


def has_whole(stage: Stage, hidden_size: int, num_ranks: int, asked: DividedExperts) -> bool:
    """Whether ranks hold a stage's experts whole."""
    inner = inner_size(stage, hidden_size)
    if not inner or asked is DividedExperts.rows or stage.num_experts < num_ranks:
        return False
    stacks = [stack for stack in stage.stacks if stack.is_experts]
    is_mixed_up = any(piece.is_interleaved for stack in stacks for piece in stack.slices)  # of rows all would be read
    return asked is DividedExperts.whole or is_mixed_up or sends_less_whole(hidden_size, inner, num_ranks)


def inner_size(stage: Stage, hidden_size: int) -> int:
    """The numbers between the matrices of one expert; 0 where none runs through our function."""
    sizes = [stack.num_elements // (stack.shape[0] * hidden_size) for stack in stage.stacks if stack.is_experts]
    return min(sizes, default=0)


def take_experts(stack: Parameter, own: range) -> Parameter | None:
    """The stack of these of its experts; None where an expert's bytes cannot be told apart."""
    if len(stack.shape) != 3:
        return None
    entries, num_experts = stack.pieces, stack.shape[0]
    shape = (len(own), *stack.shape[1:])
    if not stack.is_stacked:
        if len(entries) != 1 or len(entries[0]) != 1 or entries[0][0].shape[:1] != (num_experts,):
            return None
        [[whole]] = entries
        if not (whole.format or whole.companions or whole.is_transposed):
            return replace(stack, shape=shape, pieces=((_between(whole, own),),), num_experts=num_experts)
        entries = tuple((whole.expert(index),) for index in range(num_experts))
    pieces = tuple(entries[index] for index in own)
    return replace(stack, shape=shape, pieces=pieces, is_stacked=True, num_experts=num_experts)


def _between(stack: TensorSlice, own: range) -> TensorSlice:
    """Neighbouring matrices of a stack of plain numbers."""
    each = stack.num_bytes // stack.shape[0]
    return replace(
        stack,
        name=f"{stack.name}[{own.start}:{own.stop}]",
        offset=stack.offset + own.start * each,
        num_bytes=len(own) * each,
        shape=(len(own), *stack.shape[1:]),
    )
