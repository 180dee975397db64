"""Locks on directories, and leases: files by which processes on one or several machines share work.

A lease file appears atomically, and its holder touches it every few seconds. It is stale if the holder's process on
this machine has ended, or if it was not touched for `seconds` by the observer's clock; clocks of two machines are never
compared. Leases only avoid duplicate work: if two processes do the same, the first published result counts.
"""

import fcntl
import json
import logging
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from runtime.closing import Closing
from runtime.errors import DamagedRunError, RunInUseError
from runtime.units import MIB

from .publishing import (
    TEMP_SUFFIX,
    JsonValue,
    UnexpectedFileError,
    canonical_json,
    output_error,
    read_json,
    read_regular_file,
    write_json,
)

LOG = logging.getLogger(__name__)
RENEWALS_PER_LEASE = 10
MAX_LEASE_BYTES = MIB
SLURM_IDS = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT")


class RunLock:
    """Lock on a run directory, held until `release` or the end of the process. `is_shared`: other shared holders are
    allowed. The file stays and names the last holder. On file systems without locks two processes may duplicate work,
    but not damage the run."""

    def __init__(self, path: Path, *, is_shared: bool = False) -> None:
        """Raises RunInUseError if another process holds the lock, DamagedRunError for a hard link or a file that is not
        regular, OSError if it cannot be written."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:  # the file is overwritten below
                raise DamagedRunError(f"{path} is a hard link or not a regular file: remove it")
            try:
                fcntl.flock(self._descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = "another process"
                with suppress(OSError, DamagedRunError):
                    holder = format_holder(read_json(path))
                raise RunInUseError(
                    f"run directory {path.parent} is in use by {holder}. Wait for that process or stop it, or choose "
                    f"another directory with run="
                ) from error
            except OSError as error:
                LOG.warning("%s: the file system does not support locks (%s): start one process per run", path, error)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, canonical_json({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def process_start_ticks(pid: int) -> int | None:
    """Start time of a running process in ticks since boot, which distinguishes reused pids; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *numbers = text.rpartition(")")[2].split()  # the name in parentheses may contain spaces
    return None if state in "ZX" else int(numbers[18])  # zombies have ended; field 22 of proc(5): starttime


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Identity of a process. `pid_namespace`: pids are comparable only within it. `slurm`: its Slurm ids."""

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int | None
    slurm: Mapping[str, str] = field(default_factory=dict)

    def has_ended(self, lease_holder: Mapping[str, JsonValue], start_ticks: Callable[[int], int | None]) -> bool:
        """True if the holder of a lease is known to have ended: this machine was rebooted, or has no such process."""
        if lease_holder.get("host") != self.host:
            return False
        if lease_holder.get("boot_id") != self.boot_id:
            return True
        pid = lease_holder.get("pid")
        if lease_holder.get("pid_namespace") != self.pid_namespace or not isinstance(pid, int):
            return False
        return start_ticks(pid) != lease_holder.get("start_ticks")


def this_process() -> Holder:
    """The identity of this process."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    try:
        boot, namespace = boot_id.read_text(encoding="ascii").strip(), str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # a unique namespace: other processes then judge by renewals only
        boot, namespace = "", secrets.token_hex(8)
    return Holder(
        host=socket.gethostname(),
        boot_id=boot,
        pid_namespace=namespace,
        pid=os.getpid(),
        start_ticks=process_start_ticks(os.getpid()),
        slurm={name: os.environ[name] for name in SLURM_IDS if name in os.environ},
    )


class Lease(NamedTuple):
    """Contents and modification time of a lease file. Equal values mean the same holder and no renewal in between."""

    data: bytes
    touched_ns: int

    @property
    def holder(self) -> Mapping[str, JsonValue]:
        """The holder named in the file; empty if it is damaged."""
        try:
            value = json.loads(self.data)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


def read_lease(path: Path) -> Lease | None:
    """Reads the lease at `path`; None without one. Raises UnexpectedFileError for symbolic links and files that are not
    regular, OSError."""
    try:
        data, status = read_regular_file(path, max_bytes=MAX_LEASE_BYTES, follow_links=False)
    except FileNotFoundError:
        return None
    return Lease(data, status.st_mtime_ns)


class Leases(Closing):
    """The leases of this process in one folder. Closing releases all of them. `clock`: monotonic seconds.
    `has_renewal_thread`: False in tests, which call `renew`."""

    def __init__(
        self,
        folder: Path,
        seconds: float,
        *,
        holder: Holder | None = None,
        clock: Callable[[], float] = time.monotonic,
        start_ticks: Callable[[int], int | None] = process_start_ticks,
        has_renewal_thread: bool = True,
    ):
        self._folder, self._seconds, self._clock, self._start_ticks = folder, seconds, clock, start_ticks
        self._holder = holder or this_process()
        self._held: dict[str, tuple[int, bytes]] = {}  # descriptor and contents of the file
        self._observed: dict[str, tuple[Lease, float]] = {}  # leases of others, and when each was first read
        self._mutex, self._close_event = threading.Lock(), threading.Event()  # the mutex guards `_held`
        self._thread: threading.Thread | None = None
        if has_renewal_thread:
            self._thread = threading.Thread(target=self._renew_loop, name="leases", daemon=True)
            self._thread.start()

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def acquire(self, name: str) -> bool:
        """Takes the lease if it is free or stale. Returns True if this process now holds it; atomic between processes.
        Raises DamagedRunError if `path` is not a readable regular file, OutputError."""
        path = self.path(name)
        try:
            if (lease := read_lease(path)) is not None:
                if not self._is_stale(name, lease) or not _remove_lease(path, lease.data, lease.touched_ns):
                    return False
                LOG.info("lease %s of %s is stale: taking it over", name, format_holder(lease.holder))
            return self._create(name)
        except UnexpectedFileError as error:
            raise DamagedRunError(f"{error}; expected a lease file: remove it, all workers wait for it") from error
        except OSError as error:
            raise output_error(path, error) from error

    def renew(self) -> list[str]:
        """Renews the held leases. Returns the names of those that another process has taken over. Raises OSError."""
        lost = []
        with self._mutex:
            for name, (descriptor, data) in self._held.items():
                os.utime(descriptor)  # by descriptor: never renews the lease of a process that took over the path
                try:
                    lease = read_lease(self.path(name))
                except UnexpectedFileError:  # replaced by another file
                    lease = None
                if lease is None or lease.data != data:
                    lost.append(name)
        return lost

    def release(self, name: str) -> None:
        """Removes the lease if this process still holds it. If that fails, it becomes stale."""
        with self._mutex:
            descriptor, data = self._held.pop(name)
        os.close(descriptor)
        try:
            _remove_lease(self.path(name), data)
        except OSError as error:
            LOG.warning("lease %s cannot be removed and will become stale: %s", name, error)

    def close(self) -> None:
        self._close_event.set()
        if self._thread is not None:
            self._thread.join()  # before the descriptors are closed
        for name in list(self._held):
            self.release(name)

    def _create(self, name: str) -> bool:
        """Creates and opens the lease file. Returns False if another process created it first or has replaced it."""
        token = secrets.token_hex(8)
        value: dict[str, JsonValue] = {**asdict(self._holder), "lease": token, "since": time.time()}
        self._observed.pop(name, None)
        if not write_json(self.path(name), value, exclusive=True):
            return False
        try:
            descriptor = os.open(self.path(name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        if token.encode() not in data:  # race: replaced between creation and opening
            os.close(descriptor)
            return False
        with self._mutex:
            self._held[name] = descriptor, data
        return True

    def _is_stale(self, name: str, lease: Lease) -> bool:
        if self._holder.has_ended(lease.holder, self._start_ticks):
            return True
        last_lease, since = self._observed.get(name, (None, 0.0))
        if last_lease != lease:
            self._observed[name] = lease, self._clock()
            return False
        return self._clock() - since >= self._seconds  # only this process's clock, never the file's time

    def _renew_loop(self) -> None:
        lost = set[str]()
        while not self._close_event.wait(self._seconds / RENEWALS_PER_LEASE):
            try:
                now_lost = {*self.renew()}
            except OSError as error:  # may be temporary
                LOG.warning("leases cannot be renewed: %s", error)
                continue
            for name in now_lost - lost:
                LOG.warning("lease %s was taken over by another worker: the first published result counts", name)
            lost = now_lost


def format_holder(holder: Mapping[str, JsonValue]) -> str:
    return f"pid {holder.get('pid')} on host {json.dumps(holder.get('host'))}"


def _remove_lease(path: Path, data: bytes, touched_ns: int | None = None) -> bool:
    """Removes the lease file if it is still the one that was read; of several callers one succeeds. Raises OSError."""
    renamed = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMP_SUFFIX}")
    try:
        path.rename(renamed)  # atomic: only one process gets the file. Checking first and then unlinking would race
    except FileNotFoundError:
        return False
    lease = read_lease(renamed)
    is_expected = lease is not None and lease.data == data and touched_ns in (None, lease.touched_ns)
    if not is_expected:
        # Put a renewed or new lease back, without replacing a newer one. If that fails its holder loses it: harmless.
        with suppress(FileExistsError, FileNotFoundError):
            os.link(renamed, path)
    renamed.unlink(missing_ok=True)
    return is_expected
