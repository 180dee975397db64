"""Products with stored weights by compiled kernels, shared by threads: of inputs in float32, or of bfloat16 by pairs,
in the processor's vectors, and of float32 with bfloat16 weights in its matrix unit.

M rows of x of W words, N of w, K inputs.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType

import numpy as np
import torch

from ..attention.host_attention import BITS
from ..config.profiles import LinearBackend
from ..kernels.arguments import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    GROUP_NUMBERS,
    PAIR_ROWS,
    TILE_DIMS,
    TILE_ROWS,
    VectorProduct,
    aligned_zeros,
)
from ..kernels.compiler import has_compiler
from ..shared_work import SparePool, parallel_for
from ..units import round_down, round_up
from .blocks import Block
from .packed_rows import zero_rows
from .work_items import (
    ProductTarget,
    Workspace,
    fits_kernel,
    input_buffer,
    multiply_in_batches,
    parallel_for_groups,
    product_targets,
    rows_per_item,
)

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}  # of x and what comes of it
STEP_INPUTS = 16  # the lanes of the widest vectors
PART_BYTES = 6  # of tiles: three bfloat16 for each float32
GROUP_ROWS = 96  # at most, of x for a weight whose product is one of many; with more, waiting is little beside it


@cache
def _workspace_pool(unit: LinearBackend) -> SparePool[Workspace]:
    return SparePool()


@cache
def _input_pool() -> SparePool[np.ndarray]:
    """Threads' own, as kernels have them laid out."""
    return SparePool()


@cache
def _kernel() -> ModuleType:
    """numba takes 0.2 s to import."""
    from ..kernels import linear

    return linear


def fits_vectors(x_MK: torch.Tensor, blocks: Sequence[Block]) -> bool:
    """Whether `multiply_in_vectors` takes these blocks of rows of w, where there is a compiler. x of 16 bits meets
    plain rows of its own dtype."""
    if x_MK.dtype not in KINDS:
        return False
    dtypes = BITS if x_MK.dtype is torch.float32 else {x_MK.dtype}
    return fits_kernel(x_MK, blocks, dtypes, STEP_INPUTS, packed=True)


def fits_pairs(x_MK: torch.Tensor, blocks: Sequence[Block]) -> bool:
    """That by pairs, where the vectors multiply such: words, which do not begin between two of them."""
    is_paired = x_MK.dtype is torch.bfloat16 and x_MK.storage_offset() % 2 == 0
    return is_paired and fits_kernel(x_MK, blocks, {torch.bfloat16}, 2 * STEP_INPUTS, packed=True)


def multiply_in_vectors(x_MK: torch.Tensor, blocks: Sequence[Block], *, pairs: bool = False) -> torch.Tensor:
    """x @ w.T of the blocks of w below each other: (M, N) of x's dtype. Products and sums are float32, which x of 16
    bits is widened to; sums are rounded to 16 bits once. x of bfloat16 may be multiplied by `pairs`: then what rows are
    decoded to is rounded to bfloat16."""
    return multiply_all_in_vectors(x_MK, [blocks], pairs=pairs)[0]


def multiply_all_in_vectors(
    x_MK: torch.Tensor, weights: Sequence[Sequence[Block]], *, pairs: bool = False
) -> list[torch.Tensor]:
    """That of several weights, for which x is laid out once."""
    multiply = partial(_multiply, kind=KINDS[x_MK.dtype], pairs=pairs)
    return multiply_in_batches(x_MK, weights, multiply, words=_word_dtype(x_MK, pairs), number_bytes=2 if pairs else 4)


@contextmanager
def _workspace(pairs: bool) -> Iterator[tuple[np.ndarray, ...]]:
    """A thread's words, tile and sums, as kernels are given them."""
    kernel = _kernel()
    spares = _workspace_pool(LinearBackend.vectors)
    own = spares.take(lambda: Workspace.make(kernel.WORK_NUMBERS, np.float32)).with_room(kernel.SUM_NUMBERS)
    yield *kernel.split_workspace(own.panel, pairs=pairs), own.sums
    spares.give_back(own)


def multiply_groups_in_vectors(
    x_VK: torch.Tensor, groups: Sequence[tuple[slice, Sequence[Block]]], *, pairs: bool = False
) -> torch.Tensor:
    """Runs of rows of x, each times the blocks of a weight of its own: (V, N), to the bits of `multiply_in_vectors`. A
    thread takes whole weights, so that it waits for others once. All blocks have a multiple of 32 rows, all weights N;
    a thread lays out GROUP_ROWS rows of x at most."""
    kernel = _kernel()
    x_VW = x_VK.contiguous().view(_word_dtype(x_VK, pairs)).numpy()
    out_VN = x_VK.new_empty(len(x_VK), sum(block.shape[0] for block in groups[0][1]))
    out = out_VN.view(BITS[out_VN.dtype]).numpy()

    def multiply_one(group: tuple[slice, Sequence[Block]]) -> None:
        rows, blocks = group
        x_MW, out_MN, column = x_VW[rows], out[rows], 0
        num_words = round_up(len(x_MW), STEP_INPUTS) * x_MW.shape[1]
        laid_out = _input_pool().take(lambda: aligned_zeros((num_words,), np.uint32))
        laid_out = laid_out if len(laid_out) >= num_words else aligned_zeros((num_words,), np.uint32)
        kernel.lay_out_inputs(x_MW, 0, -(-len(x_MW) // kernel.INPUT_ROWS), laid_out.view(np.float32))
        inputs = laid_out if pairs else laid_out.view(np.float32)
        with _workspace(pairs) as own:
            for block in blocks:
                for target in product_targets(block, out_MN, column):
                    _run(target, kernel.CHUNK_ROWS, np.zeros(1, np.int64), inputs, KINDS[x_VK.dtype], own)
                column += block.shape[0]
        _input_pool().give_back(laid_out)

    parallel_for(groups, multiply_one, torch.get_num_threads())
    return out_VN


def _multiply(x_MW: np.ndarray, targets: Sequence[ProductTarget], *, kind: int, pairs: bool) -> None:
    """All but the rows of w that `in_runs_of_rows` leaves to torch."""
    kernel = _kernel()
    (num_rows, num_words), num_threads, most_rows = x_MW.shape, torch.get_num_threads(), kernel.CHUNK_ROWS
    laid_out = input_buffer(round_up(num_rows, STEP_INPUTS) * num_words)
    inputs = laid_out if pairs else laid_out.view(np.float32)
    taken_of_each = np.zeros((len(targets), 1), np.int64)
    steps = [rows_per_item(target.weights.num_rows, num_threads, most_rows) for target in targets]

    def lay_out_some(span: tuple[int, int]) -> None:
        kernel.lay_out_inputs(x_MW, *span, laid_out.view(np.float32))

    def multiply_what_is_left(thread: int) -> None:
        with _workspace(pairs) as own:
            for target, step, taken in zip(targets, steps, taken_of_each, strict=True):
                _run(target, step, taken, inputs, kind, own)

    parallel_for_groups(x_MW, kernel.INPUT_ROWS, lay_out_some)
    parallel_for(range(num_threads), multiply_what_is_left, num_threads)


def _word_dtype(x_MK: torch.Tensor, pairs: bool) -> torch.dtype:
    """The dtype as which a kernel that lays x out is given its numbers: pairs of them look like float32."""
    return torch.float32 if pairs else BITS[x_MK.dtype]


def _run(
    target: ProductTarget, step: int, counter: np.ndarray, inputs: np.ndarray, kind: int, own: tuple[np.ndarray, ...]
) -> None:
    (words, out_MN, column), (panel, tile, sums) = target, own
    halves = out_MN.view(np.uint16)
    product = VectorProduct(step, counter, inputs, halves, kind, column, len(out_MN), panel, tile, sums)
    getattr(_kernel(), words.kernel)(words.stored, product)


def prepare_vectors(
    stored: Iterable[torch.dtype],
    formats: Collection[str],
    inputs: torch.dtype = torch.float32,
    *,
    pairs: bool = False,
) -> None:
    """Compiles, or loads, what multiplies inputs of that dtype."""
    weights: list[Block] = [torch.zeros(PAIR_ROWS, GROUP_NUMBERS, dtype=dtype) for dtype in stored if dtype in BITS]
    if formats:  # one kernel decodes all that it decodes
        weights.append(zero_rows(PAIR_ROWS))
    for weight in weights if has_compiler() else ():
        multiply_in_vectors(torch.zeros(1, GROUP_NUMBERS, dtype=inputs), [weight], pairs=pairs)


@cache
def linear_tile_config() -> np.ndarray:
    """That of all eight, as Intel's manual has it under LDTILECFG."""
    shape = aligned_zeros((64,), np.uint8)
    shape[0], shape[16:32].view(np.uint16)[:], shape[48:56] = 1, 64, TILE_ROWS
    return shape


def fits_tiles(x_MK: torch.Tensor, blocks: Sequence[Block]) -> bool:
    """Whether `multiply_in_tiles` takes these blocks of rows of w, where there is a matrix unit."""
    return x_MK.dtype is torch.float32 and fits_kernel(x_MK, blocks, {torch.bfloat16}, TILE_DIMS, packed=False)


def multiply_in_tiles(x_MK: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """x @ w.T of the blocks of w below each other: (M, N), as precise as in float32."""
    return multiply_all_in_tiles(x_MK, [blocks])[0]


def multiply_all_in_tiles(x_MK: torch.Tensor, weights: Sequence[Sequence[Block]]) -> list[torch.Tensor]:
    """That of several weights, for which x is laid out once."""
    return multiply_in_batches(x_MK, weights, _multiply_tiles, words=torch.float32, number_bytes=PART_BYTES)


def _multiply_tiles(x_MK: np.ndarray, targets: Sequence[ProductTarget]) -> None:
    """All but the rows of w behind the last pair of tiles. numba takes 0.2 s to import."""
    from ..kernels.amx.linear import CHUNK_ROWS, PANEL_NUMBERS, lay_out_inputs, linear, num_sums

    num_rows, spares = x_MK.shape[0], _workspace_pool(LinearBackend.tiles)
    num_tiles = -(-num_rows // TILE_ROWS)
    tiles = input_buffer(num_tiles * TILE_ROWS * x_MK.shape[1] * PART_BYTES // 4)

    def lay_out_some(span: tuple[int, int]) -> None:
        lay_out_inputs(x_MK, *span, tiles)

    def multiply_some(item: tuple[ProductTarget, range]) -> None:
        (words, out, column), rows = item
        own = spares.take(lambda: Workspace.make(PANEL_NUMBERS, np.uint16)).with_room(num_sums(num_rows))
        linear(
            words.stored, rows.start, rows.stop, tiles, out, column, out.shape[1], num_rows, *own, linear_tile_config()
        )
        spares.give_back(own)

    items, num_threads = list[tuple[ProductTarget, range]](), torch.get_num_threads()
    for target in targets:
        height = target.weights.num_rows
        whole, step = round_down(height, PAIR_ROWS), rows_per_item(height, num_threads, CHUNK_ROWS)
        items += [(target, range(row, min(row + step, whole))) for row in range(0, whole, step)]
    parallel_for_groups(x_MK, TILE_ROWS, lay_out_some)
    parallel_for(items, multiply_some, num_threads)


def prepare_tiles() -> None:
    multiply_in_tiles(torch.zeros(1, TILE_DIMS), [torch.zeros(PAIR_ROWS, TILE_DIMS, dtype=torch.bfloat16)])
