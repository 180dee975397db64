"""All that is measured of a machine without a model, and which rates of a plan it becomes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...profiles import DTypeRates, MeasureConfig
from ...stream.device import ComputeDevice
from ...units import MIB
from .attention import attention_name, attention_probes, prefill_name
from .disk import disk_probes
from .memory import memory_probes
from .multipliers import multiplier_probes
from .products import DTYPES, MOST_ROWS_BESIDE, Matrices, product_kinds, product_probes, usual_kind, widening_probes
from .timing import Figure, Probe

WEIGHT_SHARE = 2  # of `memory_mib`: the matrices of a dtype take one part in so many
PIECE_MIB = 64  # a read of the disk's grid


@dataclass(frozen=True, kw_only=True)
class MachineProbes:
    """`gemm_rows` by compute dtype: those that were not too long."""

    probes: Sequence[Probe]
    gemm_rows: Mapping[str, Sequence[int]]


@contextmanager
def machine_probes(config: MeasureConfig, device: ComputeDevice) -> Iterator[MachineProbes]:
    """Holds the memory and the file that they work on: `disk_mib` twice, and a few times `memory_mib`."""
    memory_bytes, disk_bytes = config.memory_mib * MIB, config.disk_mib * MIB
    matrices = Matrices(device, width=config.matrix_width, num_bytes=memory_bytes // WEIGHT_SHARE)
    with disk_probes(config.directory, device, file_bytes=disk_bytes, piece_bytes=PIECE_MIB * MIB) as disk:
        probes = [*disk, *memory_probes(device, num_bytes=memory_bytes)]
        gemm_rows: dict[str, Sequence[int]] = {}
        for kind in product_kinds(device):
            is_usual = kind == usual_kind(kind.compute, device)
            rows = [num_rows for num_rows in config.gemm_rows if is_usual or num_rows <= MOST_ROWS_BESIDE]
            found = product_probes(kind, rows, matrices, device)
            probes += found.values()
            if is_usual:
                gemm_rows[kind.compute] = list(found)
        if not device.is_accelerator:
            probes += multiplier_probes(config.gemm_rows, matrices)
        probes += widening_probes(device, width=config.matrix_width)
        for dtype in DTYPES:
            probes += attention_probes(dtype, device, num_bytes=memory_bytes // WEIGHT_SHARE)
        yield MachineProbes(probes=probes, gemm_rows=gemm_rows)


def dtype_rates(dtype: str, rows: Sequence[int], figures: Mapping[str, Figure], device: ComputeDevice) -> DTypeRates:
    kind = usual_kind(dtype, device)
    return DTypeRates(
        gemm_gflops=[figures[kind.name(num_rows)].value for num_rows in rows],
        attention_gb_per_second=figures[attention_name(dtype, is_on_cpu=not device.is_accelerator)].value,
        cpu_attention_gb_per_second=figures[attention_name(dtype, is_on_cpu=True)].value,
        prefill_attention_gflops=figures[prefill_name(dtype)].value,
    )


def device_name(device: ComputeDevice) -> str:
    if device.torch_device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device.torch_device).get_device_name(device.torch_device))
