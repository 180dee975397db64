"""Restricts all processes of a benchmark to an instruction set. Imports neither torch nor numba, which peers may
lack."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum

from runtime.errors import ConfigError
from runtime.kernels.arguments import ISA
from runtime.measure.machine_cache import cpu_flags


class Isa(Enum):
    """`avx2`: with FMA, as desktops have it. `avx512`: all of the processor's AVX-512, without AMX."""

    avx2 = "avx2"
    avx512 = "avx512"

    @property
    def title(self) -> str:
        return {Isa.avx2: "AVX2", Isa.avx512: "AVX-512"}[self]


REQUIRED_FLAGS = {  # as in /proc/cpuinfo
    Isa.avx2: ("avx2", "fma", "f16c", "bmi2"),
    Isa.avx512: ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"),
}
ENVIRONMENTS: Mapping[Isa, Mapping[str, str]] = {  # our kernels, torch's, oneDNN's, MKL's
    Isa.avx2: {
        ISA: "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    Isa.avx512: {
        ISA: "avx512",
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",  # oneDNN's widest set without AMX
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}
GGML_OF_AVX2 = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")  # llama.cpp's switches
GGML_OF_AVX512 = {"AVX512_VBMI": "avx512vbmi", "AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16"}


@contextmanager
def restrict_instructions(isa: Isa | None) -> Iterator[None]:
    """Restricts processes started within the context. Raises ConfigError if the processor lacks the instructions."""
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
    """The set that this process is restricted to, by `restrict_instructions` here or in its parent."""
    return next((isa for isa, variables in ENVIRONMENTS.items() if variables.items() <= os.environ.items()), None)


def cmake_arguments(isa: Isa, flags: frozenset[str]) -> Sequence[str]:
    """Arguments of llama.cpp's build for this set, instead of all that the processor has."""
    switches = dict.fromkeys(GGML_OF_AVX2, True) | {"AVX512": isa is Isa.avx512}
    switches |= {name: isa is Isa.avx512 and flag in flags for name, flag in GGML_OF_AVX512.items()}
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}={'ON' if is_on else 'OFF'}" for name, is_on in switches.items())]
