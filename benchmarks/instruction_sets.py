"""Restricts all processes of a benchmark to an instruction set, by environment variables.

Imports neither torch nor numba, which peers' environments may lack.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum

from runtime.errors import ConfigError
from runtime.kernels.arguments import ISA_VARIABLE
from runtime.measure.machine_cache import cpu_flags


class Isa(Enum):
    """An instruction set. `avx2` includes FMA; `avx512` is all AVX-512 of the processor, without AMX."""

    avx2 = "avx2"
    avx512 = "avx512"

    @property
    def title(self) -> str:
        return {Isa.avx2: "AVX2", Isa.avx512: "AVX-512"}[self]


REQUIRED_FLAGS = {  # as in /proc/cpuinfo
    Isa.avx2: ("avx2", "fma", "f16c", "bmi2"),
    Isa.avx512: ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"),
}
ENVIRONMENTS: Mapping[Isa, Mapping[str, str]] = {  # read by Weightstream's kernels, torch, oneDNN and MKL
    Isa.avx2: {
        ISA_VARIABLE: "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    Isa.avx512: {
        ISA_VARIABLE: "avx512",
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",  # oneDNN's widest set without AMX
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}
GGML_OF_AVX2 = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")  # CMake options of llama.cpp, without GGML_
GGML_OF_AVX512 = {  # option: flag in /proc/cpuinfo
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
}


@contextmanager
def restrict_instructions(isa: Isa | None) -> Iterator[None]:
    """Restricts the processes that are started within the context. None: no restriction. Raises ConfigError if the
    processor lacks the instructions."""
    if isa is None:
        yield
        return
    missing = [flag for flag in REQUIRED_FLAGS[isa] if flag not in cpu_flags()]
    if missing:
        raise ConfigError(f"isa={isa.value}: this processor lacks {', '.join(missing)}; set isa=null")
    before = {name: os.environ.get(name) for name in ENVIRONMENTS[isa]}
    os.environ.update(ENVIRONMENTS[isa])
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def restriction() -> Isa | None:
    """The instruction set that this process or its parent has set with `restrict_instructions`."""
    return next((isa for isa, variables in ENVIRONMENTS.items() if variables.items() <= os.environ.items()), None)


def cmake_arguments(isa: Isa, flags: frozenset[str]) -> Sequence[str]:
    """Arguments for CMake that build llama.cpp for `isa`. By default, CMake uses all instructions of the processor.
    `flags`: the processor's, as in /proc/cpuinfo."""
    switches = dict.fromkeys(GGML_OF_AVX2, True) | {"AVX512": isa is Isa.avx512}
    switches |= {name: isa is Isa.avx512 and flag in flags for name, flag in GGML_OF_AVX512.items()}
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}={'ON' if is_on else 'OFF'}" for name, is_on in switches.items())]
