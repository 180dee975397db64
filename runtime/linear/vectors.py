"""Products of float32 with stored weights in the processor's vectors, cut into work items for threads.

M rows of x, N of w, K inputs.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from types import ModuleType

import numpy as np
import torch

from ..attention.host_work import BITS
from ..kernels.arguments import GROUP_NUMBERS, PAIR_ROWS
from ..kernels.compiler import has_compiler
from ..shared_work import Spares, parallel_for
from ..units import round_up
from .coded_rows import zero_rows
from .panels import Block
from .work_items import Target, Workspace, fit_kernel, in_runs_of_rows, parallel_for_groups, room_for_inputs, step_of

STEP_INPUTS = 16  # the lanes of the widest vectors
NUMBER_BYTES = 4


@cache
def _spares() -> Spares[Workspace]:
    return Spares()


@cache
def _kernel() -> ModuleType:
    """numba takes 0.2 s to import."""
    from ..kernels import linear

    return linear


def fit_vectors(x_MK: torch.Tensor, blocks: Sequence[Block]) -> bool:
    """Whether `multiply_in_vectors` takes these blocks of rows of w, where there is a compiler."""
    return fit_kernel(x_MK, blocks, BITS, STEP_INPUTS, packed=True)


def multiply_in_vectors(x_MK: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """x @ w.T of the blocks of w below each other: (M, N), as precise as in float32."""
    return multiply_all_in_vectors(x_MK, [blocks])[0]


def multiply_all_in_vectors(x_MK: torch.Tensor, weights: Sequence[Sequence[Block]]) -> list[torch.Tensor]:
    """That of several weights, for which x is laid out once."""
    return in_runs_of_rows(x_MK, weights, NUMBER_BYTES, _multiply)


def _multiply(x_MK: np.ndarray, targets: Sequence[Target]) -> None:
    """All but the rows of w that `in_runs_of_rows` leaves to torch."""
    kernel = _kernel()
    (num_rows, num_inputs), num_threads, most_rows = x_MK.shape, torch.get_num_threads(), kernel.CHUNK_ROWS
    inputs = room_for_inputs(round_up(num_rows, STEP_INPUTS) * num_inputs).view(np.float32)
    taken_of_each = np.zeros((len(targets), 1), np.int64)
    calls = list[tuple[Callable[..., None], tuple[object, ...]]]()
    for (words, out_MN, column), taken in zip(targets, taken_of_each, strict=True):
        step = step_of(words.num_rows, num_threads, most_rows)
        arguments = (*words.arguments, step, taken, inputs, out_MN, column, num_rows)
        calls.append((getattr(kernel, words.kernel), arguments))

    def lay_out_some(span: tuple[int, int]) -> None:
        kernel.lay_out_inputs(x_MK, *span, inputs)

    def multiply_what_is_left(thread: int) -> None:
        own = _spares().take(lambda: Workspace.make(kernel.TILE_NUMBERS, np.float32)).with_room(kernel.SUM_NUMBERS)
        for multiply, arguments in calls:
            multiply(*arguments, *own)
        _spares().give_back(own)

    parallel_for_groups(x_MK, kernel.INPUT_ROWS, lay_out_some)
    parallel_for(range(num_threads), multiply_what_is_left, num_threads)


def prepare_vectors(stored: Iterable[torch.dtype], formats: Collection[str]) -> None:
    weights: list[Block] = [torch.zeros(PAIR_ROWS, GROUP_NUMBERS, dtype=dtype) for dtype in stored if dtype in BITS]
    if formats:  # one kernel decodes all that it decodes
        weights.append(zero_rows(PAIR_ROWS))
    for weight in weights if has_compiler() else ():
        multiply_in_vectors(torch.zeros(1, GROUP_NUMBERS), [weight])
