"""What the kernels that others call have in common: compiled for the types of their arguments, and kept on disk.

numba's cache looks only at the time of change of the file that a kernel stands in. So each `*_kernel.py` holds the
digest of the other files of this package, which a test compares: who edits those edits that line, and numba compiles
anew.
"""

import logging
from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

from .numerics import REORDERED

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., object])


def kept(function: Function) -> Function:
    """Compiled at its first call, in 2 to 4 s, and kept on disk, beside the source or in the user's cache. It lets go
    of the interpreter while it runs."""
    options = {"nogil": True, "fastmath": REORDERED, "error_model": "numpy"}
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError as error:
        log.info("%s is compiled anew in each process, in 2 to 4 s: %s", function.__name__, error)
        return cast(Function, njit(**options)(function))
