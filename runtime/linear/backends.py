"""Linear backends, and the choice among them: the fastest one measured on this host (`jobs.measure`), or a default.

A linear backend is an implementation of products x @ w.T with weights w as stored; see `LinearBackend` for a list. w is
given as blocks of rows (see `blocks.py`), plain or quantized. All backends accumulate in float32; their results may
differ in the last bits. A panel is a few rows of w, converted to the dtype of x in a reused buffer.

M rows of x (V if sorted by expert), N rows of w, K inputs.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch

from ..config.profiles import BackendTable, LinearBackend
from ..kernels.arguments import PAIR_ROWS
from ..kernels.compiler import has_bf16_pairs, has_compiler, has_fast_bf16_pairs, has_matrix_unit
from ..plan.placement.memory import PANEL_BYTES as MOST_PANEL_BYTES
from .blocks import Block, panels
from .kernel_products import (
    GROUP_ROWS,
    fits_pairs,
    fits_tiles,
    fits_vectors,
    multiply_all_in_tiles,
    multiply_all_in_vectors,
    multiply_groups_in_vectors,
    multiply_in_tiles,
    multiply_in_vectors,
    prepare_tiles,
    prepare_vectors,
)
from .rows import KernelRows

MANY_ROWS = 256  # with more rows of x, converting a large panel takes little time compared to its product
WEIGHTS_PER_THREAD = 8  # with at least this many, whole weights can be split almost evenly among threads
NARROW_ROWS = 96  # up to so many rows of x, w @ x.T is mostly faster than x @ w.T: inner loops run over the long side
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}  # in a `BackendTable`

Linear = Callable[[torch.Tensor, Sequence[Block]], torch.Tensor]  # x (M, K), blocks of rows of w -> (M, N)


def prepare_products(
    stored_dtypes: Iterable[torch.dtype], formats: Collection[str] = (), input_dtype: torch.dtype = torch.float32
) -> None:
    """Loads the kernels that multiply inputs of `input_dtype` by weights of `stored_dtypes` and storage `formats`, and
    compiles those that are not cached. Otherwise the first forward pass would do this, with its time and memory."""
    if has_matrix_unit() and input_dtype == torch.float32:
        prepare_tiles()
    plain_dtypes = stored_dtypes if input_dtype == torch.float32 else {input_dtype} & set(stored_dtypes)
    prepare_vectors(plain_dtypes, formats, input_dtype, pairs=input_dtype == torch.bfloat16 and has_fast_bf16_pairs())


def linear(x_MK: torch.Tensor, blocks: Sequence[Block], table: BackendTable | None = None) -> torch.Tensor:
    """Returns x @ w.T (M, N), where w is the concatenated row blocks. The backend is that of `choose_backend`."""
    return BACKENDS[choose_backend(x_MK, blocks, table)](x_MK, blocks)


def fused_linear(
    x_MK: torch.Tensor, weights: Sequence[Sequence[Block]], table: BackendTable | None = None
) -> list[torch.Tensor]:
    """Returns x @ w.T for each of several weights w, in one kernel call if all have the same backend and it supports
    this. Results are bit-identical to those of `linear`."""
    backends = {choose_backend(x_MK, blocks, table) for blocks in weights}
    backend = backends.pop() if len(backends) == 1 else None
    if backend is LinearBackend.tiles:
        return multiply_all_in_tiles(x_MK, weights)
    if backend is not None and all(_uses_vector_kernel(backend, x_MK, blocks) for blocks in weights):
        return multiply_all_in_vectors(x_MK, weights, pairs=backend is LinearBackend.pairs)
    return [linear(x_MK, blocks, table) for blocks in weights]


def grouped_linear(
    x_VK: torch.Tensor, groups: Sequence[tuple[slice, Sequence[Block]]], table: BackendTable | None = None
) -> torch.Tensor:
    """Multiplies each slice of rows of x by a weight of its own. `groups`: (slice, row blocks of the weight); weights
    must have equal shapes and formats. Returns (V, N), bit-identical to `linear` with the same backend. If all slices
    are short, a thread multiplies whole weights instead of parts of each."""
    rows, blocks = groups[0]
    backend = choose_backend(x_VK[rows], blocks, table)
    fills_pairs = all(block.shape[0] % PAIR_ROWS == 0 for block in blocks)
    are_short = all(rows.stop - rows.start <= GROUP_ROWS for rows, _ in groups)
    if fills_pairs and are_short and _uses_vector_kernel(backend, x_VK[rows], blocks):
        return multiply_groups_in_vectors(x_VK, groups, pairs=backend is LinearBackend.pairs)
    return torch.cat([linear(x_VK[rows], blocks, table) for rows, blocks in groups])


def _uses_vector_kernel(backend: LinearBackend, x_MK: torch.Tensor, blocks: Sequence[Block]) -> bool:
    """True if this backend multiplies these blocks in the vector kernel. The backend must support them."""
    if backend is LinearBackend.widened:
        return fits_vectors(x_MK, blocks)
    return backend in (LinearBackend.vectors, LinearBackend.pairs)


def can_multiply_in_groups(num_rows: int, num_weights: int) -> bool:
    """True if `grouped_linear` is likely faster than a product per weight. This is so if there are enough weights to
    split them evenly among threads, and so few rows of x that a product takes less time than synchronizing threads."""
    return num_weights >= WEIGHTS_PER_THREAD * torch.get_num_threads() and num_rows <= GROUP_ROWS * num_weights


def choose_backend(x_MK: torch.Tensor, blocks: Sequence[Block], table: BackendTable | None = None) -> LinearBackend:
    """Returns the fastest backend in `table` if it supports these blocks, otherwise that of the default rule."""
    fastest = _fastest(table, x_MK, blocks)
    if fastest is not None and supports(fastest, x_MK, blocks):
        return fastest
    inputs = x_MK.dtype if x_MK.is_cpu else torch.float32  # the rule for 16-bit inputs applies to CPUs only
    is_plain = all(isinstance(block, torch.Tensor) for block in blocks)
    return default_backend(lambda backend: supports(backend, x_MK, blocks), len(x_MK), inputs, is_plain=is_plain)


def _fastest(table: BackendTable | None, x_MK: torch.Tensor, blocks: Sequence[Block]) -> LinearBackend | None:
    """Returns the fastest backend in `table`; None if it has none for such products."""
    first = blocks[0]
    if table is None or not isinstance(first, torch.Tensor) or first.dtype not in DTYPE_NAMES:
        return None
    if x_MK.dtype not in DTYPE_NAMES or x_MK.device.type != "cpu" or not len(x_MK):
        return None
    is_tall = x_MK.shape[1] > sum(block.shape[0] for block in blocks)
    return table.fastest(DTYPE_NAMES[first.dtype], is_tall=is_tall, num_rows=len(x_MK), inputs=DTYPE_NAMES[x_MK.dtype])


def supports(backend: LinearBackend, x_MK: torch.Tensor, blocks: Sequence[Block]) -> bool:
    """True if the backend can multiply these row blocks of w on this processor."""
    match backend:
        case LinearBackend.tiles:
            return has_matrix_unit() and fits_tiles(x_MK, blocks)
        case LinearBackend.vectors:
            return has_compiler() and x_MK.dtype == torch.float32 and fits_vectors(x_MK, blocks)
        case LinearBackend.widened:
            # No plain weights of another dtype: they would first have to be rounded to x's dtype, as in a model of it.
            if not has_compiler() or not x_MK.is_cpu or x_MK.dtype not in (torch.bfloat16, torch.float16):
                return False
            return all(
                block.dtype == x_MK.dtype if isinstance(block, torch.Tensor) else isinstance(block, KernelRows)
                for block in blocks
            )
        case LinearBackend.pairs:
            return has_bf16_pairs() and fits_pairs(x_MK, blocks)
        case LinearBackend.onednn:
            return x_MK.dtype == torch.float32 and torch.backends.mkldnn.is_available()
        case _:
            return True


def supported_backends(x_MK: torch.Tensor, blocks: Sequence[Block]) -> list[LinearBackend]:
    return [backend for backend in LinearBackend if supports(backend, x_MK, blocks)]


def default_backend(
    is_available: Callable[[LinearBackend], bool],
    num_rows: int,
    inputs: torch.dtype = torch.float32,
    *,
    is_plain: bool = True,
) -> LinearBackend:
    """The default rule. For float32 inputs: compiled kernels if available, otherwise torch on panels. For 16-bit
    inputs: pairs of bfloat16 if their instructions are fast, else torch if it would use the CPU's matrix unit, else
    kernels that convert to float32 (`widened`). `is_plain`: weights are not quantized, so torch needs no panels."""
    if inputs != torch.float32:
        if is_available(LinearBackend.pairs) and has_fast_bf16_pairs():
            return LinearBackend.pairs
        torch_is_faster = inputs == torch.bfloat16 and has_matrix_unit() and (is_plain or num_rows > NARROW_ROWS)
        can_widen = is_available(LinearBackend.widened) and not torch_is_faster
        return LinearBackend.widened if can_widen else LinearBackend.inputs_first
    for compiled in (LinearBackend.tiles, LinearBackend.vectors):
        if is_available(compiled):
            return compiled
    return LinearBackend.weights_first if num_rows <= NARROW_ROWS else LinearBackend.inputs_first


def _widened(x_MK: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """Multiplies 16-bit x as float32: converts it inside the kernel, or before if the kernel does not support the
    blocks."""
    if fits_vectors(x_MK, blocks):
        return multiply_in_vectors(x_MK, blocks)
    return linear(x_MK.float(), blocks).to(x_MK.dtype)


def _weights_first(x_MK: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """Computes w @ x.T panel by panel, and transposes the result."""
    out_NM = x_MK.new_empty(sum(block.shape[0] for block in blocks), len(x_MK))
    for row, panel in panels(blocks, x_MK.dtype):
        torch.mm(panel, x_MK.t(), out=out_NM[row : row + panel.shape[0]])
    return out_NM.t().contiguous()


def _inputs_first(x_MK: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """Computes x @ w.T panel by panel."""
    out_MN = x_MK.new_empty(len(x_MK), sum(block.shape[0] for block in blocks))
    for row, panel in panels(blocks, x_MK.dtype, _panel_bytes(x_MK)):
        torch.mm(x_MK, panel.t(), out=out_MN[:, row : row + panel.shape[0]])
    return out_MN


def _panel_bytes(x_MK: torch.Tensor) -> int | None:
    """Returns a larger panel size for many rows of x, as each panel needs a pass over x; None for the default size."""
    # From 512 rows on, panels of 16 MiB reached 206 to 230 GFLOP/s, of 4 MiB 171 to 187 (Xeon, AVX-512, two threads).
    return MOST_PANEL_BYTES if len(x_MK) > MANY_ROWS else None


def _onednn(x_MK: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """Computes x @ w.T panel by panel, with oneDNN instead of torch's BLAS."""
    out_MN = x_MK.new_empty(len(x_MK), sum(block.shape[0] for block in blocks))
    for row, panel in panels(blocks, x_MK.dtype, _panel_bytes(x_MK)):
        out_MN[:, row : row + panel.shape[0]] = torch.ops.mkldnn._linear_pointwise(x_MK, panel, None, "none", [], "")
    return out_MN


BACKENDS: Mapping[LinearBackend, Linear] = {
    LinearBackend.tiles: multiply_in_tiles,
    LinearBackend.vectors: multiply_in_vectors,
    LinearBackend.widened: _widened,
    LinearBackend.pairs: partial(multiply_in_vectors, pairs=True),
    LinearBackend.weights_first: _weights_first,
    LinearBackend.inputs_first: _inputs_first,
    LinearBackend.onednn: _onednn,
}
