"""The instruction set that kernels are compiled for: all that the processor has, or less where MILLRACE_ISA asks for
it, as on a host that has no more. Results may differ in last bits between instruction sets, as between processors.

Imported before any kernel is compiled; it tells numba's compiler, whose cache keeps each target apart.
"""

import os
from functools import cache
from typing import cast

from llvmlite import binding
from numba import config

from ..errors import ConfigError

VARIABLE = "MILLRACE_ISA"
# What a set lacks, by the beginning of LLVM's names. The last one lacks nothing.
LACKING = {"avx2": ("avx512", "avx10", "evex512", "amx"), "avx512": ("amx",), "amx": ()}
NEEDED = {"avx2": "avx2", "avx512": "avx512f", "amx": "amx-bf16"}


@cache
def features() -> dict[str, bool]:
    """What kernels may use, by LLVM's names. Raises ConfigError where MILLRACE_ISA names nothing that is here."""
    found = cast(dict[str, bool], dict(binding.get_host_cpu_features()))
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return found
    if wanted not in LACKING:
        raise ConfigError(f"{VARIABLE}={wanted} is unknown: known are {', '.join(LACKING)}")
    if not found.get(NEEDED[wanted]):
        raise ConfigError(f"{VARIABLE}={wanted}: this processor has no {NEEDED[wanted]}; unset {VARIABLE}")
    return {name: has and not name.startswith(LACKING[wanted]) for name, has in found.items()}


def has_fma_alone() -> bool:
    """Whether the processor has AVX2's FMA, and none of AVX-512's registers."""
    return bool(features().get("avx2") and features().get("fma") and not features().get("avx512f"))


def _compile_for_it() -> None:
    wanted = os.environ.get(VARIABLE)
    if wanted is None or not LACKING.get(wanted):
        return
    taken = ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(features().items()))
    for name, value in (("CPU_NAME", binding.get_host_cpu_name()), ("CPU_FEATURES", taken)):
        setattr(config, name, value)


_compile_for_it()
