"""Whether the kernels of this package can be compiled here, and for what. To import it loads neither numba, which takes
0.2 s, nor torch."""

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


@cache
def has_matrix_unit() -> bool:
    """Whether there is one, and a compiler for it, which this loads."""
    if not has_compiler():
        return False
    from .amx.unit import may_use_tiles

    return may_use_tiles()


@cache
def has_pairs() -> bool:
    """Whether vectors multiply bfloat16 by pairs, and a compiler for it, which this loads."""
    if not has_compiler():
        return False
    from .primitives import HAS_PAIRS

    return HAS_PAIRS


@cache
def has_fast_pairs() -> bool:
    """Whether they do that at the rate of float32's products, as AMD's do; Intel's took twice as long for each, see
    docs/kernels.md."""
    if not has_pairs():
        return False
    from llvmlite import binding

    return binding.get_host_cpu_name().startswith("znver")


@cache
def has_tables() -> bool:
    """Whether vectors look numbers up in a vector, and a compiler for it, which this loads."""
    if not has_compiler():
        return False
    from .grouped import HAS_TABLES

    return HAS_TABLES
