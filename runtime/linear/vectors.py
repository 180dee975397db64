"""Products of float32, or of bfloat16 by pairs, with stored weights in the processor's vectors, cut into work items for
threads.

M rows of x of W words, N of w, K inputs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType

import numpy as np
import torch

from ..attention.host_work import BITS
from ..kernels.arguments import GROUP_NUMBERS, PAIR_ROWS, aligned_zeros
from ..kernels.compiler import has_compiler
from ..shared_work import Spares, parallel_for
from ..units import round_up
from .coded_rows import zero_rows
from .panels import Block
from .work_items import (
    Target,
    Workspace,
    fit_kernel,
    in_runs_of_rows,
    parallel_for_groups,
    room_for_inputs,
    step_of,
    targets_of,
)

STEP_INPUTS = 16  # the lanes of the widest vectors
GROUP_ROWS = 96  # at most, of x for a weight whose product is one of many; with more, waiting is little beside it


@cache
def _spares() -> Spares[Workspace]:
    return Spares()


@cache
def _inputs() -> Spares[np.ndarray]:
    """Threads' own, as kernels have them laid out."""
    return Spares()


@cache
def _kernel() -> ModuleType:
    """numba takes 0.2 s to import."""
    from ..kernels import linear

    return linear


def fit_vectors(x_MK: torch.Tensor, blocks: Sequence[Block]) -> bool:
    """Whether `multiply_in_vectors` takes these blocks of rows of w, where there is a compiler."""
    return x_MK.dtype is torch.float32 and fit_kernel(x_MK, blocks, BITS, STEP_INPUTS, packed=True)


def fit_pairs(x_MK: torch.Tensor, blocks: Sequence[Block]) -> bool:
    """That of x of bfloat16, where the vectors multiply pairs: words, which do not begin between two of them."""
    is_paired = x_MK.dtype is torch.bfloat16 and x_MK.storage_offset() % 2 == 0
    return is_paired and fit_kernel(x_MK, blocks, {torch.bfloat16}, 2 * STEP_INPUTS, packed=True)


def multiply_in_vectors(x_MK: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """x @ w.T of the blocks of w below each other: (M, N), as precise as in float32. x of bfloat16 is multiplied by
    pairs, and what rows are decoded to is rounded to bfloat16; sums are float32."""
    return multiply_all_in_vectors(x_MK, [blocks])[0]


def multiply_all_in_vectors(x_MK: torch.Tensor, weights: Sequence[Sequence[Block]]) -> list[torch.Tensor]:
    """That of several weights, for which x is laid out once."""
    is_paired = x_MK.dtype is torch.bfloat16
    return in_runs_of_rows(x_MK, weights, x_MK.itemsize, partial(_multiply, is_paired=is_paired))


@contextmanager
def _workspace(is_paired: bool) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A thread's words, tile and sums, as kernels are given them."""
    kernel = _kernel()
    size = kernel.TILE_NUMBERS
    own = _spares().take(lambda: Workspace.make(3 * size, np.float32)).with_room(kernel.SUM_NUMBERS)
    words = own.panel[size:].view(np.uint32) if is_paired else own.panel[: 2 * size]
    yield words, own.panel[:size], own.sums
    _spares().give_back(own)


def multiply_groups_in_vectors(x_VK: torch.Tensor, groups: Sequence[tuple[slice, Sequence[Block]]]) -> torch.Tensor:
    """Runs of rows of x, each times the blocks of a weight of its own: (V, N), float32, to the bits of
    `multiply_in_vectors`. A thread takes whole weights, so that it waits for others once. All blocks have a multiple of
    32 rows, all weights N; a thread lays out GROUP_ROWS rows of x at most."""
    kernel, is_paired = _kernel(), x_VK.dtype is torch.bfloat16
    x_VW = x_VK.contiguous().view(torch.float32).numpy()
    out_VN = torch.empty(len(x_VK), sum(block.shape[0] for block in groups[0][1]))
    out = out_VN.numpy()

    def multiply_one(group: tuple[slice, Sequence[Block]]) -> None:
        rows, blocks = group
        x_MW, out_MN, column = x_VW[rows], out[rows], 0
        num_words = round_up(len(x_MW), STEP_INPUTS) * x_MW.shape[1]
        laid_out = _inputs().take(lambda: aligned_zeros((num_words,), np.uint32))
        laid_out = laid_out if len(laid_out) >= num_words else aligned_zeros((num_words,), np.uint32)
        kernel.lay_out_inputs(x_MW, 0, -(-len(x_MW) // kernel.INPUT_ROWS), laid_out.view(np.float32))
        inputs = laid_out if is_paired else laid_out.view(np.float32)
        with _workspace(is_paired) as own:
            for block in blocks:
                for words, _, place in targets_of(block, out_MN, column):
                    call = kernel.CHUNK_ROWS, np.zeros(1, np.int64), inputs, out_MN, place, len(x_MW)
                    getattr(kernel, words.kernel)(*words.arguments, *call, *own)
                column += block.shape[0]
        _inputs().give_back(laid_out)

    parallel_for(groups, multiply_one, torch.get_num_threads())
    return out_VN


def _multiply(x_MW: np.ndarray, targets: Sequence[Target], *, is_paired: bool) -> None:
    """All but the rows of w that `in_runs_of_rows` leaves to torch."""
    kernel = _kernel()
    (num_rows, num_words), num_threads, most_rows = x_MW.shape, torch.get_num_threads(), kernel.CHUNK_ROWS
    laid_out = room_for_inputs(round_up(num_rows, STEP_INPUTS) * num_words)
    inputs = laid_out if is_paired else laid_out.view(np.float32)
    taken_of_each = np.zeros((len(targets), 1), np.int64)
    calls = list[tuple[Callable[..., None], tuple[object, ...]]]()
    for (words, out_MN, column), taken in zip(targets, taken_of_each, strict=True):
        step = step_of(words.num_rows, num_threads, most_rows)
        arguments = (*words.arguments, step, taken, inputs, out_MN, column, num_rows)
        calls.append((getattr(kernel, words.kernel), arguments))

    def lay_out_some(span: tuple[int, int]) -> None:
        kernel.lay_out_inputs(x_MW, *span, laid_out.view(np.float32))

    def multiply_what_is_left(thread: int) -> None:
        with _workspace(is_paired) as own:
            for multiply, arguments in calls:
                multiply(*arguments, *own)

    parallel_for_groups(x_MW, kernel.INPUT_ROWS, lay_out_some)
    parallel_for(range(num_threads), multiply_what_is_left, num_threads)


def prepare_vectors(
    stored: Iterable[torch.dtype], formats: Collection[str], inputs: torch.dtype = torch.float32
) -> None:
    """Compiles, or loads, what multiplies inputs of that dtype, float32 or bfloat16 by pairs."""
    weights: list[Block] = [torch.zeros(PAIR_ROWS, GROUP_NUMBERS, dtype=dtype) for dtype in stored if dtype in BITS]
    if formats:  # one kernel decodes all that it decodes
        weights.append(zero_rows(PAIR_ROWS))
    for weight in weights if has_compiler() else ():
        multiply_in_vectors(torch.zeros(1, GROUP_NUMBERS, dtype=inputs), [weight])
