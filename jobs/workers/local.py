"""Workers started by one command: one per device or NUMA node, each with its share of threads and host memory. They
share the weights in host memory. The parent process only forwards signals and waits."""

import ctypes
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple

import torch

from runtime.errors import ConfigError, InternalError, Interrupted
from runtime.planning.budgets import usable_host_bytes
from runtime.stream.device import choose_device
from runtime.stream.shared_weights import SharedWeights, new_shared_memory
from runtime.units import GIB, format_bytes, format_count

from ..config.process import WORKER_VARIABLE
from ..config.settings import RunSettings
from ..config.signals import StopFlag

SYSFS = Path("/sys/devices/system")


def processors_by_node(system: Path = SYSFS, allowed: Collection[int] | None = None) -> list[list[int]]:
    """Processors of each NUMA node, hyperthreads of a core adjacent; one node if the kernel lists none. `allowed`:
    usable processors; None: this process's affinity."""
    allowed = allowed if allowed is not None else os.sched_getaffinity(0)
    listed = [_parse_ranges(path) for path in sorted(system.glob("node/node[0-9]*/cpulist"))]

    def sort_key(number: int) -> tuple[int, int]:
        siblings = _parse_ranges(system / f"cpu/cpu{number}/topology/thread_siblings_list")
        return min(siblings, default=number), number

    nodes = [sorted(set(node) & set(allowed), key=sort_key) for node in listed]
    return [node for node in nodes if node] or [sorted(allowed)]


def split_processors(nodes: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    """Splits the processors into `count` shares: one per node if the counts match, otherwise contiguous ranges. A share
    without processors gets all of them."""
    if count == len(nodes):
        return list(nodes)
    flat = [number for node in nodes for number in node]
    bounds = [len(flat) * share // count for share in range(count + 1)]
    return [flat[begin:end] or flat for begin, end in pairwise(bounds)]


def _parse_ranges(path: Path) -> list[int]:
    """Parses a list such as `0-3,8`; empty if the file is missing."""
    try:
        ranges = [part.partition("-") for part in path.read_text().strip().split(",") if part]
    except OSError:
        return []
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


log = logging.getLogger(__name__)
FINISHED_EXIT_CODES = (0, 3)  # 3: some rows have an error
FAILURE_EXIT_CODES = (InternalError.exit_code, 4, 2, Interrupted.exit_code)  # worst first
POLL_SECONDS = 0.1
PR_SET_PDEATHSIG = 1


def should_start_workers(config: RunSettings, arguments: Sequence[str]) -> bool:
    """True if this process, with these command-line `arguments`, should start workers. Raises ConfigError."""
    if config.num_workers == 1 or WORKER_VARIABLE in os.environ:
        return False
    if {"--multirun", "-m"} & {*arguments}:
        raise ConfigError(
            f"num_workers={config.num_workers} does not work with --multirun: start a command for each run"
        )
    return True


@contextmanager
def shared_weights() -> Iterator[SharedWeights | None]:
    """Context manager: the weights that workers share; None if this process is not a worker. A worker gets SIGTERM when
    its parent ends."""
    if WORKER_VARIABLE not in os.environ:
        yield None
        return
    descriptor, num_workers, parent_pid = map(int, os.environ[WORKER_VARIABLE].split())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent_pid:  # race: the parent ended before prctl took effect, so no signal will come
        raise Interrupted("the process that started this worker has ended; start the same command again to resume")
    with SharedWeights(descriptor, num_workers) as shared:
        yield shared


@dataclass(frozen=True, kw_only=True)
class WorkerShare:
    """A worker's share of the machine."""

    processors: Collection[int]
    host_memory_gib: float
    device: str | None
    num_threads: int | None
    metrics_file: Path | None = None

    @property
    def settings(self) -> list[str]:
        """The share as overrides for the worker's command line."""
        return [
            f"offload.host_memory_gib={self.host_memory_gib:.6f}",
            *([] if self.device is None else [f"machine.device={self.device}"]),
            *([] if self.num_threads is None else [f"machine.num_threads={self.num_threads}"]),
            *([] if self.metrics_file is None else [f"metrics_file={self.metrics_file}"]),
        ]


def machine_shares(
    config: RunSettings, device: torch.device, nodes: Sequence[Sequence[int]], num_devices: int
) -> list[WorkerShare]:
    """The share of each worker. Raises ConfigError for more workers than devices."""
    is_cpu, num_workers = device.type == "cpu", config.num_workers
    count = num_workers or (len(nodes) if is_cpu else num_devices)
    if not is_cpu and count > num_devices:
        raise ConfigError(
            f"num_workers={count}: torch finds {num_devices} {device.type} devices; each worker needs one"
        )
    gib = config.offload.host_memory_gib or usable_host_bytes(is_pinned=not is_cpu) / GIB
    threads = config.machine.num_threads
    metrics_file = Path(config.metrics_file) if config.metrics_file is not None else None
    return [
        WorkerShare(
            processors=processors,
            host_memory_gib=round(gib / count, 6),
            device=None if is_cpu else f"{device.type}:{number}",
            num_threads=None if threads is None else max(1, threads // count),
            metrics_file=metrics_file and metrics_file.with_stem(f"{metrics_file.stem}-{number}"),
        )
        for number, processors in enumerate(split_processors(nodes, count))
    ]


class WorkersResult(NamedTuple):
    """Combined result of all workers: exit code, and text that is still to be printed to stdout and stderr."""

    code: int
    output: str
    error: str


class _WorkerProcess:
    """A worker process. The first one writes to the terminal, the others to temporary files."""

    def __init__(self, number: int, command: Sequence[str], share: WorkerShare, descriptor: int, num_workers: int):
        self.number = number
        self.output: IO[bytes] | None = tempfile.TemporaryFile() if number else None  # noqa: SIM115 - closed at the end
        self.errors: IO[bytes] | None = tempfile.TemporaryFile() if number else None  # noqa: SIM115
        affinity = os.sched_getaffinity(0)
        os.sched_setaffinity(0, share.processors)  # the child inherits it
        try:
            self.process = subprocess.Popen(
                [*command, *share.settings, *(["log_level=warning"] if number else [])],
                env={**os.environ, WORKER_VARIABLE: f"{descriptor} {num_workers} {os.getpid()}"},
                pass_fds=(descriptor,),
                stdout=self.output,
                stderr=self.errors,
            )
        finally:
            os.sched_setaffinity(0, affinity)

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def exit_description(self) -> str:
        code = self.process.returncode
        if code >= 0:
            return f"worker {self.number} ended with exit code {code}"
        return f"worker {self.number} (pid {self.process.pid}) was killed by {signal.Signals(-code).name}"

    def close(self) -> None:
        for file in (self.output, self.errors):
            if file is not None:
                file.close()


def supervise_workers(config: RunSettings, arguments: Sequence[str], command: Sequence[str]) -> WorkersResult | None:
    """Runs the job in worker processes started by `command`; None if this process should run it. Raises ConfigError."""
    if not should_start_workers(config, arguments):
        return None
    with StopFlag() as stop:
        return run_workers(config, command, stop)


def run_workers(config: RunSettings, command: Sequence[str], stop: StopFlag) -> WorkersResult:
    """Starts the workers and waits until all have ended. The others take over the blocks of a killed worker. Raises
    ConfigError."""
    device = choose_device(config.machine.device)
    num_devices = 0 if device.type == "cpu" else torch.accelerator.device_count()
    worker_shares = machine_shares(config, device, processors_by_node(), num_devices)
    descriptor = new_shared_memory()
    workers: list[_WorkerProcess] = []
    try:
        for number, share in enumerate(worker_shares):
            workers.append(_WorkerProcess(number, command, share, descriptor, len(worker_shares)))
        gib = sum(share.host_memory_gib for share in worker_shares)
        log.info(
            "%d workers share this machine: %s each, %s of host memory in total",
            len(worker_shares),
            format_count(len(worker_shares[0].processors), "processor"),
            format_bytes(int(gib * GIB)),
        )
        _wait_for_exit(workers, stop)
        return _combine_results(workers)
    finally:
        for worker in workers:
            worker.process.kill()  # after an error, no worker may stay behind
            worker.close()
        os.close(descriptor)


def _wait_for_exit(workers: Sequence[_WorkerProcess], stop: StopFlag) -> None:
    """Waits for all workers; forwards a stop signal once."""
    running, has_forwarded = list(workers), False
    while running:
        if stop.requested and not has_forwarded:
            has_forwarded = True
            for worker in running:
                worker.process.send_signal(signal.Signals[stop.signal_name])
        for worker in [worker for worker in running if worker.code is not None]:
            running.remove(worker)
            if worker.process.returncode < 0 and running:
                log.warning("%s: the other workers take over its blocks", worker.exit_description)
        time.sleep(POLL_SECONDS)


def _combine_results(workers: Sequence[_WorkerProcess]) -> WorkersResult:
    finished = [worker for worker in workers if worker.code in FINISHED_EXIT_CODES]
    if finished:
        code = max(worker.process.returncode for worker in finished)
        return WorkersResult(code=code, output=_read_text(finished[0].output).strip(), error="")
    classified = [worker for worker in workers if worker.code in FAILURE_EXIT_CODES]
    if not classified:
        has_crashed = any(worker.process.returncode > 0 for worker in workers)
        code = InternalError.exit_code if has_crashed else Interrupted.exit_code
        return WorkersResult(
            code=code,
            output="",
            error=f"interrupted: {workers[0].exit_description}; start the same command again to resume",
        )
    worst = min(classified, key=lambda worker: FAILURE_EXIT_CODES.index(worker.process.returncode))
    return WorkersResult(
        code=worst.process.returncode, output="", error=_read_text(worst.errors).strip().rpartition("\n")[2]
    )


def _read_text(file: IO[bytes] | None) -> str:
    if file is None:
        return ""
    file.seek(0)
    return file.read().decode(errors="replace")
