"""Memory budgets of a run on the host and on an accelerator: as configured, or a share of free memory. A ledger is the
list of everything that a run needs in one memory, in bytes."""

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
from ..stream.weight_cache import WeightCache
from ..units import format_bytes, gib_to_bytes

log = logging.getLogger(__name__)

FREE_SHARE = 0.9  # share of the free memory that is the budget if none is configured


def reclaim_device_memory(device: ComputeDevice) -> None:
    """Frees device memory and pinned memory that an earlier session left reserved. Takes a tenth of a second, unless
    nothing is reserved."""
    if device.is_accelerator and device.memory().reserved:
        gc.collect()  # an ended engine has reference cycles, which keep its tensors
        device.empty_caches()


def usable_host_bytes(num_cached_bytes: int = 0, *, is_pinned: bool) -> int:
    """Returns the default host budget: FREE_SHARE of free memory, including `num_cached_bytes` of weights that earlier
    runs left in memory. `is_pinned`: with an accelerator, it is at most `PINNED_SHARE` of total memory."""
    free = int((available_bytes() + num_cached_bytes) * FREE_SHARE)
    return min(free, int(total_bytes() * PINNED_SHARE)) if is_pinned else free


def make_budgets(offload: OffloadConfig, device: ComputeDevice, cache: WeightCache | None = None) -> Budgets:
    """Returns the budgets of a run. Weights in `cache` count as free memory: the run's ledgers include the weights that
    it reuses, and the other weights are released."""
    cached_compute, pinned = (cache.compute_bytes, cache.pinned_bytes) if cache is not None else (0, 0)
    cached_host = pinned + (0 if device.is_accelerator else cached_compute)
    host_gib = offload.host_memory_gib
    default_bytes = usable_host_bytes(cached_host, is_pinned=device.is_accelerator)
    host_bytes = gib_to_bytes(host_gib) if host_gib is not None else default_bytes
    if not device.is_accelerator:
        return Budgets(host_bytes=host_bytes, num_sharers=device.num_sharers)
    device_gib = offload.device_memory_gib
    free = int((device.free_bytes() + cached_compute) * FREE_SHARE)
    device_bytes = gib_to_bytes(device_gib) if device_gib is not None else free
    return Budgets(
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        library_bytes=device.library_bytes,
        num_sharers=device.num_sharers,
    )


@contextmanager
def limit_device_memory(offload: OffloadConfig, device: ComputeDevice, cache: WeightCache | None) -> Iterator[None]:
    """Limits the memory of torch's allocator inside the `with` block: to `offload.device_memory_gib`, if set, minus the
    memory that libraries allocate without torch. Tensors that already exist do not count, except cached weights. Logs
    the allocator's peak at the end."""
    if not device.is_accelerator:
        yield
        return
    device_gib, library_bytes = offload.device_memory_gib, min(KERNELS_BYTES, device.library_bytes)
    if device_gib is not None:
        cached_bytes = cache.compute_bytes if cache is not None else 0
        device.set_memory_limit(gib_to_bytes(device_gib) - library_bytes + device.memory().allocated - cached_bytes)
    try:
        yield
    finally:
        if device_gib is not None:
            device.set_memory_limit(None)
        used, reserved = format_bytes(device.peak_bytes()), format_bytes(device.peak_reserved_bytes())
        log.debug("device memory peak: %s in tensors, %s reserved by torch's allocator", used, reserved)


def require_within_budget(placement: Placement, baseline_bytes: int, num_sharers: int) -> None:
    """Raises OverBudget if the peak memory of the process, minus `baseline_bytes`, exceeds the host budget.
    `num_sharers`: processes that share weights in host memory."""
    host = next(ledger for ledger in placement.ledgers if ledger.memory == "host")
    used = peak_resident_bytes(num_sharers) - baseline_bytes
    if used > host.budget_bytes:
        raise OverBudget(f"{format_bytes(used)} used, {host.budget_key} allows {format_bytes(host.budget_bytes)}")
