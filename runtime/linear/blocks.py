"""Row blocks of a stored matrix: dequantized panel by panel to a reused buffer, or joined to one tensor without a copy.

A row block is adjacent rows of a weight (N, K) in one piece of memory: a plain tensor, or quantized `Rows`. A fused
weight, such as query, key and value, has several blocks. A panel is a few rows of a block, dequantized or converted to
the dtype of a product.

Shapes: a block is (rows, K); a stack of E experts has row blocks for each expert.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F

from ..plan.placement.memory import MAX_DEQUANTIZED_ELEMENTS
from ..units import MIB
from .rows import Rows, as_strided_stack

PANEL_BYTES = 4 * MIB  # fits a CPU cache
Block = torch.Tensor | Rows


class _Buffers:
    """Reused buffers for panels, one per (device, dtype). Not thread-safe: only the engine's thread uses them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns uninitialized memory, valid until the next call for this device and dtype."""
        size = torch.Size(shape).numel()
        buffer = self._buffers.get((device, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # a buffer made in inference mode is read-only outside of it
                buffer = torch.empty(max(size, PANEL_BYTES // dtype.itemsize), dtype=dtype, device=device)
            self._buffers[device, dtype] = buffer
        return buffer[:size].view(*shape)


_buffers = _Buffers()


def panels(
    blocks: Sequence[Block], dtype: torch.dtype, plain_panel_bytes: int | None = None, *, on_device: bool = False
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields all rows of the concatenated blocks in `dtype`, as (index of the first row, panel); a panel is valid until
    the next one. A plain block of this dtype is yielded whole, without a copy. Other blocks are converted in panels of
    at most PANEL_BYTES; `plain_panel_bytes` replaces this limit for plain blocks. `on_device`: panels have up to
    MAX_DEQUANTIZED_ELEMENTS, for an accelerator."""
    row = 0
    for block in blocks:
        if isinstance(block, torch.Tensor) and block.dtype == dtype:
            yield row, block
        else:
            is_plain = isinstance(block, torch.Tensor)
            itemsize = dtype.itemsize if is_plain else torch.float32.itemsize  # quantized rows become float32 first
            max_bytes = plain_panel_bytes if plain_panel_bytes is not None and is_plain else PANEL_BYTES
            max_bytes = MAX_DEQUANTIZED_ELEMENTS * itemsize if on_device else max_bytes
            height = max(1, max_bytes // (block.shape[1] * itemsize))
            for start in range(0, block.shape[0], height):
                stop = min(start + height, block.shape[0])
                yield row + start, _panel(block, slice(start, stop), dtype)
        row += block.shape[0]


def _panel(block: Block, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    """Converts rows of a block to `dtype` in a reused buffer."""
    shape = (rows.stop - rows.start, block.shape[1])
    if isinstance(block, torch.Tensor):
        return _buffers.take(shape, dtype, block.device).copy_(block[rows])
    panel = _buffers.take(shape, torch.float32, block.device)
    block.dequantize(rows, panel)
    return panel if dtype == torch.float32 else _buffers.take(shape, dtype, block.device).copy_(panel)


def float_rows(block: Block, rows: slice) -> torch.Tensor:
    """Returns adjacent rows of a block as a new float32 tensor."""
    if isinstance(block, torch.Tensor):
        return block[rows].float()
    out = torch.empty(rows.stop - rows.start, block.shape[1], device=block.device)
    block.dequantize(rows, out)
    return out


def dequantize_rows(block: Block, dtype: torch.dtype, row_numbers: torch.Tensor | None = None) -> torch.Tensor:
    """Returns all rows, or the rows in `row_numbers`, in `dtype`. The result is a new tensor; but all rows of a plain
    tensor that already has this dtype are returned as they are, without a copy."""
    if isinstance(block, torch.Tensor):
        return block.to(dtype) if row_numbers is None else F.embedding(row_numbers, block).to(dtype)
    height = block.shape[0] if row_numbers is None else row_numbers.numel()
    rows = torch.empty(height, block.shape[1], device=block.device)
    block.dequantize(slice(None) if row_numbers is None else row_numbers, rows)
    return rows.to(dtype)


# torch.cat does not support these dtypes: they are concatenated as bytes.
CONCAT_DTYPES = dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu), torch.uint8)


def join_blocks(blocks: Sequence[Block], dtype: torch.dtype) -> torch.Tensor | None:
    """Returns a view of the blocks as one matrix; None if they are not adjacent plain tensors of `dtype`."""
    stacks = join_stacks([blocks], dtype)
    return stacks[0][0] if len(stacks) == 1 else None


def join_stacks(entries: Sequence[Sequence[Block]], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """Returns views (E, rows, K) of all experts' weights: one view, or several if row blocks are not adjacent in
    memory. `entries`: row blocks of each expert. Returns nothing if blocks are not plain tensors of `dtype`, or experts
    are not evenly spaced in memory."""
    stacks = list[torch.Tensor]()
    for blocks in zip(*entries, strict=True):  # one block of each expert
        plain = [b for b in blocks if isinstance(b, torch.Tensor) and b.dtype == dtype and b.is_contiguous()]
        stack = as_strided_stack(plain) if len(plain) == len(blocks) else None
        if stack is None or stack.stride(0) < plain[0].numel():  # blocks overlap
            return ()
        previous = stacks[-1] if stacks else None
        combined = None if previous is None else _join_below(previous, stack)
        if combined is not None:
            stacks[-1] = combined
        else:
            stacks.append(stack)
    return stacks


def _join_below(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor | None:
    """Returns a view of two stacks as one, with the rows of `lower` below those of `upper`. Returns None if the rows of
    an expert in `lower` do not directly follow its rows in `upper` in memory."""
    rows, width = upper.shape[1] + lower.shape[1], upper.shape[2]
    follows = lower.storage_offset() == upper.storage_offset() + upper.shape[1] * width
    has_same_spacing = upper.shape[2] == lower.shape[2] and (len(upper) == 1 or upper.stride(0) == lower.stride(0))
    if not follows or not has_same_spacing or (len(upper) > 1 and rows * width > upper.stride(0)):
        return None
    stride = upper.stride(0) if len(upper) > 1 else rows * width
    return upper.as_strided((len(upper), rows, width), (stride, *upper.stride()[1:]), upper.storage_offset())


@lru_cache(maxsize=4096)
def device_constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a few constants as a device tensor. It is cached, because a pass that is recorded as a CUDA graph must
    not copy from the host."""
    # The source tensor may be freed at once: a copy from pageable memory returns after CUDA has read the source.
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def concat_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates tensors of one shape along the first dimension. Returns a view if they are adjacent in memory,
    otherwise a copy."""
    first = tensors[0]
    size, begin, memory = first.numel(), first.storage_offset(), first.untyped_storage().data_ptr()
    for index, tensor in enumerate(tensors):
        is_next = tensor.storage_offset() == begin + index * size and tensor.untyped_storage().data_ptr() == memory
        if not (is_next and tensor.is_contiguous()):
            parts = [part.view(CONCAT_DTYPES.get(part.dtype, part.dtype)) for part in tensors]
            return torch.cat(parts).view(first.dtype)
    return first.as_strided((len(tensors) * first.shape[0], *first.shape[1:]), first.stride(), begin)
