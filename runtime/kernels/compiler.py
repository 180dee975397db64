"""Whether the kernels of this package can be compiled here, and for what. To import it loads neither numba, which takes
0.2 s, nor torch."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from threading import Event

log = logging.getLogger(__name__)


_held_back, _taken_up = Event(), Event()


def has_compiler() -> bool:
    """Whether compiled kernels compute in this process now: there is a compiler, and they are not held back."""
    return not _held_back.is_set() and can_compile()


def hold_back() -> bool:
    """Lets plain operators compute until `take_up`; returns whether they do. Once kernels were taken up they stay so:
    sessions that go on beside each other are planned with them."""
    if not _taken_up.is_set():
        _held_back.set()
    return _held_back.is_set()


def take_up() -> None:
    """Lets compiled kernels compute from now on. Between two passes, as last bits are others."""
    _taken_up.set()
    _held_back.clear()


@contextmanager
def not_held_back() -> Iterator[None]:
    """Lets kernels be called in its block, to find out whether they are there."""
    was_held = _held_back.is_set()
    _held_back.clear()
    try:
        yield
    finally:
        if was_held:
            _held_back.set()


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
    return has_compiler() and _multiply_pairs()


@cache
def _multiply_pairs() -> bool:
    from .primitives import HAS_PAIRS

    return HAS_PAIRS


def has_fast_pairs() -> bool:
    """Whether they do that at the rate of float32's products, as AMD's do; Intel's took twice as long for each, see
    docs/kernels.md."""
    return has_pairs() and _is_amds()


@cache
def _is_amds() -> bool:
    from llvmlite import binding

    return binding.get_host_cpu_name().startswith("znver")


@cache
def has_tables() -> bool:
    """Whether vectors look numbers up in a vector, and a compiler for it, which this loads."""
    if not can_compile():
        return False
    from .grouped import HAS_TABLES

    return HAS_TABLES
