"""Which precision `model.dtype=auto` is: one rule, for runs and for plans of machines that are not there."""

from ...config.profiles import MeasuredRates
from ...config.settings import DType, MachineConfig

NATIVE_SHARE = 0.5  # of float16's FLOP/s: where products of bfloat16 reach no more, they are made of others


def auto_dtype(stored: DType, *, has_device: bool, has_bfloat16: bool = True) -> DType:
    """The dtype that `auto` means. On a CPU float32: the exact answer, and on most CPUs the faster one. On a device the
    checkpoint's own, but float16 for bfloat16 where that has no units. Both have 16 bits; float16 has more digits, and
    ends at 65,504."""
    if not has_device:
        return DType.float32
    return DType.float16 if stored is DType.bfloat16 and not has_bfloat16 else stored


def has_bfloat16_units(machine: MachineConfig) -> bool:
    """Whether the machine has units for bfloat16, by its data sheet or by its measured rates."""
    if machine.sheet is not None:
        return machine.sheet.bfloat16_tflops is not None
    return machine.rates is None or _is_native(machine.rates)


def _is_native(rates: MeasuredRates) -> bool:
    wide, narrow = rates.bfloat16, rates.float16
    return wide is None or narrow is None or max(wide.gemm_gflops) > NATIVE_SHARE * max(narrow.gemm_gflops)
