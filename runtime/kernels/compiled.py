"""Compiles kernels with numba at their first call and caches them on disk. They use this processor's instruction set,
or a smaller one that WEIGHTSTREAM_ISA names. Numba caches each instruction set separately; results of two sets may
differ in the last bits.

Numba checks only the kernel's own file for changes, but kernels call functions of several files. Here, cached code is
valid only while all files of this package are unchanged (`package_digest`).
"""

import glob
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import cache
from pathlib import Path
from threading import Lock, local
from typing import Any, TypeVar, cast

from llvmlite import binding
from numba import config, njit
from numba.core import event
from numba.core.caching import FunctionCache, InTreeCacheLocator, UserProvidedCacheLocator, UserWideCacheLocator

from ..cache_root import cache_root, is_private
from ..errors import ConfigError
from .arguments import ISA_VARIABLE

# By value of WEIGHTSTREAM_ISA: prefixes of LLVM feature names that kernels must not use, and the feature they need.
EXCLUDED_FEATURES = {"avx2": ("avx512", "avx10", "evex512", "amx"), "avx512": ("amx",), "amx": ()}
REQUIRED_FEATURE = {"avx2": "avx2", "avx512": "avx512f", "amx": "amx-bf16"}


@cache
def features() -> dict[str, bool]:
    """Returns, by LLVM name, whether kernels may use a CPU feature. Raises ConfigError if WEIGHTSTREAM_ISA is unknown
    or not supported by this processor."""
    detected = cast(dict[str, bool], dict(binding.get_host_cpu_features()))
    isa = os.environ.get(ISA_VARIABLE)
    if isa is None:
        return detected
    if isa not in EXCLUDED_FEATURES:
        raise ConfigError(f"{ISA_VARIABLE}={isa} is unknown; can be {', '.join(EXCLUDED_FEATURES)}")
    if not detected.get(REQUIRED_FEATURE[isa]):
        raise ConfigError(f"{ISA_VARIABLE}={isa}: this processor has no {REQUIRED_FEATURE[isa]}; unset {ISA_VARIABLE}")
    return {name: has and not name.startswith(EXCLUDED_FEATURES[isa]) for name, has in detected.items()}


def has_fma_without_avx512() -> bool:
    """True if kernels may use FMA with AVX2 but not AVX-512."""
    return bool(features().get("avx2") and features().get("fma") and not features().get("avx512f"))


def _limit_to_isa() -> None:
    """Makes numba compile for the instruction set of WEIGHTSTREAM_ISA, if it is set. Otherwise numba detects it."""
    isa = os.environ.get(ISA_VARIABLE)
    if isa is None or not EXCLUDED_FEATURES.get(isa):
        return
    feature_list = ",".join(f"{'+' if is_present else '-'}{name}" for name, is_present in sorted(features().items()))
    for name, value in (("CPU_NAME", binding.get_host_cpu_name()), ("CPU_FEATURES", feature_list)):
        setattr(config, name, value)


_limit_to_isa()  # before any kernel is compiled
log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., object])

# LLVM's fast-math flags. REORDERED allows sums in any order. Neither has nnan or ninf: inputs may be NaN or infinite.
# FUSED allows only fused multiply-adds, also where it is inlined into REORDERED code: reordering would break `exp`.
REORDERED, FUSED = {"reassoc", "contract", "nsz", "arcp"}, {"contract"}
LOCK_TIMEOUT_SECONDS, LOCK_POLL_SECONDS = 120.0, 0.05  # wait for another process that compiles the same kernel
_LOCK, _LOCATORS = Lock(), "CACHE_LOCATOR_CLASSES"  # numba's setting with the names of cache locators, and its lock
_thread_state = local()  # `cached_only`: True inside `cached_kernels_only`


class KernelNotCached(Exception):
    """Raised inside `cached_kernels_only` for a kernel that is not on disk."""


@contextmanager
def cached_kernels_only() -> Iterator[None]:
    """Makes kernels that are not cached on disk raise KernelNotCached instead of compiling, inside the `with` block and
    in this thread."""
    _thread_state.cached_only = True
    try:
        yield
    finally:
        _thread_state.cached_only = False


class _CompilationNotice(event.Listener):
    """Listens to numba's compilations: logs the first one of a process, and forbids all in `cached_kernels_only`."""

    def __init__(self) -> None:
        self._was_logged, self.are_cached = False, True  # `are_cached`: a cache directory is writable

    def on_start(self, event: event.Event) -> None:
        """Runs before a kernel, or a function that it calls, is compiled. Raises KernelNotCached where compiling is
        forbidden."""
        if getattr(_thread_state, "cached_only", False):
            raise KernelNotCached((event.data or {})["dispatcher"].py_func.__name__)
        self.log_once()

    def log_once(self) -> None:
        if not self._was_logged:
            self._was_logged = True
            later = "they are cached for later runs" if self.are_cached else "not cached: no writable cache directory"
            log.info("compiling kernels for this processor, about 15 s; %s", later)

    def on_end(self, event: event.Event) -> None:
        """Does nothing; required by the listener interface."""


COMPILATION = _CompilationNotice()
event.register("numba:compile", COMPILATION)


def cached_kernel(function: Function) -> Function:
    """Decorates a kernel: it is compiled at its first call, in 2 to 4 s, or loaded from disk, and runs without the
    GIL."""
    options = {"nogil": True, "fastmath": REORDERED, "error_model": "numpy"}
    compiled: Any = njit(**options)(function)
    try:
        with _cache_locators():
            compiled._cache = _LockedCache(function)
    except RuntimeError as error:
        COMPILATION.are_cached = False
        log.info("kernel %s is not cached and compiles in each process, in 2 to 4 s: %s", function.__name__, error)
    return cast(Function, compiled)


class _LockedCache(FunctionCache):
    """A kernel's disk cache with a file lock: one process compiles, others wait and load the result. The operating
    system releases the lock when the process ends. If the file system has no locks, or after a timeout, each process
    compiles."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)
        self._lock_fd: int | None = None  # open while this process compiles

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Returns cached code for a signature. Returns None after taking the lock if there is none; numba then compiles
        and calls `save_overload`."""
        try:
            code = super().load_overload(sig, target_context)
        except (AttributeError, ImportError):  # the index was written by older sources: an argument class was removed
            self._cache_file.flush()
            code = None
        if code is None and self._lock_fd is None and not getattr(_thread_state, "cached_only", False):
            self._lock_fd = _acquire_lock(Path(self.cache_path) / f"{self._impl.filename_base}.lock")
            code = super().load_overload(sig, target_context)  # another process may have compiled it meanwhile
            if code is not None:
                self._unlock()
        return code

    def save_overload(self, sig: Any, data: Any) -> None:
        """Saves compiled code and releases the lock."""
        try:
            # Numba writes its index before the code file. After a crash between the two, the index must not refer to a
            # code file of older sources: delete such files before an index gets its first entry.
            if not self._cache_file._load_index():
                for old in Path(self.cache_path).glob(f"{glob.escape(self._impl.filename_base)}.*.nbc"):
                    old.unlink(missing_ok=True)
            super().save_overload(sig, data)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _acquire_lock(path: Path) -> int | None:
    """Returns a file descriptor that holds the lock until it is closed. Returns None if the file system has no locks,
    or after the timeout."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR)
    except OSError:
        return None
    end = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while True:
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= end:
                break
            time.sleep(LOCK_POLL_SECONDS)
        except OSError:  # no locks on this file system
            break
    os.close(descriptor)
    return None


@cache
def package_digest() -> bytes:
    """SHA-256 of all source files of this package."""
    digest, folder = hashlib.sha256(), Path(__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"\0{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.digest()


class _PackageStamp:
    """A part of numba's cache locators: code is valid while the package's digest is the same."""

    def get_source_stamp(self) -> bytes:
        """Returns the stamp to compare with that of cached code; if they differ, numba recompiles."""
        return package_digest()


class NumbaCacheDirLocator(_PackageStamp, UserProvidedCacheLocator):
    """The cache directory named by NUMBA_CACHE_DIR."""


class SourceDirLocator(_PackageStamp, InTreeCacheLocator):
    """The source's `__pycache__` directory, if it is writable."""


class UserCacheLocator(_PackageStamp, UserWideCacheLocator):
    """A directory in the user's cache. It must be private (mode 700), because cached code is executed."""

    def __init__(self, py_func: Callable[..., object], py_file: str) -> None:
        super().__init__(py_func, py_file)
        self._folder = cache_root() / "kernels"
        self._cache_path = str(self._folder / self.get_suitable_cache_subpath(py_file))

    def ensure_cache_path(self) -> None:
        """Creates the directory. Raises OSError if others can write to it."""
        with suppress(FileExistsError):
            self._folder.mkdir(mode=stat.S_IRWXU, parents=True)
        if not is_private(self._folder):
            raise PermissionError(f"{self._folder} is accessible to other users: run chmod 700 on it")
        super().ensure_cache_path()


@contextmanager
def _cache_locators() -> Iterator[None]:
    """Makes numba try the three locators of this module, in order, for functions decorated inside the `with` block."""
    with _LOCK:  # the class names are a global setting of numba
        before = getattr(config, _LOCATORS)
        locators = (NumbaCacheDirLocator, SourceDirLocator, UserCacheLocator)
        setattr(config, _LOCATORS, ",".join(f"{__name__}.{locator.__name__}" for locator in locators))
        try:
            yield
        finally:
            setattr(config, _LOCATORS, before)
