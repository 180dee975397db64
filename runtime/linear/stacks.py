"""Row blocks that lie in one item of memory as one tensor, without a copy, so that one launch takes them all.

E experts, each of blocks of rows (n, K).
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from .codes import at_equal_distances
from .panels import Block

WORDS = dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu), torch.uint8)  # not joined as such


def joined(blocks: Sequence[Block], dtype: torch.dtype) -> torch.Tensor | None:
    """The one matrix of rows that lie directly below each other; None where they do not, or are no plain numbers of
    that dtype."""
    stacks = joined_stacks([blocks], dtype)
    return stacks[0][0] if len(stacks) == 1 else None


def joined_stacks(entries: Sequence[Sequence[Block]], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """`entries`: of each expert its blocks. Views (E, rows, K), each of neighbouring blocks of all experts, where these
    lie at equal distances; empty where some do not, or are no plain numbers of that dtype."""
    stacks = list[torch.Tensor]()
    for part in zip(*entries, strict=True):
        stack = _as_stack(part, dtype)
        if stack is None:
            return ()
        before = stacks[-1] if stacks else None
        both = None if before is None else _below(before, stack)
        if both is not None:
            stacks[-1] = both
        else:
            stacks.append(stack)
    return stacks


def _as_stack(blocks: Sequence[Block], dtype: torch.dtype) -> torch.Tensor | None:
    """(E, n, K), of plain numbers of that dtype that are contiguous and do not overlap."""
    plain = [b for b in blocks if isinstance(b, torch.Tensor) and b.dtype == dtype and b.is_contiguous()]
    stack = at_equal_distances(plain) if len(plain) == len(blocks) else None
    return None if stack is None or stack.stride(0) < plain[0].numel() else stack


def _below(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor | None:
    """Both as one stack, where each expert's rows of `lower` follow those of `upper` and fit before the next one's."""
    rows, width = upper.shape[1] + lower.shape[1], upper.shape[2]
    follows = lower.storage_offset() == upper.storage_offset() + upper.shape[1] * width
    is_alike = upper.shape[2] == lower.shape[2] and (len(upper) == 1 or upper.stride(0) == lower.stride(0))
    if not follows or not is_alike or (len(upper) > 1 and rows * width > upper.stride(0)):
        return None
    stride = upper.stride(0) if len(upper) > 1 else rows * width
    return upper.as_strided((len(upper), rows, width), (stride, *upper.stride()[1:]), upper.storage_offset())


@lru_cache(maxsize=4096)
def kept_on(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A few numbers in a device's memory, brought there once: in a pass that is recorded nothing may be."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def below(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape joined by their first dimension: a view where they lie directly below each other, as the
    matrices of a stack do, otherwise a copy."""
    first = tensors[0]
    size, begin, memory = first.numel(), first.storage_offset(), first.untyped_storage().data_ptr()
    for turn, tensor in enumerate(tensors):
        is_next = tensor.storage_offset() == begin + turn * size and tensor.untyped_storage().data_ptr() == memory
        if not (is_next and tensor.is_contiguous()):
            return torch.cat([part.view(WORDS.get(part.dtype, part.dtype)) for part in tensors]).view(first.dtype)
    return first.as_strided((len(tensors) * first.shape[0], *first.shape[1:]), first.stride(), begin)
