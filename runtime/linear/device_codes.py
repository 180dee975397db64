"""Launches Triton kernels on stored matrices in an accelerator's memory, and checks that they work.

    decode(codes, out)                     dequantizes all rows into out (N, K) or (E, n, K)
    multiply(x_MK, codes)                  returns x @ w.T (M, N)
    multiply_groups(x_VK, codes, ...)      returns (V, n): x sorted by expert, each row by its expert's matrix
    grouped_mm(x_VK, stack_EKN, offs=...)  the same for plain numbers, as torch.nn.functional.grouped_mm

`can_decode`, `can_multiply`, `can_multiply_groups` and `can_group` return True if the respective function supports such
rows and dtype. Their first call for a kind of matrix compares the kernel's results for a few rows with those of torch
operators, which synchronizes with the device. They return False, with a warning, if results differ, or if Triton is
missing, lacks a C compiler or fails. `try_decode` decodes rows if `can_decode` is True. Other calls do not synchronize
with the device.

`codes` is the memory layout of a quantized matrix, from `Rows.codes` or, for experts, from `stack_codes`. Reuse the
object, because it caches compiled launches: kernels with their arguments.

Decoded numbers equal those of `Rows.dequantize`, rounded once. Products accumulate in float32 and differ from torch's
in the last bits.

M rows of x, V if sorted by expert; E experts; N rows of a matrix, n rows of an expert's matrix; K columns; R checked
rows.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import Any

import torch

from ..kernels import arguments as constants
from ..kernels.arguments import (
    AWQ_FIELDS,
    CONSTANT_ZERO,
    DIVIDED,
    EXPONENTS,
    FIELDS4,
    FIELDS8,
    MULTIPLIED,
    NO_OVERALL,
    NO_ZEROS,
    PLAIN_FLOATS,
    PLAIN_ZEROS,
    SMALL_FLOATS,
    WORD_ROWS,
    Matrix,
    MatrixKind,
)
from .rows import Codes, Rows

log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALE_KINDS = {torch.float8_e8m0fnu: EXPONENTS, torch.float8_e4m3fn: SMALL_FLOATS}
COLUMN_ENCODINGS = (constants.WORDS4, constants.WORDS8)  # words of neighboring columns
BLOCKS = constants.DEVICE_GGUF  # encodings in blocks of 32 or 256 columns
CHECKED_ROWS, CHECKED_INPUTS = 48, 17  # rows of a matrix and of x that are compared with torch operators
MIN_EXPERTS = 16  # least length of the vector in which a program searches for its expert
ALIGNED_BYTES = 16  # Triton emits 16-byte loads for addresses known to be aligned
MAX_ERROR_CHARACTERS = 300  # of an exception's text in a warning

_is_interpreted = False


@contextmanager
def interpreted() -> Iterator[None]:
    """Runs kernels on CPU tensors inside the block, for tests. Set TRITON_INTERPRET=1 before Triton is imported."""
    global _is_interpreted
    _is_interpreted = True
    try:
        yield
    finally:
        _is_interpreted = False


def is_available(device: torch.device) -> bool:
    """True if Triton is installed and kernels can run on this device. Does not import Triton."""
    return (device.type == "cuda" or _is_interpreted) and _has_triton()


def _kernels() -> Any:
    from ..kernels import device_matrices  # late: importing Triton takes 0.2 s

    return device_matrices


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def decode(codes: Codes, out: torch.Tensor) -> None:
    """Dequantizes all rows, in order, to `out`: (N, K) or (E, n, K). Numbers of a row must be adjacent in `out`."""
    stack = out if out.dim() == 3 else out.unflatten(0, (codes.num_matrices, -1))
    num_experts, num_rows, num_columns = stack.shape
    strides = stack.stride(0), stack.stride(1)
    assert stack.stride(2) == 1, "rows of out must be contiguous"
    assert (num_experts * num_rows, num_columns) == (codes.num_matrices * codes.shape[0], codes.shape[1])
    if not stack.numel():
        return
    tile_rows, tile_columns = _decode_tile(codes.encoding)
    matrix, kind, lead = _kernel_arguments(codes, num_experts, tile_columns)
    grid = (num_experts * -(-(num_rows + lead) // tile_rows), -(-num_columns // tile_columns), 1)
    args = (matrix, stack, num_rows, *strides, lead, kind, tile_rows, tile_columns)
    key = (stack.dtype, _is_aligned(stack), num_experts, strides)
    _launch("decode", codes.launches, key, grid, args, _OPTIONS)
    if codes.columns is not None and codes.columns.shape[1]:  # escapes of WINDOW4
        parts = (codes.starts, codes.columns, codes.exponents)
        part_strides = [_expert_stride(part) for part in parts]
        sizes = (num_rows, codes.columns.shape[1], *part_strides, *strides, 32)
        args = (matrix, *parts, codes.escape_offsets, stack, *sizes)
        _launch("add_escapes", codes.launches, key, (num_experts * num_rows, 1, 1), args, {"num_warps": 1})


def multiply(x_MK: torch.Tensor, codes: Codes) -> torch.Tensor:
    """Returns x @ w.T (M, N) in x's dtype for a single matrix w; codes are decoded inside the product."""
    assert codes.num_matrices == 1
    assert codes.encoding != constants.WINDOW4
    x_MK = x_MK if x_MK.stride(-1) == 1 else x_MK.contiguous()
    num_inputs, num_rows = x_MK.shape[0], codes.shape[0]
    out_MN = x_MK.new_empty(num_inputs, num_rows)
    if not out_MN.numel():
        return out_MN
    (height, rows, columns), options = _product_tile(_next_power_of_two(num_inputs), x_MK.dtype, codes.encoding)
    matrix, kind, lead = _kernel_arguments(codes, 1, columns)
    grid, x_stride = (-(-num_inputs // height), -(-(num_rows + lead) // rows), 1), x_MK.stride(0)
    args = (x_MK, matrix, out_MN, num_inputs, num_rows, x_stride, num_rows, lead, kind, height, rows, columns)
    _launch("multiply", codes.launches, (x_MK.dtype, height, x_stride, _is_aligned(x_MK)), grid, args, options)
    return out_MN


def multiply_groups(x_VK: torch.Tensor, codes: Codes, num_experts: int, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiplies rows of x, sorted by expert, by their expert's matrix; returns (V, n). `codes`: a stack of matrices,
    or one tall matrix with the rows of all experts. `ends_E`: int32, the end (exclusive) of each expert's rows of x."""
    num_rows = codes.num_matrices * codes.shape[0] // num_experts
    assert codes.num_matrices in (1, num_experts)
    assert codes.encoding != constants.WINDOW4

    def make_arguments(num_columns: int) -> tuple[Matrix, MatrixKind, int]:
        return _kernel_arguments(codes, num_experts, num_columns)

    return _launch_groups(x_VK, make_arguments, codes.encoding, num_rows, ends_E, codes.launches, ())


def grouped_mm(x_VK: torch.Tensor, stack_EKN: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """Same as F.grouped_mm for x (V, K) and a stack of x's dtype with any strides; returns (V, N)."""
    num_experts, num_columns, num_rows = stack_EKN.shape
    expert, column, row = stack_EKN.stride()
    matrix = Matrix(body=stack_EKN, body_expert=expert, body_row=row, body_column=column, num_columns=num_columns)
    kind = MatrixKind(constants.PLAIN, PLAIN_FLOATS, NO_ZEROS, 0, NO_OVERALL, False, False, False, 0, 1)
    assert len(offs) == num_experts
    assert x_VK.dtype == stack_EKN.dtype
    key = (*stack_EKN.shape, expert, column, row, _is_aligned(stack_EKN), stack_EKN.device.index)
    arguments = matrix, kind, 0
    return _launch_groups(x_VK, lambda _: arguments, constants.PLAIN, num_rows, offs, _plain_launches, key)


def _launch_groups(
    x_VK: torch.Tensor,
    make_arguments: Callable[[int], tuple[Matrix, MatrixKind, int]],
    encoding: int,
    num_rows: int,
    ends_E: torch.Tensor,
    launches: dict[object, Any],
    key: tuple[object, ...],
) -> torch.Tensor:
    """Launches the kernel `multiply_groups`. `make_arguments(num_columns)` returns the matrix, its kind and `lead` (see
    `_kernel_arguments`) for tiles of so many columns. `launches` caches compiled kernels; `key` has what distinguishes
    these arguments from others in it."""
    x_VK = x_VK if x_VK.stride(-1) == 1 else x_VK.contiguous()
    num_visits, num_experts = x_VK.shape[0], ends_E.shape[0]
    out_VN = x_VK.new_empty(num_visits, num_rows)
    if not out_VN.numel():
        return out_VN
    mean_rows = -(-num_visits // num_experts)
    (height, rows, columns), options = _product_tile(_next_power_of_two(mean_rows), x_VK.dtype, encoding)
    matrix, kind, lead = make_arguments(columns)
    # An upper bound, as only the device knows how many rows an expert has: each expert adds at most one partial tile,
    # and each tile has at least one row.
    num_tiles = min(num_visits, num_visits // height + num_experts)
    grid, x_stride = (num_tiles, -(-(num_rows + lead) // rows), 1), x_VK.stride(0)
    width = max(MIN_EXPERTS, _next_power_of_two(num_experts))
    sizes = (num_experts, num_rows, x_stride, num_rows, lead)
    args = (x_VK, matrix, out_VN, ends_E, *sizes, kind, width, height, rows, columns)
    key = (*key, x_VK.dtype, height, num_experts, x_stride, _is_aligned(x_VK), ends_E.dtype, _is_aligned(ends_E))
    _launch("multiply_groups", launches, key, grid, args, options)
    return out_VN


def _launch(
    name: str,
    launches: dict[object, Any],
    key: tuple[object, ...],
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    options: Mapping[str, Any],
) -> None:
    """Launches the kernel `name` on the current stream of its arguments' device. Reuses the compiled kernel in
    `launches` for this `key`, because Triton's dispatch over forty arguments takes as long as several launches."""
    # `key` must have all properties of arguments for which Triton specializes code: dtypes, strides, address alignment,
    # and sizes not marked `do_not_specialize`. If one were missing, code for other arguments would run.
    device = args[1].device if isinstance(args[1], torch.Tensor) else args[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton uses the current device
        compiled = launches.get((name, key))
        if compiled is None:
            launches[name, key] = getattr(_kernels(), name)[grid](*args, **options)  # None in the interpreter
        else:
            compiled[grid](*args)


def _is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % ALIGNED_BYTES == 0


def can_decode(rows: Rows, dtype: torch.dtype) -> bool:
    """True if `decode` supports such rows and this dtype."""
    return _usable_codes(rows, dtype, "to decode", _check_decode) is not None


def try_decode(rows: Rows, out: torch.Tensor) -> bool:
    """Decodes rows to `out` and returns True, if `decode` supports them. Otherwise returns False."""
    codes = _usable_codes(rows, out.dtype, "to decode", _check_decode)
    if codes is not None:
        decode(codes, out)
    return codes is not None


def can_multiply(rows: Rows, dtype: torch.dtype) -> bool:
    """True if `multiply` supports such rows and x of this dtype."""
    return _usable_codes(rows, dtype, "to multiply with", _check_multiply) is not None


def can_multiply_groups(rows: Rows, dtype: torch.dtype) -> bool:
    """True if `multiply_groups` supports experts with such rows and x of this dtype."""
    return _usable_codes(rows, dtype, "grouped products of", _check_multiply_groups) is not None


def can_group(stack_EKN: torch.Tensor) -> bool:
    """True if `grouped_mm` supports such a stack of plain numbers."""
    if not is_available(stack_EKN.device) or not _has_tensor_cores(stack_EKN.device):
        return False
    if stack_EKN.dtype not in DTYPES or not stack_EKN.numel():
        return False
    key = ("grouped products of plain numbers", stack_EKN.dtype, stack_EKN.device)
    return _check_once(key, lambda: _check_grouped_mm(stack_EKN))


def _usable_codes(
    rows: Rows, dtype: torch.dtype, purpose: str, matches_torch: Callable[[Codes, torch.Tensor, torch.dtype], bool]
) -> Codes | None:
    """Returns the rows' codes if a kernel supports them and its results match those of torch operators; otherwise None.
    `purpose`: words for a warning. `matches_torch` gets codes of a few rows, their dequantized numbers and `dtype`; it
    runs the kernel and compares its results with those numbers, or with products of them."""
    codes = rows.codes() if is_available(rows.device) and dtype in DTYPES else None
    if codes is None or not prod(codes.shape):
        return None
    is_product = matches_torch is not _check_decode
    if is_product and (codes.encoding == constants.WINDOW4 or not _has_tensor_cores(rows.device)):
        return None

    def compare() -> bool:
        sample = codes.first(CHECKED_ROWS)
        numbers = torch.empty(sample.shape, device=rows.device)
        rows.dequantize(slice(0, len(numbers)), numbers)
        return matches_torch(sample, numbers, dtype)

    kind = _matrix_kind(codes, _decode_tile(codes.encoding)[1])
    return codes if _check_once((purpose, kind, dtype, rows.device), compare) else None


def _has_tensor_cores(device: torch.device) -> bool:
    """True if Triton's products use tensor cores: compute capability 8.0 and later."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _check_once(key: tuple[object, ...], compare: Callable[[], bool]) -> bool:
    """Runs `compare` once per process and key, and returns its result. If it is False or an exception, logs a warning
    and returns False."""
    is_usable = _check_results.get(key)
    if is_usable is None:
        reason = "results differ from torch's operators"
        try:
            is_usable = compare()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton, its compilers and the driver raise many classes
            is_usable, reason = False, f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
        if not is_usable:
            log.warning("Triton kernel %s is not usable; using torch operators: %s", " ".join(map(str, key)), reason)
        _check_results[key] = is_usable
    return is_usable


def _check_decode(codes: Codes, numbers_RK: torch.Tensor, dtype: torch.dtype) -> bool:
    out_RK, expected_RK = torch.empty_like(numbers_RK, dtype=dtype), numbers_RK.to(dtype)
    decode(codes, out_RK)
    return bool(((out_RK == expected_RK) | (out_RK.isnan() & expected_RK.isnan())).all())


def _check_multiply(codes: Codes, numbers_RK: torch.Tensor, dtype: torch.dtype) -> bool:
    x_MK = _check_inputs(numbers_RK.shape[1], dtype, numbers_RK.device)
    return _is_product(multiply(x_MK, codes), x_MK, numbers_RK.to(dtype))


def _check_multiply_groups(codes: Codes, numbers_RK: torch.Tensor, dtype: torch.dtype) -> bool:
    x_MK = _check_inputs(numbers_RK.shape[1], dtype, numbers_RK.device)
    ends = torch.full((1,), len(x_MK), dtype=torch.int32, device=x_MK.device)
    return _is_product(multiply_groups(x_MK, codes, 1, ends), x_MK, numbers_RK.to(dtype))


def _check_grouped_mm(stack_EKN: torch.Tensor) -> bool:
    stack = stack_EKN[:2, :, :CHECKED_ROWS]
    x_MK = _check_inputs(stack.shape[1], stack.dtype, stack.device)
    ends = torch.full((len(stack),), len(x_MK), dtype=torch.int32, device=stack.device)
    ends[:-1] = 5  # of two experts, the first gets 5 rows
    out_MN = grouped_mm(x_MK, stack, offs=ends)
    row_ranges = (slice(None),) if len(stack) == 1 else (slice(5), slice(5, None))
    return all(_is_product(out_MN[rows], x_MK[rows], stack[expert].t()) for expert, rows in enumerate(row_ranges))


def _check_inputs(num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # No random numbers, so that the run's random state does not change.
    numbers = torch.arange(CHECKED_INPUTS * num_columns, dtype=torch.float32, device=device)
    return numbers.sin().to(dtype).view(CHECKED_INPUTS, num_columns)


def _is_product(out_MN: torch.Tensor, x_MK: torch.Tensor, w_NK: torch.Tensor) -> bool:
    """True if `out_MN` equals x @ w.T up to rounding, wherever the product is finite in x's dtype."""
    x, w = x_MK.double(), w_NK.double()
    expected, sizes = x @ w.t(), x.abs() @ w.abs().t()
    float32_error = sizes * torch.finfo(torch.float32).eps * len(w[0])
    rounding = expected.abs() * torch.finfo(x_MK.dtype).eps
    is_wrong = (out_MN.double() - expected).abs() > float32_error + rounding
    return not bool((is_wrong & expected.to(x_MK.dtype).isfinite()).any())


def _kernel_arguments(codes: Codes, num_experts: int, tile_columns: int) -> tuple[Matrix, MatrixKind, int]:
    """Returns kernel arguments for tiles of `tile_columns` columns. The last is `lead`: how many rows of the first word
    precede the matrix, if words hold several rows. Cached with the codes."""
    key = (num_experts, tile_columns)
    if (arguments := codes.launches.get(key)) is None:
        lead = codes.first_row % WORD_ROWS if codes.encoding == constants.ROW_WORDS else 0
        arguments = codes.launches[key] = (_matrix(codes, num_experts), _matrix_kind(codes, tile_columns), lead)
    return arguments


def _matrix(codes: Codes, num_experts: int) -> Matrix:
    """Returns kernel arguments for a stack of experts, or for one tall matrix with the rows of all experts."""
    is_concatenated = codes.num_matrices < num_experts
    expert_rows = codes.shape[0] // num_experts if is_concatenated else 0
    assert expert_rows % WORD_ROWS == 0 or codes.encoding != constants.ROW_WORDS, "a word must hold rows of one expert"
    body, scales, zeros, groups, overall = codes.body, codes.scales, codes.zeros, codes.groups, codes.overall
    extra = next((tensor for tensor in (codes.bases, codes.table, codes.order) if tensor is not None), None)
    factors = scales if scales is None or scales.dtype not in SCALE_KINDS else scales.view(torch.uint8)
    expert_strides = [_expert_stride(tensor) for tensor in (body, scales, zeros, groups, extra, overall)]
    scale_strides, zero_strides = (t.stride()[1:] if t is not None else (0, 0) for t in (scales, zeros))
    return Matrix(
        body, factors, zeros, groups, extra, overall,
        *expert_strides, *body.stride()[1:], *scale_strides, *zero_strides,
        overall_row=0 if overall is None else overall.stride(1),
        scale_rows=codes.scale_rows,
        num_columns=codes.shape[1],
        num_groups=0 if scales is None else scales.shape[2],
        row_step=expert_rows,
        first_row=codes.first_row,
        last_factor=1.0 if codes.last_factor is None else codes.last_factor,
    )  # fmt: skip


def _expert_stride(tensor: torch.Tensor | None) -> int:
    """Returns the elements from one matrix of a stack to the next; 0 for a single matrix."""
    return 0 if tensor is None or len(tensor) == 1 else tensor.stride(0)


def _matrix_kind(codes: Codes, tile_columns: int) -> MatrixKind:
    """Returns compile-time constants of a kernel for tiles of `tile_columns` columns."""
    num_groups = 1 if codes.scales is None else codes.scales.shape[2]
    width = 0 if num_groups == 1 else codes.width
    if codes.groups is not None and num_groups > 1:
        group_tile = tile_columns
    elif width == 0 or width % tile_columns == 0:
        group_tile = 1
    else:
        group_tile = tile_columns // width if tile_columns % width == 0 else tile_columns
    return MatrixKind(
        encoding=codes.encoding,
        scales=PLAIN_FLOATS if codes.scales is None else SCALE_KINDS.get(codes.scales.dtype, PLAIN_FLOATS),
        zeros=_zeros_kind(codes),
        zero_offset=codes.zero_offset,
        overall=NO_OVERALL if codes.overall is None else DIVIDED if codes.divides else MULTIPLIED,
        has_last_factor=codes.last_factor is not None,
        has_groups=codes.groups is not None and num_groups > 1,
        is_reordered=codes.order is not None,
        width=width,
        group_tile=group_tile,
    )


def _zeros_kind(codes: Codes) -> int:
    """Returns the constant of `kernels/arguments.py` for how zero points are stored."""
    if codes.zeros is None:
        return CONSTANT_ZERO if codes.zero_offset else NO_ZEROS
    if not codes.zero_bits:
        return PLAIN_ZEROS
    if codes.encoding == constants.ROW_WORDS:
        return AWQ_FIELDS
    return FIELDS4 if codes.zero_bits == 4 else FIELDS8


def _decode_tile(encoding: int) -> tuple[int, int]:
    """Returns rows and columns of a tile for `decode`. A row of a tile is whole sectors of memory (32 bytes), both as
    codes and as numbers."""
    if encoding in COLUMN_ENCODINGS:
        return 64, 128
    if encoding == constants.ROW_WORDS:
        return 128, 32
    return (32, 128) if encoding in BLOCKS else (32, 256)


@cache
def _product_tile(num_inputs: int, dtype: torch.dtype, encoding: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Returns the tile of a product (rows of x, rows of the matrix, columns) and launch options, for `num_inputs` rows
    of x, a power of two. It is the fastest tile on an H100 that fits the shared memory of GPUs with compute
    capabilities 8.0 to 12.0."""
    height = min(max(16, num_inputs), 128)
    if dtype == torch.float32:  # not timed
        height = min(height, 16 if encoding in BLOCKS else 32)
        tile, warps, stages = ((height, 32, 128), 4, 1) if encoding in BLOCKS else ((height, 64, 32), 4, 2)
    elif encoding in BLOCKS:  # 128 columns, half of a block of 256
        is_plain = encoding not in (constants.Q5_K, constants.Q6_K)
        if height == 128:
            tile, (warps, stages) = (height, 64, 128), (8, 1) if is_plain else (4, 3)
        else:
            tile, warps, stages = (height, 32, 128), 4, 3 if is_plain or height == 16 else 1
    elif encoding == constants.PLAIN:
        tile, warps, stages = (height, 64, 64), 8 if height == 128 else 4, 3
    else:
        are_words = encoding in COLUMN_ENCODINGS or encoding == constants.ROW_WORDS
        tile = (height, 32, 256 if height == 16 else 128)
        if height == 128 or (height == 64 and are_words):
            tile = (height, 64, 64 if height == 128 else 128)
        warps, stages = 8 if height == 128 and not are_words else 4, 4
        if encoding == constants.TABLE_NIBBLES:  # the table would be copied at each stage
            tile, stages = (height, 32, 128) if height == 16 else (height, 64, 64), 1
    return tile, _OPTIONS | {"num_stages": stages, "num_warps": warps}


def _next_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


_OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
_check_results: dict[object, bool] = {}  # by key of `_check_once`
_plain_launches: dict[object, Any] = {}  # compiled launches of `grouped_mm`
