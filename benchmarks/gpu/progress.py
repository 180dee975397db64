"""Progress lines of `suite=gpu`'s worker on stderr. If a lent machine is taken back early, only these lines remain."""

import sys
import time
from threading import Lock

import torch

from runtime.stream.device import ComputeDevice
from runtime.units import MIB, format_bytes

SECONDS_BETWEEN = 5.0  # lines about the same total
MIN_REPORTED_BYTES = 64 * MIB  # smaller pinned buffers are not reported


class WorkerProgress:
    """Writes lines with the seconds since `start_time` (time.monotonic). Thread-safe."""

    def __init__(self, start_time: float):
        self._start_time, self._lock = start_time, Lock()  # reader threads report, too
        self._totals, self._reported_at = dict[str, int](), dict[str, float]()

    def __call__(self, line: str) -> None:
        with self._lock:
            self._write(line)

    def count_bytes(self, what: str, num_bytes: int) -> None:
        """Adds bytes to a total, and writes the total at most every SECONDS_BETWEEN."""
        with self._lock:
            self._totals[what] = self._totals.get(what, 0) + num_bytes
            now = time.monotonic()
            if now - self._reported_at.get(what, -SECONDS_BETWEEN) >= SECONDS_BETWEEN:
                self._reported_at[what] = now
                self._write(f"{what} {format_bytes(self._totals[what])} so far")

    def begin_variant(self, line: str) -> None:
        """Writes a line and resets all totals."""
        with self._lock:
            self._totals.clear()
            self._reported_at.clear()
            self._write(line)

    def _write(self, line: str) -> None:
        sys.stderr.write(f"{time.monotonic() - self._start_time:6.1f} s  {line}\n")
        sys.stderr.flush()


class ReportingDevice(ComputeDevice):
    """A device that reports large host buffers before it pins them, which takes about 1 s for 4 GiB."""

    def __init__(self, name: str, progress: WorkerProgress):
        super().__init__(name)
        self._progress = progress

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        if self.is_accelerator and num_bytes >= MIN_REPORTED_BYTES:
            self._progress.count_bytes("pinning", num_bytes)
        return super().host_buffer(num_bytes)
