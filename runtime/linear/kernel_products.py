"""Multi-threaded products x @ w.T in compiled CPU kernels, with weights w as stored. Vector kernels take float32
inputs, or multiply pairs of bfloat16. Matrix-unit kernels take float32 inputs and bfloat16 weights; a tile is a
register of this unit.

x is first laid out in the order in which kernels read it. Then threads take rows of w until none is left. w is given as
blocks of rows (see `blocks.py`), plain or quantized.

M rows of x (V if sorted by weight) of W words: float32, or pairs of bfloat16. N rows of w, K inputs.
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

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}  # dtypes of x and of the output
STEP_INPUTS = 16  # numbers in the widest vectors; K must be a multiple of it
PART_BYTES = 6  # bytes per number of x in tiles: three bfloat16 for a float32
GROUP_ROWS = 96  # most rows of x per weight in a grouped product; with more, synchronizing per product costs little


@cache
def _workspace_pool(backend: LinearBackend) -> SparePool[Workspace]:
    """Pool of scratch memory, one workspace per thread, for the kernels of a backend."""
    return SparePool()


@cache
def _input_pool() -> SparePool[np.ndarray]:
    """Pool of buffers, one per thread, for inputs in the kernel's layout."""
    return SparePool()


@cache
def _kernel() -> ModuleType:
    from ..kernels import linear  # late: importing numba takes 0.2 s

    return linear


def fits_vectors(x_MK: torch.Tensor, blocks: Sequence[Block]) -> bool:
    """True if `multiply_in_vectors` supports these row blocks of w. Assumes that a compiler is installed. With 16-bit
    x, blocks must be plain with the dtype of x, or be rows that kernels decode."""
    if x_MK.dtype not in KINDS:
        return False
    dtypes = BITS if x_MK.dtype is torch.float32 else {x_MK.dtype}
    return fits_kernel(x_MK, blocks, dtypes, STEP_INPUTS, packed=True)


def fits_pairs(x_MK: torch.Tensor, blocks: Sequence[Block]) -> bool:
    """True if `multiply_in_vectors` with `pairs` supports these row blocks of w. Assumes that the CPU has the
    instruction."""
    is_paired = x_MK.dtype is torch.bfloat16 and x_MK.storage_offset() % 2 == 0  # viewed as 32-bit words
    return is_paired and fits_kernel(x_MK, blocks, {torch.bfloat16}, 2 * STEP_INPUTS, packed=True)


def multiply_in_vectors(x_MK: torch.Tensor, blocks: Sequence[Block], *, pairs: bool = False) -> torch.Tensor:
    """Returns x @ w.T (M, N) of x's dtype, where w is the concatenated blocks. Products and sums are float32; 16-bit
    results are rounded once. `pairs`: multiplies pairs of bfloat16, and rounds decoded rows to bfloat16."""
    return multiply_all_in_vectors(x_MK, [blocks], pairs=pairs)[0]


def multiply_all_in_vectors(
    x_MK: torch.Tensor, weights: Sequence[Sequence[Block]], *, pairs: bool = False
) -> list[torch.Tensor]:
    """Same as `multiply_in_vectors` for each of several weights; x is laid out once."""
    multiply = partial(_multiply, kind=KINDS[x_MK.dtype], pairs=pairs)
    return multiply_in_batches(x_MK, weights, multiply, words=_word_dtype(x_MK, pairs), number_bytes=2 if pairs else 4)


@contextmanager
def _workspace(pairs: bool) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields scratch memory for a thread inside the `with` block: `words`, `tile` and `sums` of `VectorProduct`."""
    kernel = _kernel()
    spares = _workspace_pool(LinearBackend.vectors)
    workspace = spares.take(lambda: Workspace.make(kernel.WORK_NUMBERS, np.float32)).with_sums(kernel.SUM_NUMBERS)
    yield *kernel.split_workspace(workspace.panel, pairs=pairs), workspace.sums
    spares.give_back(workspace)


def multiply_groups_in_vectors(
    x_VK: torch.Tensor, groups: Sequence[tuple[slice, Sequence[Block]]], *, pairs: bool = False
) -> torch.Tensor:
    """Multiplies each slice of rows of x by a weight of its own. `groups`: (slice, row blocks of the weight). Returns
    (V, N), bit-identical to `multiply_in_vectors`. A thread multiplies whole weights, so threads synchronize only once.
    All weights must have N rows, each block a multiple of PAIR_ROWS rows, and each slice at most GROUP_ROWS rows."""
    kernel = _kernel()
    x_VW = x_VK.contiguous().view(_word_dtype(x_VK, pairs)).numpy()
    out_VN = x_VK.new_empty(len(x_VK), sum(block.shape[0] for block in groups[0][1]))
    out = out_VN.view(BITS[out_VN.dtype]).numpy()

    def multiply_one(group: tuple[slice, Sequence[Block]]) -> None:
        rows, blocks = group
        x_MW, out_MN, column = x_VW[rows], out[rows], 0
        num_words = round_up(len(x_MW), STEP_INPUTS) * x_MW.shape[1]
        input_words = _input_pool().take(lambda: aligned_zeros((num_words,), np.uint32))
        input_words = input_words if len(input_words) >= num_words else aligned_zeros((num_words,), np.uint32)
        kernel.lay_out_inputs(x_MW, 0, -(-len(x_MW) // kernel.INPUT_ROWS), input_words.view(np.float32))
        inputs = input_words if pairs else input_words.view(np.float32)
        with _workspace(pairs) as workspace:
            for block in blocks:
                for target in product_targets(block, out_MN, column):
                    _run_kernel(target, kernel.CHUNK_ROWS, np.zeros(1, np.int64), inputs, KINDS[x_VK.dtype], workspace)
                column += block.shape[0]
        _input_pool().give_back(input_words)

    parallel_for(groups, multiply_one, torch.get_num_threads())
    return out_VN


def _multiply(x_MW: np.ndarray, targets: Sequence[ProductTarget], *, kind: int, pairs: bool) -> None:
    """Multiplies x by the rows of all targets, except the last N % PAIR_ROWS rows, see `multiply_in_batches`."""
    kernel = _kernel()
    (num_rows, num_words), num_threads, max_rows = x_MW.shape, torch.get_num_threads(), kernel.CHUNK_ROWS
    input_words = input_buffer(round_up(num_rows, STEP_INPUTS) * num_words)
    inputs = input_words if pairs else input_words.view(np.float32)
    counters = np.zeros((len(targets), 1), np.int64)  # next row of w of each target; threads increase it atomically
    steps = [rows_per_item(target.weights.num_rows, num_threads, max_rows) for target in targets]

    def lay_out_some(span: tuple[int, int]) -> None:
        kernel.lay_out_inputs(x_MW, *span, input_words.view(np.float32))

    def multiply_remaining(thread: int) -> None:
        with _workspace(pairs) as workspace:
            for target, step, counter in zip(targets, steps, counters, strict=True):
                _run_kernel(target, step, counter, inputs, kind, workspace)

    parallel_for_groups(x_MW, kernel.INPUT_ROWS, lay_out_some)  # a barrier: products read all inputs
    parallel_for(range(num_threads), multiply_remaining, num_threads)


def _word_dtype(x_MK: torch.Tensor, pairs: bool) -> torch.dtype:
    """Returns the dtype as which a kernel views x: a pair of bfloat16 is one float32."""
    return torch.float32 if pairs else BITS[x_MK.dtype]


def _run_kernel(
    target: ProductTarget,
    step: int,
    counter: np.ndarray,
    inputs: np.ndarray,
    kind: int,
    workspace: tuple[np.ndarray, ...],
) -> None:
    """Runs the vector kernel for one target in this thread. Arguments: see `VectorProduct` and `_workspace`."""
    (weights, out_MN, column), (words, tile, sums) = target, workspace
    halves = out_MN.view(np.uint16)
    product = VectorProduct(step, counter, inputs, halves, kind, column, len(out_MN), words, tile, sums)
    getattr(_kernel(), weights.kernel)(weights.stored, product)


def prepare_vectors(
    stored: Iterable[torch.dtype], formats: Collection[str], input_dtype: torch.dtype = torch.float32, *, pairs: bool
) -> None:
    """Compiles or loads the vector kernels for plain weights of the dtypes `stored`, and for quantized ones if there
    are `formats`; see `backends.prepare_products`."""
    weights: list[Block] = [torch.zeros(PAIR_ROWS, GROUP_NUMBERS, dtype=dtype) for dtype in stored if dtype in BITS]
    if formats:  # one kernel decodes all formats
        weights.append(zero_rows(PAIR_ROWS))
    for weight in weights if has_compiler() else ():
        multiply_in_vectors(torch.zeros(1, GROUP_NUMBERS, dtype=input_dtype), [weight], pairs=pairs)


@cache
def linear_tile_config() -> np.ndarray:
    """Returns the tile configuration for products: eight tiles of TILE_ROWS rows of 64 bytes. The format is in Intel's
    manual under LDTILECFG."""
    shape = aligned_zeros((64,), np.uint8)
    shape[0], shape[16:32].view(np.uint16)[:], shape[48:56] = 1, 64, TILE_ROWS
    return shape


def fits_tiles(x_MK: torch.Tensor, blocks: Sequence[Block]) -> bool:
    """True if `multiply_in_tiles` supports these row blocks of w. Assumes that the CPU has a matrix unit."""
    return x_MK.dtype is torch.float32 and fits_kernel(x_MK, blocks, {torch.bfloat16}, TILE_DIMS, packed=False)


def multiply_in_tiles(x_MK: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """Returns x @ w.T (M, N) as precise as in float32, where w is the concatenated blocks."""
    return multiply_all_in_tiles(x_MK, [blocks])[0]


def multiply_all_in_tiles(x_MK: torch.Tensor, weights: Sequence[Sequence[Block]]) -> list[torch.Tensor]:
    """Same as `multiply_in_tiles` for each of several weights; x is laid out once."""
    return multiply_in_batches(x_MK, weights, _multiply_tiles, words=torch.float32, number_bytes=PART_BYTES)


def _multiply_tiles(x_MK: np.ndarray, targets: Sequence[ProductTarget]) -> None:
    """Same as `_multiply`, on the matrix unit."""
    from ..kernels.amx.linear import CHUNK_ROWS, PANEL_NUMBERS, lay_out_inputs, linear, num_sums

    num_rows, spares = x_MK.shape[0], _workspace_pool(LinearBackend.tiles)
    num_tiles = -(-num_rows // TILE_ROWS)
    tiles = input_buffer(num_tiles * TILE_ROWS * x_MK.shape[1] * PART_BYTES // 4)

    def lay_out_some(span: tuple[int, int]) -> None:
        lay_out_inputs(x_MK, *span, tiles)

    def multiply_some(item: tuple[ProductTarget, range]) -> None:
        (weights, out, column), rows = item
        workspace = spares.take(lambda: Workspace.make(PANEL_NUMBERS, np.uint16)).with_sums(num_sums(num_rows))
        output = (out, column, out.shape[1])  # array, first column, number of columns
        linear(weights.stored, rows.start, rows.stop, tiles, *output, num_rows, *workspace, linear_tile_config())
        spares.give_back(workspace)

    items, num_threads = list[tuple[ProductTarget, range]](), torch.get_num_threads()
    for target in targets:
        height = target.weights.num_rows
        num_whole, step = round_down(height, PAIR_ROWS), rows_per_item(height, num_threads, CHUNK_ROWS)
        items += [(target, range(row, min(row + step, num_whole))) for row in range(0, num_whole, step)]
    parallel_for_groups(x_MK, TILE_ROWS, lay_out_some)
    parallel_for(items, multiply_some, num_threads)


def prepare_tiles() -> None:
    """Compiles or loads the matrix-unit kernels."""
    multiply_in_tiles(torch.zeros(1, TILE_DIMS), [torch.zeros(PAIR_ROWS, TILE_DIMS, dtype=torch.bfloat16)])
