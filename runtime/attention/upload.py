"""Copies small index tensors from host lists to the compute device."""

from collections.abc import Sequence

import torch


def upload(
    values: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copies values to a tensor on `device` without blocking. Work that is queued later sees them."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph cannot contain the index values of one pass")
    # The copy is from pinned memory, as one from pageable memory would wait for the device. torch's allocator does not
    # reuse this memory until the copy is done.
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type != "cpu")
    return host.to(device, non_blocking=True)
