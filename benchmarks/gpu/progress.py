"""What the worker of `suite=gpu` says on stderr while it works: on a lent machine these lines are what is left of a
measurement that did not come to its end."""

import sys
import time
from threading import Lock

import torch

from runtime.stream.device import ComputeDevice
from runtime.units import MIB, format_bytes

SECONDS_BETWEEN = 5.0  # of two lines on the same amount
MIN_REPORTED_BYTES = 64 * MIB  # to pin less is not told


class WorkerProgress:
    """Lines with the seconds since `begun`, in `time.monotonic`'s time. Thread-safe."""

    def __init__(self, begun: float):
        self._begun, self._lock = begun, Lock()
        self._done, self._told = dict[str, int](), dict[str, float]()

    def __call__(self, line: str) -> None:
        with self._lock:
            self._write(line)

    def count_bytes(self, what: str, num_bytes: int) -> None:
        """Tells of bytes as they are done: at once of the first, then now and then of all so far."""
        with self._lock:
            self._done[what] = self._done.get(what, 0) + num_bytes
            now = time.monotonic()
            if now - self._told.get(what, -SECONDS_BETWEEN) >= SECONDS_BETWEEN:
                self._told[what] = now
                self._write(f"{what} {format_bytes(self._done[what])} so far")

    def begin_variant(self, line: str) -> None:
        """Says a line from which on amounts are counted anew."""
        with self._lock:
            self._done.clear()
            self._told.clear()
            self._write(line)

    def _write(self, line: str) -> None:
        sys.stderr.write(f"{time.monotonic() - self._begun:6.1f} s  {line}\n")
        sys.stderr.flush()


class ReportingDevice(ComputeDevice):
    """Tells of large host memory before it is pinned, which takes a second for each 4 GiB or so."""

    def __init__(self, name: str, progress: WorkerProgress):
        super().__init__(name)
        self._progress = progress

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        if self.is_accelerator and num_bytes >= MIN_REPORTED_BYTES:
            self._progress.count_bytes("pinning", num_bytes)
        return super().host_buffer(num_bytes)
