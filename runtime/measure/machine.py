"""All probes of `jobs.measure`, which measure a machine without a model, and the rates for plans that result from them.

A probe is a named measurement; its figure is the measured value with its spread (see `timing.py`)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..config.profiles import DTypeRates, MeasureConfig
from ..stream.device import ComputeDevice
from ..units import MIB
from .attention import attention_name, attention_probes, prefill_name
from .bandwidth import disk_probes, memory_probes
from .linear import (
    DTYPES,
    MAX_REPORTED_ROWS,
    Matrices,
    ProbeSeries,
    backend_probes,
    product_kinds,
    product_probes,
    typical_kind,
    upcast_probes,
)
from .timing import Figure, Probe

# A product may take this share of `measure.seconds`, but at least these seconds; for longer ones, no larger M is tried.
LONGEST_SHARE, MIN_LONGEST_SECONDS = 0.02, 0.05
WEIGHT_DIVISOR = 2  # the matrices of a dtype take `measure.memory_mib` / WEIGHT_DIVISOR
PIECE_MIB = 64  # size of one disk read


@contextmanager
def machine_probes(
    config: MeasureConfig, device: ComputeDevice
) -> Iterator[tuple[list[Probe], dict[str, ProbeSeries], list[str]]]:
    """Yields all probes, the probes of each compute dtype's most common product (by dtype), and messages about products
    that are not measured. Uses `measure.disk_mib` of disk, and as much host memory plus a few times
    `measure.memory_mib`."""
    memory_bytes, disk_bytes = config.memory_mib * MIB, config.disk_mib * MIB
    matrices = Matrices(device, width=config.matrix_width, num_bytes=memory_bytes // WEIGHT_DIVISOR)
    with disk_probes(config.directory, device, file_bytes=disk_bytes, piece_bytes=PIECE_MIB * MIB) as disk:
        probes = [*disk, *memory_probes(device, num_bytes=memory_bytes)]
        longest = max(MIN_LONGEST_SECONDS, config.seconds * LONGEST_SHARE)
        typical: dict[str, ProbeSeries] = {}
        series: list[ProbeSeries] = []
        for kind in product_kinds(device):
            is_typical = kind == typical_kind(kind.compute, device)
            gemm_rows = [number for number in config.gemm_rows if is_typical or number <= MAX_REPORTED_ROWS]
            series.append(product_probes(kind, gemm_rows, matrices, device, longest_seconds=longest))
            if is_typical:
                typical[kind.compute] = series[-1]
        if not device.is_accelerator:
            series += backend_probes(config.gemm_rows, matrices, longest_seconds=longest)
        probes += [probe for each in series for probe in each.probes.values()]
        probes += upcast_probes(device, width=config.matrix_width)
        for dtype in DTYPES:
            probes += attention_probes(dtype, device, num_bytes=memory_bytes // WEIGHT_DIVISOR)
        yield probes, typical, [each.end_reason for each in series if each.end_reason is not None]


def dtype_rates(
    dtype: str, products: ProbeSeries, rows: Sequence[int], figures: Mapping[str, Figure], device: ComputeDevice
) -> DTypeRates:
    """The rates of a compute dtype: of attention, and of `products` at each number of rows in `rows`. Beyond the
    largest measured number of rows, it is the rate at that number."""
    return DTypeRates(
        gemm_gflops=[figures[products.nearest(num_rows).name].value for num_rows in rows],
        attention_gb_per_second=figures[attention_name(dtype, is_on_cpu=not device.is_accelerator)].value,
        cpu_attention_gb_per_second=figures[attention_name(dtype, is_on_cpu=True)].value,
        prefill_attention_gflops=figures[prefill_name(dtype)].value,
    )


def device_name(device: ComputeDevice) -> str:
    """The name of an accelerator, such as "NVIDIA H100"; "cpu" for a CPU."""
    if device.torch_device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device.torch_device).get_device_name(device.torch_device))
