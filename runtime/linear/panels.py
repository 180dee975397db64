"""Row blocks of a stored matrix as numbers of the compute dtype, a panel at a time in one reused buffer."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from ..plan.placement.memory import DEQUANTIZED_AT_ONCE
from ..units import MIB
from .rows import Rows

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
            working = _working_bytes(block, dtype)
            most = DEQUANTIZED_AT_ONCE * working if on_device else _panel_bytes(block, num_bytes)
            height = max(1, most // (block.shape[1] * working))
            for start in range(0, block.shape[0], height):
                stop = min(start + height, block.shape[0])
                yield row + start, _panel(block, slice(start, stop), dtype)
        row += block.shape[0]


def _panel_bytes(block: Block, num_bytes: int | None) -> int:
    return num_bytes if num_bytes is not None and isinstance(block, torch.Tensor) else PANEL_BYTES


def _working_bytes(block: Block, dtype: torch.dtype) -> int:
    """Counts bytes for each number that is dequantised or upcast. Quantised ones become float32 first."""
    return dtype.itemsize if isinstance(block, torch.Tensor) else torch.float32.itemsize


def _panel(block: Block, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    shape = (rows.stop - rows.start, block.shape[1])
    if isinstance(block, torch.Tensor):
        return _buffers.take(shape, dtype, block.device).copy_(block[rows])
    panel = _buffers.take(shape, torch.float32, block.device)
    block.dequantize(rows, panel)
    return panel if dtype == torch.float32 else _buffers.take(shape, dtype, block.device).copy_(panel)


def rows_of(block: Block, rows: slice) -> torch.Tensor:
    """A run of them as float32, freshly allocated."""
    if isinstance(block, torch.Tensor):
        return block[rows].float()
    out = torch.empty(rows.stop - rows.start, block.shape[1], device=block.device)
    block.dequantize(rows, out)
    return out


def plain_rows(block: Block, dtype: torch.dtype, numbers: torch.Tensor | None = None) -> torch.Tensor:
    """All of them, or those with these numbers; freshly allocated, unless all of a plain block of that dtype."""
    if isinstance(block, torch.Tensor):
        return block.to(dtype) if numbers is None else F.embedding(numbers, block).to(dtype)
    height = block.shape[0] if numbers is None else numbers.numel()
    rows = torch.empty(height, block.shape[1], device=block.device)
    block.dequantize(slice(None) if numbers is None else numbers, rows)
    return rows.to(dtype)
