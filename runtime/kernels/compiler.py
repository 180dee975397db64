"""Whether the kernels of this package can be compiled here, and for what. To import it loads neither numba, which takes
0.2 s, nor torch."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from threading import Event

log = logging.getLogger(__name__)


_disabled, _enabled_for_good = Event(), Event()


def has_compiler() -> bool:
    """Whether compiled kernels compute in this process now: there is a compiler, and they are not held back."""
    return not _disabled.is_set() and can_compile()


def disable_kernels() -> bool:
    """Lets plain operators compute until `take_up`; returns whether they do. Once kernels were taken up they stay so:
    sessions that go on beside each other are planned with them."""
    if not _enabled_for_good.is_set():
        _disabled.set()
    return _disabled.is_set()


def enable_kernels() -> None:
    """Lets compiled kernels compute from now on. Between two passes, as last bits are others."""
    _enabled_for_good.set()
    _disabled.clear()


@contextmanager
def kernels_enabled() -> Iterator[None]:
    """Lets kernels be called in its block, to find out whether they are there."""
    was_held = _disabled.is_set()
    _disabled.clear()
    try:
        yield
    finally:
        if was_held:
            _disabled.set()


@cache
def can_compile() -> bool:
    """Says once what it means if not."""
    if find_spec("numba") is not None:
        return True
    log.warning(
        "numba is not installed: attention and products on the CPU run in torch operators, up to several times slower"
    )
    return False


def has_matrix_unit() -> bool:
    """Whether there is one, and a compiler for it, which this loads."""
    return has_compiler() and _may_use_tiles()


@cache
def _may_use_tiles() -> bool:
    from .amx.unit import may_use_tiles

    return may_use_tiles()


def has_pairs() -> bool:
    """Whether vectors multiply bfloat16 by pairs, and a compiler for it, which this loads."""
    return has_compiler() and _has_pair_products()


@cache
def _has_pair_products() -> bool:
    from .primitives import HAS_PAIRS

    return HAS_PAIRS


def has_fast_pairs() -> bool:
    """Whether they do that at the rate of float32's products, as AMD's do; Intel's took twice as long for each, see
    docs/kernels.md."""
    return has_pairs() and _is_amd()


@cache
def _is_amd() -> bool:
    from llvmlite import binding

    return binding.get_host_cpu_name().startswith("znver")


@cache
def has_tables() -> bool:
    """Whether vectors look numbers up in a vector, and a compiler for it, which this loads."""
    if not can_compile():
        return False
    from .grouped import HAS_TABLES

    return HAS_TABLES
