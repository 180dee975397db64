"""How kernels are compiled, and kept on disk: at their first call, for the types of their arguments.

numba takes what it has kept while it is of the same version and the file that a kernel stands in is as it was. A kernel
is made of functions of other files too, so what is kept of ours is fresh only while all files of this package are.
"""

import hashlib
import logging
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TypeVar, cast

from numba import config, njit
from numba.core import event
from numba.core.caching import InTreeCacheLocator, UserProvidedCacheLocator, UserWideCacheLocator

from ..cache_root import cache_root, is_private

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., object])

REORDERED = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; never nnan or ninf
FUSED = {"contract"}  # said, or a caller's permission to reorder would undo the rounding of `exp`
_LOCK, _PLACES = Lock(), "CACHE_LOCATOR_CLASSES"


class _FirstCompilation(event.Listener):
    """Says that kernels are being compiled, as it begins and once: nothing else happens in that time."""

    def __init__(self) -> None:
        self._was_said, self.are_kept = False, True

    def on_start(self, event: event.Event) -> None:
        if not self._was_said:
            self._was_said = True
            later = "find them on disk" if self.are_kept else "do it again: no directory that can be written was found"
            log.info("compiling kernels for this processor, which takes some 15 s; later starts %s", later)

    def on_end(self, event: event.Event) -> None:
        """The end of a compilation is seen by what comes next."""


_COMPILATION = _FirstCompilation()
event.register("numba:compile", _COMPILATION)


def kept(function: Function) -> Function:
    """Compiled at its first call, in 2 to 4 s, and kept on disk, beside the source or in the user's cache. It lets go
    of the interpreter while it runs."""
    options = {"nogil": True, "fastmath": REORDERED, "error_model": "numpy"}
    try:
        with _our_places():
            return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError as error:
        _COMPILATION.are_kept = False
        log.info("%s is compiled anew in each process, in 2 to 4 s: %s", function.__name__, error)
        return cast(Function, njit(**options)(function))


@cache
def parts_digest() -> bytes:
    """SHA-256 of all files of this package."""
    digest, folder = hashlib.sha256(), Path(__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"\0{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.digest()


class _OfAllParts:
    def get_source_stamp(self) -> bytes:
        """What is kept under another one is compiled anew."""
        return parts_digest()


class WhereTheUserSays(_OfAllParts, UserProvidedCacheLocator):
    """The place that NUMBA_CACHE_DIR names."""


class BesideTheSource(_OfAllParts, InTreeCacheLocator):
    """The place beside the source, `__pycache__`, where that can be written."""


class InTheUsersCache(_OfAllParts, UserWideCacheLocator):
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
def _our_places() -> Iterator[None]:
    """Lets numba know our places in their order; it knows its classes of places by name. A function is given one as it
    is decorated."""
    with _LOCK:
        before = getattr(config, _PLACES)
        places = (WhereTheUserSays, BesideTheSource, InTheUsersCache)
        setattr(config, _PLACES, ",".join(f"{__name__}.{place.__name__}" for place in places))
        try:
            yield
        finally:
            setattr(config, _PLACES, before)
