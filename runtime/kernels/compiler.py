"""Tells which kernels this process can compile and run, and switches kernels off and on. Importing this module loads
neither numba (0.2 s) nor torch.

While kernels are disabled, torch operators compute the same, with results that may differ in the last bits.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from threading import Event

log = logging.getLogger(__name__)
_disabled, _enabled_permanently = Event(), Event()  # for all threads of the process


def has_compiler() -> bool:
    """True if a compiler is installed and kernels are not disabled."""
    return not _disabled.is_set() and can_compile()


def disable_kernels() -> bool:
    """Makes forward passes use torch operators until `enable_kernels` is called, and returns True. If `enable_kernels`
    was called before, has no effect and returns False: concurrent sessions may be planned with kernels."""
    if not _enabled_permanently.is_set():
        _disabled.set()
    return _disabled.is_set()


def enable_kernels() -> None:
    """Enables kernels permanently. Call it between two forward passes, not during one, as results change in the last
    bits."""
    _enabled_permanently.set()
    _disabled.clear()


@contextmanager
def kernels_enabled() -> Iterator[None]:
    """Enables kernels inside the `with` block, so that the caller can find out which ones this CPU supports."""
    was_disabled = _disabled.is_set()
    _disabled.clear()
    try:
        yield
    finally:
        if was_disabled:
            _disabled.set()


@cache
def can_compile() -> bool:
    """True if numba is installed. Otherwise warns once."""
    if find_spec("numba") is not None:
        return True
    log.warning(
        "numba is not installed: attention and linear layers on the CPU use torch operators, up to several times slower"
    )
    return False


def has_matrix_unit() -> bool:
    """True if kernels can use the CPU's matrix unit (AMX). Loads the compiler."""
    return has_compiler() and _may_use_tiles()


@cache
def _may_use_tiles() -> bool:
    from .amx.unit import may_use_tiles

    return may_use_tiles()


def has_bf16_pairs() -> bool:
    """True if kernels can multiply pairs of bfloat16 in one instruction (AVX512-BF16). Loads the compiler."""
    return has_compiler() and _has_pair_products()


@cache
def _has_pair_products() -> bool:
    from .primitives import HAS_BF16_PAIRS

    return HAS_BF16_PAIRS


def has_fast_bf16_pairs() -> bool:
    """True if an instruction on pairs of bfloat16 takes as long as one on float32, which has half as many numbers. This
    holds for AMD; on Intel it took twice as long, see docs/project/benchmarks-kernels.md."""
    return has_bf16_pairs() and _is_amd()


@cache
def _is_amd() -> bool:
    from llvmlite import binding

    return binding.get_host_cpu_name().startswith("znver")


@cache
def has_table_lookup() -> bool:
    """True if kernels can look up numbers in a vector register (AVX2). Loads the compiler."""
    if not can_compile():
        return False
    from .grouped import HAS_TABLE_LOOKUP

    return HAS_TABLE_LOOKUP
