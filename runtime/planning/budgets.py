"""How much memory a run may use: as much as was said, or a share of what is free."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ..config.settings import OffloadConfig
from ..out_of_memory import OverBudget
from ..plan.placement.ledger import KERNELS_BYTES, PINNED_SHARE
from ..plan.placement.placement import Budgets, Placement
from ..stream.device import ComputeDevice
from ..stream.host_memory import available_bytes, peak_resident_bytes, total_bytes
from ..stream.kept_weights import KeptWeights
from ..units import format_bytes, gib_to_bytes

log = logging.getLogger(__name__)

FREE_SHARE = 0.9  # of the memory that is free at the start, when no budget is given


def reclaim_device_memory(device: ComputeDevice) -> None:
    """What an earlier session has left of an accelerator's memory, and of memory that is pinned for it. Where none was
    taken nothing is looked for, which takes a tenth of a second."""
    if device.is_accelerator and device.memory().reserved:
        gc.collect()  # an engine refers to itself
        device.empty_caches()


def usable_host_bytes(num_kept_bytes: int = 0, *, is_pinned: bool) -> int:
    """The host memory that runs may use where no budget is given: a share of what is free, or will be when what is kept
    is let go of; and where it is pinned, in front of an accelerator, no more than a share of all that there is."""
    free = int((available_bytes() + num_kept_bytes) * FREE_SHARE)
    return min(free, int(total_bytes() * PINNED_SHARE)) if is_pinned else free


def make_budgets(offload: OffloadConfig, device: ComputeDevice, kept: KeptWeights | None = None) -> Budgets:
    """The memory that a run may use. Where that is a share of what is free, `kept` weights count as free: the run's
    ledgers count those that it holds, and the others are let go of."""
    in_compute, pinned = (kept.compute_bytes, kept.pinned_bytes) if kept is not None else (0, 0)
    in_host = pinned + (0 if device.is_accelerator else in_compute)
    host = offload.host_memory_gib
    host_bytes = gib_to_bytes(host) if host is not None else usable_host_bytes(in_host, is_pinned=device.is_accelerator)
    if not device.is_accelerator:
        return Budgets(host_bytes=host_bytes, num_sharers=device.num_sharers)
    own = offload.device_memory_gib
    device_bytes = gib_to_bytes(own) if own is not None else int((device.free_bytes() + in_compute) * FREE_SHARE)
    return Budgets(
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        library_bytes=device.library_bytes,
        num_sharers=device.num_sharers,
    )


@contextmanager
def limit_device_memory(offload: OffloadConfig, device: ComputeDevice, kept: KeptWeights | None) -> Iterator[None]:
    """Holds torch's allocator to `offload.device_memory_gib`, if there is one, less what libraries take past it; what
    is in tensors already is not the run's, but for the weights that are kept. Says in the end what the allocator came
    to."""
    if not device.is_accelerator:
        yield
        return
    own, past = offload.device_memory_gib, min(KERNELS_BYTES, device.library_bytes)
    if own is not None:
        kept_bytes = kept.compute_bytes if kept is not None else 0
        device.set_memory_limit(gib_to_bytes(own) - past + device.memory().allocated - kept_bytes)
    try:
        yield
    finally:
        if own is not None:
            device.set_memory_limit(None)
        used, held = format_bytes(device.peak_bytes()), format_bytes(device.peak_reserved_bytes())
        log.info("device memory: at most %s in tensors, and %s held by torch's allocator for them", used, held)


def require_within_budget(placement: Placement, baseline_bytes: int, num_sharers: int) -> None:
    """Raises OverBudget when the peak of this process, above its baseline, is over what the host's ledger allows."""
    host = next(ledger for ledger in placement.ledgers if ledger.memory == "host")
    used = peak_resident_bytes(num_sharers) - baseline_bytes
    if used > host.budget_bytes:
        raise OverBudget(f"{format_bytes(used)} used, {host.budget_key} allows {format_bytes(host.budget_bytes)}")
