"""Parameters that stay as stored (bf16 or quantized) and are dequantized inside each product.

On a CPU without fast bf16 units, fp32 products are several times faster than bf16. But converting a whole layer to fp32
takes twice its memory and a pass over it. `StoredWeight` looks like an fp32 parameter to the model, and multiplies a
few rows at a time, dequantized to a small reused buffer (`backends.py`). On an accelerator, a launch takes the host ten
microseconds and caches are small, so a whole matrix, or several experts, are dequantized in a few large launches.

The bytes of a weight stay in a slot, the buffer into which its layer was read. A row block is adjacent rows of a weight
in one piece of memory: a plain tensor, or quantized `Rows`; a fused weight, such as gate and up, has several. A stack
is the weights of all experts. A `Codes` object (`rows.py`) describes the bytes of a quantized block, such as its codes
and scales, to accelerator kernels.

Shapes: w (N, K) as in nn.Linear, x (..., K) or as rows (M, K), result (..., N); E experts of n rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from inspect import getattr_static
from typing import cast

import torch
import torch.nn.functional as F

from ..config.profiles import BackendTable
from ..plan.placement.memory import MAX_DEQUANTIZED_ELEMENTS
from . import device_codes
from .backends import linear
from .blocks import Block, dequantize_rows, join_blocks, join_stacks, panels
from .fused_projections import FusedProjections
from .rows import Codes, Rows, stack_codes

MAX_KERNEL_ROWS = 1024  # most rows of x for kernels that decode inside the product; with more, w is dequantized first


def expert_batches(out_EnK: torch.Tensor) -> Iterator[range]:
    """Yields ranges of experts to dequantize together: each has at most MAX_DEQUANTIZED_ELEMENTS, or is one expert."""
    num_matrices, *size = out_EnK.shape
    step = max(1, MAX_DEQUANTIZED_ELEMENTS // max(1, size[0] * size[1]))
    return (range(first, min(first + step, num_matrices)) for first in range(0, num_matrices, step))


def dequantize(block: Block, out_EnK: torch.Tensor) -> None:
    """Dequantizes a block to `out_EnK`, rounded once to its dtype. The block is rows of one matrix, or of all experts
    in a range of `expert_batches`. Uses an accelerator kernel, or torch operators with up to `DEQUANTIZING_BYTES` of
    scratch memory."""
    if isinstance(block, torch.Tensor):
        out_EnK.copy_(block.view(out_EnK.shape))
        return
    if device_codes.try_decode(block, out_EnK):
        return
    for row, panel in panels([block], torch.float32, on_device=True):
        # A block of several matrices yields a single panel.
        target = out_EnK[0, row : row + len(panel)] if len(out_EnK) == 1 else out_EnK
        target.copy_(panel.view(target.shape))


def multiply(x_MK: torch.Tensor, blocks: Sequence[Block], codes: Sequence[Codes] = ()) -> torch.Tensor:
    """Returns x @ w.T (M, N) on an accelerator, where w is the concatenated row blocks. `codes`: those of all blocks if
    a kernel can multiply them; without codes, or with many rows of x, blocks are dequantized panel by panel."""
    # The kernel decodes weights again for every hundred rows or so, which is slow with many rows.
    if codes and len(x_MK) <= MAX_KERNEL_ROWS:
        outs = [device_codes.multiply(x_MK, part) for part in codes]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    out_MN = x_MK.new_empty(len(x_MK), sum(block.shape[0] for block in blocks))
    for row, panel in panels(blocks, x_MK.dtype, on_device=True):
        torch.mm(x_MK, panel.t(), out=out_MN[:, row : row + panel.shape[0]])
    return out_MN


Join = Callable[[int, range], Rows | None]  # (index i of a block, experts) -> block i of all these experts as one


class StoredWeight(torch.Tensor):
    """A parameter made of row blocks (plain tensors or quantized rows), to be used like a tensor of `dtype`.

    `entries[e]` has the row blocks of expert e; a weight that is not a stack has one entry. Products and embedding
    lookups use the blocks as stored. Other operations get a dequantized copy of the whole weight.
    """

    entries: Sequence[Sequence[Block]]
    is_stacked: bool
    is_transposed: bool  # the shape is (K, N), or (E, K, N) for a stack, but blocks are rows of (N, K)
    is_matrix: bool  # the shape has two dimensions; stored, as `dim()` of a tensor subclass is slow
    compute_dtype: torch.dtype
    projections: tuple[FusedProjections, str] | None  # the module's fused projections, and this weight's name in them
    table: BackendTable | None  # measured backends; None for the default rule
    join: Join | None  # joins blocks of experts; None if the weight is in host memory
    on_device: bool  # in an accelerator's memory
    decoders: dict[torch.dtype, bool]  # by dtype: whether accelerator kernels decode the codes to it
    _stacks: Sequence[torch.Tensor] | None  # cache of `stacks()`

    @staticmethod
    def __new__(
        cls,
        entries: Sequence[Sequence[Block]],
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        is_stacked: bool,
        is_transposed: bool = False,
        table: BackendTable | None = None,
        join: Join | None = None,
    ) -> "StoredWeight":
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=entries[0][0].device)
        self.entries, self.is_stacked, self.is_transposed = entries, is_stacked, is_transposed
        self.is_matrix, self.compute_dtype, self.projections, self._stacks = len(shape) == 2, dtype, None, None
        self.table, self.join, self.on_device, self.decoders = table, join, join is not None, {}
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def dequantized(self) -> torch.Tensor:
        """Returns a new plain tensor of the compute dtype."""
        entries = [torch.cat([dequantize_rows(block, self.dtype) for block in blocks]) for blocks in self.entries]
        whole = torch.stack(entries) if self.is_stacked else entries[0]
        return whole.transpose(-1, -2) if self.is_transposed else whole.view(self.shape)

    @property
    def is_plain(self) -> bool:
        """True if this is a single matrix with shape (N, K), so that products use its blocks directly."""
        return self.is_matrix and not (self.is_stacked or self.is_transposed)

    @cached_property
    def needs_dequantizing(self) -> bool:
        """True if some block is not a plain tensor of the compute dtype."""
        return any(
            not isinstance(block, torch.Tensor) or block.dtype != self.compute_dtype
            for blocks in self.entries
            for block in blocks
        )

    def dequantize_into(self, out: torch.Tensor) -> torch.Tensor:
        """Dequantizes the weight to `out`, 1-D with as many elements, rounded once to the dtype of `out`. Returns a
        view of `out` with this weight's shape."""
        heights = [block.shape[0] for block in self.entries[0]]
        out_EnK, first = out.view(len(self.entries), sum(heights), -1), 0
        for index, height in enumerate(heights):
            # Block `index` of all experts: copied if plain, otherwise decoded by one launch, or several experts at
            # once, or expert by expert.
            rows_EnK, first = out_EnK[:, first : first + height], first + height
            if self.is_stacked and _copy_plain([blocks[index] for blocks in self.entries], rows_EnK):
                continue
            if self.codes and self._has_decoder(out.dtype):
                device_codes.decode(self.codes[index], rows_EnK)
                continue
            for experts in expert_batches(rows_EnK):
                rows = self.join(index, experts) if self.join is not None and len(experts) > 1 else None
                if rows is not None:
                    dequantize(rows, rows_EnK[experts.start : experts.stop])
                else:
                    for expert in experts:
                        dequantize(self.entries[expert][index], rows_EnK[expert : expert + 1])
        whole = out_EnK if self.is_stacked else out_EnK[0]
        return whole.transpose(-1, -2) if self.is_transposed else whole.view(self.shape)

    @cached_property
    def codes(self) -> Sequence[Codes]:
        """The codes of each row block, for a stack those of all experts. Empty if kernels cannot run, a block has no
        codes, or experts are not at equal distances in memory. Views, valid as long as the blocks."""
        if not self.on_device or not device_codes.is_available(self.entries[0][0].device):
            return ()
        stacks = list[Codes]()
        for blocks in zip(*self.entries, strict=True):
            parts = [None if isinstance(block, torch.Tensor) else block.codes() for block in blocks]
            known_codes = [part for part in parts if part is not None]
            if len(known_codes) < len(parts):
                return ()
            stack = known_codes[0] if len(known_codes) == 1 else stack_codes(known_codes)
            if stack is None or not stack.is_view:
                return ()
            stacks.append(stack)
        return stacks

    def _has_decoder(self, dtype: torch.dtype) -> bool:
        """True if accelerator kernels decode the codes to `dtype`."""
        if dtype not in self.decoders:
            rows = [cast(Rows, block) for block in self.entries[0]]
            self.decoders[dtype] = all(device_codes.can_decode(block, dtype) for block in rows)
        return self.decoders[dtype]

    @cached_property
    def has_kernels(self) -> bool:
        """True if accelerator kernels multiply 16-bit inputs by the codes; for a stack, by those of all experts at
        once."""
        if not self.codes or self.compute_dtype.itemsize != 2:
            return False
        can_multiply = device_codes.can_multiply_groups if self.is_stacked else device_codes.can_multiply
        return all(can_multiply(cast(Rows, block), self.compute_dtype) for block in self.entries[0])

    def stacks(self) -> Sequence[torch.Tensor]:
        """Returns views (E, rows, K) of a stack of plain tensors of the compute dtype: one view, or one for each range
        of rows that is adjacent in memory, in order. Empty for other weights, or if experts are not at equal distances
        in memory. Cached; valid as long as the blocks."""
        if self._stacks is None:
            is_whole = self.is_stacked and not self.is_transposed
            self._stacks = join_stacks(self.entries, self.compute_dtype) if is_whole else ()
        return self._stacks

    @cached_property
    def has_uniform_experts(self) -> bool:
        """True for a stack (N, K) of experts whose blocks all have the same types, shapes, dtypes and layouts."""
        if not self.is_stacked or self.is_transposed:
            return False
        return have_equal_blocks(self.entries)

    def expert(self, index: int) -> "StoredWeight":
        assert self.is_stacked, "weight is not a stack"
        return self._matrix([self.entries[index]], self.shape[1:], is_transposed=self.is_transposed)

    def transposed(self) -> "StoredWeight":
        assert not self.is_stacked, "cannot transpose a stack"
        return self._matrix(self.entries, (self.shape[1], self.shape[0]), is_transposed=not self.is_transposed)

    def _matrix(
        self, entries: Sequence[Sequence[Block]], shape: Sequence[int], *, is_transposed: bool
    ) -> "StoredWeight":
        return StoredWeight(
            entries,
            shape,
            self.compute_dtype,
            is_stacked=False,
            is_transposed=is_transposed,
            table=self.table,
            join=self.join,
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Runs the handler of an operation on stored blocks, if there is one and it supports the arguments."""
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
        """Runs operations that have no handler on dequantized copies, which is slow."""
        return func(*map(_dequantize, args), **{key: _dequantize(value) for key, value in (kwargs or {}).items()})


def _copy_plain(blocks: Sequence[Block], out_EnK: torch.Tensor) -> bool:
    """Copies blocks, one of each expert, and returns True, if they are plain tensors. Otherwise returns False."""
    plain = [block for block in blocks if isinstance(block, torch.Tensor)]
    if len(plain) < len(blocks):
        return False
    stacks = join_stacks([[block] for block in plain], plain[0].dtype)
    if stacks:
        out_EnK.copy_(stacks[0])
    else:
        torch._foreach_copy_(list(out_EnK), plain)  # pyright: ignore[reportPrivateImportUsage]
    return True


def have_equal_blocks(entries: Iterable[Sequence[Block]]) -> bool:
    """True if the row blocks of all entries have the same types, shapes, dtypes and layouts."""
    return len({tuple(map(_block_layout, blocks)) for blocks in entries}) == 1


def _block_layout(block: Block) -> tuple[object, ...]:
    """Returns properties that are equal for blocks which a kernel can handle together."""
    if isinstance(block, torch.Tensor):
        return block.shape, block.dtype, block.is_contiguous()
    return type(block), block.shape


def _dequantize(value: object) -> object:
    """Returns an argument of an operation with stored weights dequantized, also in lists and tuples."""
    if isinstance(value, StoredWeight):
        return value.dequantized()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_dequantize, value))
    return value


# Handlers of torch operations. They return NotImplemented for arguments that they do not support.
# Blocks are rows of a matrix b. A weight w with `is_transposed` is b.T, any other weight is b. So a product with w.T
# (linear) by a transposed weight is the product with b (matmul), and the other way round.
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(weight, StoredWeight) or not weight.is_matrix or x.dtype != weight.compute_dtype:
        return NotImplemented
    if weight.is_transposed:
        out = _matmul(x, weight.transposed())
        return out if bias is None else out + bias
    x_MK, blocks = x.reshape(-1, x.shape[-1]), weight.entries[0]
    if not x.is_cpu and (whole := join_blocks(blocks, x.dtype)) is not None:
        return F.linear(x, whole, bias)
    if weight.on_device and weight.needs_dequantizing:
        out_MN = multiply(x_MK, blocks, weight.codes if weight.has_kernels else ())
    elif weight.projections is not None:
        projections, name = weight.projections
        out_MN = projections.multiply(x, x_MK, name, weight.table)
    else:
        out_MN = linear(x_MK, blocks, weight.table)
    if bias is not None:
        out_MN += bias
    return out_MN.view(*x.shape[:-1], out_MN.shape[1])


def _add_product(x: torch.Tensor, weight: StoredWeight, out_MN: torch.Tensor) -> torch.Tensor:
    """Adds x @ weight to `out_MN` in place, for a weight that is not `is_transposed`. Its shape is (K, N) here, so each
    panel of rows is a part of the inner dimension K."""
    for row, panel in panels(weight.entries[0], weight.dtype, on_device=weight.on_device):
        out_MN.addmm_(x[:, row : row + panel.shape[0]], panel)
    return out_MN


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Handles torch.addmm, which GPT-2's Conv1D calls with weights of shape (K, N)."""
    if not isinstance(weight, StoredWeight) or isinstance(x, StoredWeight):
        return NotImplemented
    if weight.is_transposed:
        return _linear(x, weight.transposed(), bias)
    return _add_product(x, weight, bias.expand(x.shape[0], weight.shape[1]).clone())


def _matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not isinstance(weight, StoredWeight) or weight.is_stacked or weight.dim() != 2 or isinstance(x, StoredWeight):
        return NotImplemented
    if weight.is_transposed:
        return _linear(x, weight.transposed())
    x_MK = x.reshape(-1, x.shape[-1])
    return _add_product(x_MK, weight, x.new_zeros(len(x_MK), weight.shape[1])).view(*x.shape[:-1], weight.shape[1])


def _transpose(weight: torch.Tensor) -> torch.Tensor:
    if not isinstance(weight, StoredWeight) or weight.is_stacked or weight.dim() != 2:
        return NotImplemented
    return weight.transposed()


def _view(weight: torch.Tensor, *sizes: int | Sequence[int]) -> torch.Tensor:
    """Views a matrix that has the rows of all experts, one below the other, as a stack (for DBRX). Sizes of -1 are left
    to torch: DeepSeek-V4 uses one for its grouped output projection, which has no experts."""
    shape = [size for part in sizes for size in (part if isinstance(part, Sequence) else [part])]
    if not isinstance(weight, StoredWeight) or weight.is_stacked or weight.is_transposed or len(shape) != 3:
        return NotImplemented
    if any(type(size) is not int or size < 1 for size in shape):
        return NotImplemented
    height, width = shape[1:]
    plain = [block for block in weight.entries[0] if isinstance(block, torch.Tensor) and not block.shape[0] % height]
    if width != weight.shape[1] or len(plain) < len(weight.entries[0]):
        return NotImplemented
    entries = [[rows] for block in plain for rows in block.split(height)]
    if len(entries) != shape[0]:
        return NotImplemented
    return StoredWeight(entries, shape, weight.dtype, is_stacked=True, table=weight.table, join=weight.join)


def _embedding(ids: torch.Tensor, weight: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    if not isinstance(weight, StoredWeight) or weight.is_transposed or len(weight.entries[0]) != 1:
        return NotImplemented
    rows = dequantize_rows(weight.entries[0][0], weight.dtype, ids.flatten())
    return rows.view(*ids.shape, weight.shape[1])


def _getitem(weight: torch.Tensor, index: object) -> object:
    """Returns an expert of a stack, or a row of a matrix, such as an expert's bias."""
    if isinstance(index, torch.Tensor) and index.dim() == 0:
        index = int(index)
    if not isinstance(weight, StoredWeight) or type(index) is not int:
        return NotImplemented
    if weight.is_stacked:
        return weight.expert(index)
    if weight.is_transposed or len(weight.entries[0]) != 1:
        return NotImplemented
    row_number = range(weight.shape[0])[index]  # converts negative indices; raises IndexError
    row = torch.tensor([row_number], device=weight.device)
    return dequantize_rows(weight.entries[0][0], weight.dtype, row)[0]


_HANDLERS: dict[object, Callable[..., object]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.t: _transpose,
    torch.Tensor.t: _transpose,
    getattr_static(torch.Tensor, "T").__get__: _transpose,
    torch.Tensor.view: _view,
    torch.Tensor.__getitem__: _getitem,
}
