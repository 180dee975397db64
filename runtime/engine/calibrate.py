"""Measures, in about a second, what predictions and `prefetch=cost_aware` need: the disk's rate and that of matrix
products.

Measured with the run's own reader on what the run streams, a layer or an expert, so that whatever slows the run slows
the measurement.
"""

import time
from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F

from ..model.loading import LoadedModel
from ..model.weights import stage_weights
from ..plan.extents import slot_layout
from ..plan.rates import MachineRates
from ..store.reader import Reader
from ..stream.device import ComputeDevice

NUM_ROWS = (1, 16, 64, 256, 512)
NUM_REPEATS = 3


@torch.inference_mode()
def measure_rates(
    loaded: LoadedModel, reader: Reader, device: ComputeDevice, paged: Collection[int] = ()
) -> MachineRates:
    """Reads the first layer, or where stages are `paged` an expert, a few times and multiplies with its largest matrix.
    Allocates as much, no more than a slot takes, freed on return."""
    stage = loaded.shape.stages[min(paged)].expert(0) if paged else loaded.shape.layers[0]
    layout = slot_layout(stage)
    host = device.host_buffer(layout.num_bytes)
    read_seconds = _median(lambda: reader.submit(layout.extents, host.numpy().data).wait())
    buffer, copy_seconds = host, 0.0
    if device.is_accelerator:
        buffer = device.compute_buffer(layout.num_bytes)
        copy_seconds = _median(lambda: (buffer.copy_(host[: buffer.numel()]), device.finish()))
    weights = stage_weights(stage, buffer, layout.tensor_offsets, loaded.dtypes)
    largest = max(weights.values(), key=lambda w: w.shape[-2] * w.shape[-1] if w.dim() > 1 else 0)
    matrix = largest[0] if largest.dim() == 3 else largest
    return MachineRates(
        disk_bytes_per_second=layout.num_bytes / read_seconds,
        link_in_bytes_per_second=layout.num_bytes / copy_seconds if copy_seconds else float("inf"),
        gemm_flops_per_second={rows: _gemm_rate(matrix, rows, device) for rows in NUM_ROWS},
    )


def _gemm_rate(matrix: torch.Tensor, num_rows: int, device: ComputeDevice) -> float:
    x = torch.ones(num_rows, matrix.shape[1], dtype=matrix.dtype, device=device.torch_device)
    seconds = _median(lambda: (F.linear(x, matrix), device.finish()))
    return 2.0 * num_rows * matrix.shape[0] * matrix.shape[1] / seconds


def _median(action: Callable[[], object]) -> float:
    action()
    seconds = []
    for _ in range(NUM_REPEATS):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[NUM_REPEATS // 2]
