"""Numbers that a pass's layout comes to, from the host's lists to where the model computes."""

from collections.abc import Sequence

import torch


def upload(
    values: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Returns at once: what is queued from now on finds the numbers. From pageable memory a device would first finish
    all that it was given. The pinned memory is torch's own, which keeps it until the copy is done."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a recording cannot hold numbers of one pass")
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type != "cpu")
    return host.to(device, non_blocking=True)
