"""Compiles the model's CPU kernels on the first start on a host, into a cache on disk. Compiles in subprocesses, since
numba's lock allows one compilation per process. It imports torch in functions, to keep the subprocesses small."""

import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from ..closing import Closing
from ..errors import Interrupted
from ..kernels.compiler import can_compile, disable_kernels, enable_kernels, kernels_enabled
from ..plan.shape.model import ModelShape
from ..stream.host_memory import available_bytes
from ..units import MIB

log = logging.getLogger(__name__)

COMPILING_SECONDS = 8.0  # upper bound, on a processor of 2024 with one process per kernel set
PROCESS_BYTES = 512 * MIB  # of one subprocess: torch, numba, LLVM
POLL_SECONDS = 0.02
LOG_SECONDS = 10.0  # between log lines while kernels are compiled
TIMEOUT_SECONDS = 300.0  # then this process compiles instead
# bfloat16 weight bytes per second in plain operators: with one token, and (times tokens) in batches of 16 or more.
# Two cores of an AMD EPYC (AVX-512) reach 2.8e9 and 42e9.
ONE_TOKEN_BYTES_PER_SECOND, BATCH_BYTES_PER_SECOND = 2.5e9, 40e9
MIN_BYTES = 4 * MIB  # lower bound per token, for the operators between products
MIN_TOKENS = 64  # a short prompt and its answer
HOST_OPS = "host_ops"  # compiled in this process in 0.5 s: a subprocess needs 4 s of imports


class KernelSet(NamedTuple):
    """A set of kernels, identified by kind, dtypes and storage formats."""

    kind: str
    dtype: str  # of the inputs
    stored: tuple[str, ...] = ()  # dtypes of weights or KV pages
    formats: tuple[str, ...] = ()  # of quantized weights


def prepare_kernels(kernels: KernelSet) -> None:
    """Loads the kernels from the cache, or compiles them."""
    import torch

    dtype = getattr(torch, kernels.dtype)
    match kernels.kind:
        case "attention":
            from ..attention.host_attention import prepare_decode_attention

            prepare_decode_attention(dtype)
        case "quantized_attention":
            from ..attention.host_attention import prepare_decode_quantized
            from ..config.settings import KVDType

            prepare_decode_quantized(KVDType(kernels.stored[0]), dtype)
        case "products":
            from ..linear.backends import prepare_products

            prepare_products([getattr(torch, name) for name in kernels.stored], set(kernels.formats), dtype)
        case _:
            from ..model.fused_ops import prepare_host_ops

            prepare_host_ops(dtype)


def estimate_plain_seconds(shape: ModelShape, tokens: Sequence[int]) -> float:
    """Estimated seconds for sequences of these lengths, batched, in plain torch operators."""
    sizes = (math.prod(parameter.shape) for stage in shape.stages for parameter in stage.parameters)
    num_bytes = max(2 * sum(sizes), MIN_BYTES)
    return num_bytes * (max(tokens, default=0) / ONE_TOKEN_BYTES_PER_SECOND + sum(tokens) / BATCH_BYTES_PER_SECOND)


class CompiledKernels(Closing):
    """The kernels of a model; cached ones are loaded at construction. Until the others are compiled, a session either
    waits (`wait`) or uses plain operators (`use_plain_operators`)."""

    def __init__(self, kernel_sets: Collection[KernelSet]):
        self._processes: list[subprocess.Popen[bytes]] = []
        self._plain_seconds, self.are_disabled = 0.0, False
        with kernels_enabled():
            self._missing = [kernels for kernels in kernel_sets if can_compile() and not _load_if_cached(kernels)]

    @property
    def are_ready(self) -> bool:
        return not self._missing

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes.clear()

    def begin(self) -> None:
        """Starts the compiling subprocesses. They exit with this process, as their standard input closes."""
        shares = _split_work([kernels for kernels in self._missing if kernels.kind != HOST_OPS])
        if self._processes or not shares:
            return
        from ..kernels.compiled import COMPILATION

        COMPILATION.log_once()
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        for share in shares:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, json.dumps(share)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # Ctrl-C must reach only this process, which then ends the subprocess
                )
            except OSError as error:
                log.debug("kernels are compiled by this process: %s", error)
                return
            self._processes.append(process)

    def use_plain_operators(self, seconds: float) -> bool:
        """Disables compiled kernels for a session that would end before they are compiled. Returns True if it did.
        `seconds`: estimate for the session in plain operators."""
        if self.are_ready or self._processes or self._plain_seconds + seconds > COMPILING_SECONDS:
            return False
        if not disable_kernels():
            return False
        if not self.are_disabled:
            log.info("kernels for this model are not compiled yet; using plain torch operators, as the run is short")
        self._plain_seconds, self.are_disabled = self._plain_seconds + seconds, True
        return True

    def wait(self, should_stop: Callable[[], bool]) -> None:
        """Compiles the missing kernels or waits for the subprocesses, then loads all. Raises Interrupted."""
        self.begin()
        if self._processes:
            with kernels_enabled():
                for kernels in self._missing:
                    if kernels.kind == HOST_OPS:
                        prepare_kernels(kernels)  # while the subprocesses compile
        begin = logged_at = time.monotonic()
        while num_running := sum(process.poll() is None for process in self._processes):
            now = time.monotonic()
            if should_stop() or now >= begin + TIMEOUT_SECONDS:
                break
            if now >= logged_at + LOG_SECONDS:
                logged_at, num_processes = now, len(self._processes)
                num_done = num_processes - num_running
                log.info("compiling kernels: %.0f s, %d of %d processes done", now - begin, num_done, num_processes)
            time.sleep(POLL_SECONDS)
        self.close()
        if should_stop():
            raise Interrupted("stopped while kernels were compiled; nothing was generated")
        enable_kernels()
        self.are_disabled = False
        for kernels in self._missing:
            prepare_kernels(kernels)
        self._missing = []


def _load_if_cached(kernels: KernelSet) -> bool:
    """Loads kernels if they are cached on disk. Returns True if they are."""
    import torch

    from ..kernels.compiled import KernelNotCached, cached_kernels_only

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # preparing calls each kernel once; do not start a thread team for it
    try:
        with cached_kernels_only():
            prepare_kernels(kernels)
        return True
    except KernelNotCached:
        return False
    finally:
        torch.set_num_threads(num_threads)


def _split_work(kernel_sets: Sequence[KernelSet]) -> list[Sequence[KernelSet]]:
    """The kernels that each subprocess compiles. Empty if results cannot be cached or memory is short."""
    from ..kernels.compiled import COMPILATION

    if not kernel_sets or not COMPILATION.are_cached or not sys.executable:
        return []
    num_processes = min(len(kernel_sets), len(os.sched_getaffinity(0)), available_bytes() // (2 * PROCESS_BYTES))
    return [kernel_sets[first::num_processes] for first in range(num_processes)]


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    Thread(target=_end_with_parent, daemon=True).start()
    for values in json.loads(sys.argv[1]):
        prepare_kernels(KernelSet(*values))
    os._exit(0)
