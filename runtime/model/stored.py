"""Weights that stay as they are stored, a bf16 view into a slot, and are widened inside the product that needs them.

On a CPU without fast bf16 units, products in fp32 are several times faster than in bf16, yet widening a whole layer
costs as much memory again and a pass over it. `StoredWeight` therefore looks like an fp32 parameter to the model and
multiplies panel by panel: a few rows are widened into one small reused buffer that stays in the cache, multiplied,
and overwritten by the next.

Shapes: w (N, K) as nn.Linear keeps it, x (..., K), result (..., N).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F

PANEL_BYTES = 4 * 1024 * 1024
NARROW_ROWS = 96  # up to here w @ x.T beats x @ w.T: the product's inner loops run over the long side


class _Buffers:
    """Reused memory for widened weights, one piece for each (device, dtype). Owned by the engine's one thread."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Valid until the next call."""
        size = torch.Size(shape).numel()
        piece = self._pieces.get((device, dtype))
        if piece is None or piece.numel() < size:
            with torch.inference_mode(False):  # so that it may be written inside and outside of it
                piece = torch.empty(max(size, PANEL_BYTES // dtype.itemsize), dtype=dtype, device=device)
            self._pieces[device, dtype] = piece
        return piece[:size].view(*shape)


_buffers = _Buffers()


class StoredWeight(torch.Tensor):
    """A parameter put together from row blocks of stored tensors, computing in `dtype`.

    `entries[e]` holds the row blocks of expert e; a weight that is not stacked has one entry. Products and look-ups
    use the blocks as they are. Any other operation gets a widened copy, correct but as large as the weight.
    """

    entries: list[list[torch.Tensor]]
    is_stacked: bool

    @staticmethod
    def __new__(
        cls, entries: list[list[torch.Tensor]], shape: Sequence[int], dtype: torch.dtype, *, is_stacked: bool
    ) -> "StoredWeight":
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=entries[0][0].device)
        self.entries, self.is_stacked = entries, is_stacked
        return self

    def __init__(
        self, entries: list[list[torch.Tensor]], shape: Sequence[int], dtype: torch.dtype, *, is_stacked: bool
    ) -> None:
        super().__init__()

    def widened(self) -> torch.Tensor:
        """A plain tensor of the compute dtype; freshly allocated."""
        entries = [torch.cat([block.to(self.dtype) for block in blocks]) for blocks in self.entries]
        return torch.stack(entries) if self.is_stacked else entries[0].view(self.shape)

    def expert(self, index: int) -> "StoredWeight":
        assert self.is_stacked, "only stacked weights have experts"
        return StoredWeight([self.entries[index]], self.shape[1:], self.dtype, is_stacked=False)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Whatever has no handler: correct, and as slow as a widened copy is."""
        return func(*map(_widen, args), **{key: _widen(value) for key, value in (kwargs or {}).items()})


def _widen(value: object) -> object:
    if isinstance(value, StoredWeight):
        return value.widened()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_widen, value))
    return value


def _panels(weight: StoredWeight) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows) in compute dtype; each is valid until the next is taken. Blocks of that dtype come as they
    are."""
    row = 0
    for block in weight.entries[0]:
        if block.dtype == weight.dtype:
            yield row, block
        else:
            height = max(1, PANEL_BYTES // (block.shape[1] * weight.dtype.itemsize))
            for start in range(0, block.shape[0], height):
                part = block[start : start + height]
                yield row + start, _buffers.take(part.shape, weight.dtype, part.device).copy_(part)
        row += block.shape[0]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(weight, StoredWeight) or weight.dim() != 2 or x.dtype != weight.dtype:
        return NotImplemented
    x_MK = x.reshape(-1, x.shape[-1])
    num_rows = x_MK.shape[0]
    if num_rows <= NARROW_ROWS:
        out_NM = x.new_empty(weight.shape[0], num_rows)
        for row, panel in _panels(weight):
            torch.mm(panel, x_MK.t(), out=out_NM[row : row + panel.shape[0]])
        out_MN = out_NM.t()
        out_MN = out_MN + bias if bias is not None else out_MN.contiguous()
    else:
        out_MN = x.new_empty(num_rows, weight.shape[0])
        for row, panel in _panels(weight):
            torch.mm(x_MK, panel.t(), out=out_MN[:, row : row + panel.shape[0]])
        if bias is not None:
            out_MN += bias
    return out_MN.view(*x.shape[:-1], weight.shape[0])


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """GPT-2's Conv1D keeps (in, out): panels are runs of the inner dimension and their products add up."""
    if not isinstance(weight, StoredWeight) or isinstance(x, StoredWeight):
        return NotImplemented
    out = bias.expand(x.shape[0], weight.shape[1]).clone()
    for row, panel in _panels(weight):
        out.addmm_(x[:, row : row + panel.shape[0]], panel)
    return out


def _embedding(ids: torch.Tensor, weight: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    if not isinstance(weight, StoredWeight) or len(weight.entries[0]) != 1:
        return NotImplemented
    return F.embedding(ids, weight.entries[0][0]).to(weight.dtype)


def _getitem(weight: torch.Tensor, index: object) -> object:
    if isinstance(weight, StoredWeight) and weight.is_stacked:
        if isinstance(index, int):
            return weight.expert(index)
        if isinstance(index, torch.Tensor) and index.dim() == 0:
            return weight.expert(int(index))
    return NotImplemented


_HANDLERS: dict[object, Callable[..., object]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    torch.Tensor.__getitem__: _getitem,
}
