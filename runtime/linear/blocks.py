"""Row blocks of a stored matrix: as numbers of the compute dtype, a panel at a time in one reused buffer; and those
that lie in one item of memory as one tensor, without a copy, so that one launch takes them all.

E experts, each of blocks of rows (n, K).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F

from ..plan.placement.memory import DEQUANTIZED_AT_ONCE
from ..units import MIB
from .rows import Rows, as_strided_stack

PANEL_BYTES = 4 * MIB  # stays in a cache
Block = torch.Tensor | Rows


class _Buffers:
    """Memory for weights that are dequantised or upcast, one buffer for each (device, dtype), which is
    used again. Owned by the engine's one thread."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Valid until the next call."""
        size = torch.Size(shape).numel()
        buffer = self._buffers.get((device, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # so that it may be written inside and outside of it
                buffer = torch.empty(max(size, PANEL_BYTES // dtype.itemsize), dtype=dtype, device=device)
            self._buffers[device, dtype] = buffer
        return buffer[:size].view(*shape)


_buffers = _Buffers()


def panels(
    blocks: Sequence[Block], dtype: torch.dtype, num_bytes: int | None = None, *, on_device: bool = False
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows); each is valid until the next is taken. Plain blocks of that dtype come as they are, others in
    panels of at most PANEL_BYTES; of plain ones, which are upcast at once, `num_bytes` instead. `on_device`: in an
    accelerator's memory, in panels of DEQUANTIZED_AT_ONCE numbers."""
    row = 0
    for block in blocks:
        if isinstance(block, torch.Tensor) and block.dtype == dtype:
            yield row, block
        else:
            is_plain = isinstance(block, torch.Tensor)
            working = dtype.itemsize if is_plain else torch.float32.itemsize  # quantised ones become float32 first
            most = num_bytes if num_bytes is not None and is_plain else PANEL_BYTES
            most = DEQUANTIZED_AT_ONCE * working if on_device else most
            height = max(1, most // (block.shape[1] * working))
            for start in range(0, block.shape[0], height):
                stop = min(start + height, block.shape[0])
                yield row + start, _panel(block, slice(start, stop), dtype)
        row += block.shape[0]


def _panel(block: Block, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    shape = (rows.stop - rows.start, block.shape[1])
    if isinstance(block, torch.Tensor):
        return _buffers.take(shape, dtype, block.device).copy_(block[rows])
    panel = _buffers.take(shape, torch.float32, block.device)
    block.dequantize(rows, panel)
    return panel if dtype == torch.float32 else _buffers.take(shape, dtype, block.device).copy_(panel)


def float_rows(block: Block, rows: slice) -> torch.Tensor:
    """A run of them as float32, freshly allocated."""
    if isinstance(block, torch.Tensor):
        return block[rows].float()
    out = torch.empty(rows.stop - rows.start, block.shape[1], device=block.device)
    block.dequantize(rows, out)
    return out


def dequantize_rows(block: Block, dtype: torch.dtype, numbers: torch.Tensor | None = None) -> torch.Tensor:
    """All of them, or those with these numbers; freshly allocated, unless all of a plain block of that dtype."""
    if isinstance(block, torch.Tensor):
        return block.to(dtype) if numbers is None else F.embedding(numbers, block).to(dtype)
    height = block.shape[0] if numbers is None else numbers.numel()
    rows = torch.empty(height, block.shape[1], device=block.device)
    block.dequantize(slice(None) if numbers is None else numbers, rows)
    return rows.to(dtype)


CONCAT_DTYPES = dict.fromkeys(
    (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu), torch.uint8
)  # not joined as such


def join_blocks(blocks: Sequence[Block], dtype: torch.dtype) -> torch.Tensor | None:
    """The one matrix of rows that lie directly below each other; None where they do not, or are no plain numbers of
    that dtype."""
    stacks = join_stacks([blocks], dtype)
    return stacks[0][0] if len(stacks) == 1 else None


def join_stacks(entries: Sequence[Sequence[Block]], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """`entries`: of each expert its blocks. Views (E, rows, K), each of neighbouring blocks of all experts, where these
    lie at equal distances; empty where some do not, or are no plain numbers of that dtype."""
    stacks = list[torch.Tensor]()
    for part in zip(*entries, strict=True):
        plain = [b for b in part if isinstance(b, torch.Tensor) and b.dtype == dtype and b.is_contiguous()]
        stack = as_strided_stack(plain) if len(plain) == len(part) else None
        if stack is None or stack.stride(0) < plain[0].numel():  # they overlap
            return ()
        before = stacks[-1] if stacks else None
        both = None if before is None else _join_below(before, stack)
        if both is not None:
            stacks[-1] = both
        else:
            stacks.append(stack)
    return stacks


def _join_below(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor | None:
    """Both as one stack, where each expert's rows of `lower` follow those of `upper` and fit before the next one's."""
    rows, width = upper.shape[1] + lower.shape[1], upper.shape[2]
    follows = lower.storage_offset() == upper.storage_offset() + upper.shape[1] * width
    is_alike = upper.shape[2] == lower.shape[2] and (len(upper) == 1 or upper.stride(0) == lower.stride(0))
    if not follows or not is_alike or (len(upper) > 1 and rows * width > upper.stride(0)):
        return None
    stride = upper.stride(0) if len(upper) > 1 else rows * width
    return upper.as_strided((len(upper), rows, width), (stride, *upper.stride()[1:]), upper.storage_offset())


@lru_cache(maxsize=4096)
def device_constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A few numbers in a device's memory, brought there once: in a pass that is recorded nothing may be."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def concat_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape joined by their first dimension: a view where they lie directly below each other, as the
    matrices of a stack do, otherwise a copy."""
    first = tensors[0]
    size, begin, memory = first.numel(), first.storage_offset(), first.untyped_storage().data_ptr()
    for turn, tensor in enumerate(tensors):
        is_next = tensor.storage_offset() == begin + turn * size and tensor.untyped_storage().data_ptr() == memory
        if not (is_next and tensor.is_contiguous()):
            return torch.cat([part.view(CONCAT_DTYPES.get(part.dtype, part.dtype)) for part in tensors]).view(
                first.dtype
            )
    return first.as_strided((len(tensors) * first.shape[0], *first.shape[1:]), first.stride(), begin)
