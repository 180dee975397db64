"""Whether the kernels of this package can be compiled here. Loads neither numba, which takes 0.2 s, nor torch."""

import logging
from functools import cache
from importlib.util import find_spec

log = logging.getLogger(__name__)


@cache
def has_compiler() -> bool:
    """Says once what it means if not."""
    if find_spec("numba") is not None:
        return True
    log.warning(
        "numba is not installed: attention and products on the CPU run in torch operators, up to several times slower"
    )
    return False
