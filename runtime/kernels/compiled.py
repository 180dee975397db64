"""How kernels are compiled, and kept on disk: at their first call, for the types of their arguments, and for all that
the processor has, or less where WEIGHTSTREAM_ISA asks for it, as on a host that has no more. Results may differ in last
bits between instruction sets, as between processors; numba's cache keeps each apart.

numba takes what it has kept while it is of the same version and the file that a kernel stands in is as it was. A kernel
is made of functions of other files too, so what is kept of ours is fresh only while all files of this package are.
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
from .arguments import ISA

# What a set lacks, by the beginning of LLVM's names. The last one lacks nothing.
MISSING = {"avx2": ("avx512", "avx10", "evex512", "amx"), "avx512": ("amx",), "amx": ()}
NEEDED = {"avx2": "avx2", "avx512": "avx512f", "amx": "amx-bf16"}


@cache
def features() -> dict[str, bool]:
    """What kernels may use, by LLVM's names. Raises ConfigError where WEIGHTSTREAM_ISA names nothing that is here."""
    found = cast(dict[str, bool], dict(binding.get_host_cpu_features()))
    wanted = os.environ.get(ISA)
    if wanted is None:
        return found
    if wanted not in MISSING:
        raise ConfigError(f"{ISA}={wanted} is unknown: known are {', '.join(MISSING)}")
    if not found.get(NEEDED[wanted]):
        raise ConfigError(f"{ISA}={wanted}: this processor has no {NEEDED[wanted]}; unset {ISA}")
    return {name: has and not name.startswith(MISSING[wanted]) for name, has in found.items()}


def has_fma_without_avx512() -> bool:
    """Whether the processor has AVX2's FMA, and none of AVX-512's registers."""
    return bool(features().get("avx2") and features().get("fma") and not features().get("avx512f"))


def _limit_to_isa() -> None:
    wanted = os.environ.get(ISA)
    if wanted is None or not MISSING.get(wanted):
        return
    taken = ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(features().items()))
    for name, value in (("CPU_NAME", binding.get_host_cpu_name()), ("CPU_FEATURES", taken)):
        setattr(config, name, value)


_limit_to_isa()


log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., object])

REORDERED = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; never nnan or ninf
FUSED = {"contract"}  # said, or a caller's permission to reorder would undo the rounding of `exp`
LOCK_TIMEOUT_SECONDS, LOCK_POLL_SECONDS = 120.0, 0.05  # for another process that compiles the same kernel
_LOCK, _PLACES = Lock(), "CACHE_LOCATOR_CLASSES"
_thread_state = local()


class KernelNotCached(Exception):
    """A kernel is not on disk, and nothing else was asked for."""


@contextmanager
def cached_kernels_only() -> Iterator[None]:
    """Has a call of a kernel that would be compiled raise NotKept, in its block and this thread."""
    _thread_state.cached_only = True
    try:
        yield
    finally:
        _thread_state.cached_only = False


class _CompilationNotice(event.Listener):
    """Says that kernels are being compiled, as it begins and once."""

    def __init__(self) -> None:
        self._was_logged, self.are_kept = False, True

    def on_start(self, event: event.Event) -> None:
        """Begins to compile a kernel, or a function that it is made of."""
        if getattr(_thread_state, "cached_only", False):
            raise KernelNotCached((event.data or {})["dispatcher"].py_func.__name__)
        self.log_once()

    def log_once(self) -> None:
        if not self._was_logged:
            self._was_logged = True
            later = "find them on disk" if self.are_kept else "do it again: no directory that can be written was found"
            log.info("compiling kernels for this processor, which takes some 15 s; later starts %s", later)

    def on_end(self, event: event.Event) -> None:
        """The end of a compilation is seen by what comes next."""


COMPILATION = _CompilationNotice()
event.register("numba:compile", COMPILATION)


def cached_kernel(function: Function) -> Function:
    """Compiled at its first call, in 2 to 4 s, and kept on disk, beside the source or in the user's cache. It lets go
    of the interpreter while it runs."""
    options = {"nogil": True, "fastmath": REORDERED, "error_model": "numpy"}
    compiled: Any = njit(**options)(function)
    try:
        with _cache_locators():
            compiled._cache = _LockedCache(function)
    except RuntimeError as error:
        COMPILATION.are_kept = False
        log.info("%s is compiled anew in each process, in 2 to 4 s: %s", function.__name__, error)
    return cast(Function, compiled)


class _LockedCache(FunctionCache):
    """What is kept of a kernel. Processes that begin together wait for the first of them to compile it, and take that
    from the disk. A lock goes with its process, however that ends; where the file system has none, or the first is
    slow, each compiles for itself."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)
        self._held: int | None = None  # the lock's descriptor

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Returns what is kept for a signature; where that is nothing, this process is to compile it."""
        try:
            found = super().load_overload(sig, target_context)
        except (AttributeError, ImportError):  # an index of other sources: it names a class of arguments that is gone
            self._cache_file.flush()
            found = None
        if found is None and self._held is None and not getattr(_thread_state, "cached_only", False):
            self._held = _acquire_lock(Path(self.cache_path) / f"{self._impl.filename_base}.lock")
            found = super().load_overload(sig, target_context)
            if found is not None:
                self._unlock()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """numba writes the index before the code that it names: code of other sources, under the same name, would be
        taken for this where a process ends in between."""
        try:
            if not self._cache_file._load_index():
                for old in Path(self.cache_path).glob(f"{glob.escape(self._impl.filename_base)}.*.nbc"):
                    old.unlink(missing_ok=True)
            super().save_overload(sig, data)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _acquire_lock(path: Path) -> int | None:
    """A descriptor that holds the lock of that name; None where it cannot be had."""
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
        except OSError:  # there are none on this file system
            break
    os.close(descriptor)
    return None


@cache
def package_digest() -> bytes:
    """SHA-256 of all files of this package."""
    digest, folder = hashlib.sha256(), Path(__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"\0{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.digest()


class _PackageStamp:
    def get_source_stamp(self) -> bytes:
        """What is kept under another one is compiled anew."""
        return package_digest()


class NumbaCacheDirLocator(_PackageStamp, UserProvidedCacheLocator):
    """The place that NUMBA_CACHE_DIR names."""


class SourceDirLocator(_PackageStamp, InTreeCacheLocator):
    """The place beside the source, `__pycache__`, where that can be written."""


class UserCacheLocator(_PackageStamp, UserWideCacheLocator):
    """A folder of the user's cache. What is kept is code: a folder into which others can write is passed over."""

    def __init__(self, py_func: Callable[..., object], py_file: str) -> None:
        super().__init__(py_func, py_file)
        self._folder = cache_root() / "kernels"
        self._cache_path = str(self._folder / self.get_suitable_cache_subpath(py_file))

    def ensure_cache_path(self) -> None:
        """Raises OSError where it cannot be used."""
        with suppress(FileExistsError):
            self._folder.mkdir(mode=stat.S_IRWXU, parents=True)
        if not is_private(self._folder):
            raise PermissionError(f"{self._folder} is not of this user alone: chmod 700")
        super().ensure_cache_path()


@contextmanager
def _cache_locators() -> Iterator[None]:
    """Lets numba know our places in their order; it knows its classes of places by name. A function is given one as it
    is decorated."""
    with _LOCK:
        before = getattr(config, _PLACES)
        places = (NumbaCacheDirLocator, SourceDirLocator, UserCacheLocator)
        setattr(config, _PLACES, ",".join(f"{__name__}.{place.__name__}" for place in places))
        try:
            yield
        finally:
            setattr(config, _PLACES, before)
