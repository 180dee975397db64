"""Measures, in about a second, what predictions and `prefetch=cost_aware` need most: the disk's rate and that of matrix
products.

Measured with the run's own reader on what the run streams, a layer or an expert, so that whatever slows the run slows
the measurement. What else a plan wants to know of the machine, `jobs.measure` finds.
"""

from collections.abc import Collection
from dataclasses import replace
from statistics import median

import torch

from ..model.loading import LoadedModel
from ..model.weights import stage_weights
from ..plan.extents import slot_layout
from ..plan.rates import UNLIMITED, MachineRates
from ..store.reader import Reader
from ..stream.device import ComputeDevice
from .measure.disk import reading
from .measure.memory import copy_in
from .measure.products import product_with
from .measure.timing import GIGA, Timed

NUM_ROWS = (1, 16, 64, 256, 512)
NUM_READINGS = 3
NOTHING_ELSE = MachineRates(disk_bytes_per_second=UNLIMITED, gemm_flops_per_second={})


@torch.inference_mode()
def measure_rates(
    loaded: LoadedModel,
    reader: Reader,
    device: ComputeDevice,
    paged: Collection[int] = (),
    known: MachineRates = NOTHING_ELSE,
) -> MachineRates:
    """`known`, with what can be measured here in its place. Reads the first layer, or where stages are `paged` an
    expert, a few times and multiplies with its largest matrix. Allocates as much, no more than a slot takes, freed on
    return."""
    stage = loaded.shape.stages[min(paged)].expert(0) if paged else loaded.shape.layers[0]
    layout = slot_layout(stage)
    host = device.host_buffer(layout.num_bytes)
    disk = _rate(reading(reader, layout.extents, host))
    buffer, link_in = host, UNLIMITED
    if device.is_accelerator:
        buffer = device.compute_buffer(layout.num_bytes)
        link_in = _rate(copy_in(device, host[: buffer.numel()], buffer))
    weights = stage_weights(stage, buffer, layout.tensor_offsets, loaded.dtypes)
    largest = max(weights.values(), key=lambda w: w.shape[-2] * w.shape[-1] if w.dim() > 1 else 0)
    matrix = largest[0] if largest.dim() == 3 else largest
    return replace(
        known,
        disk_bytes_per_second=disk,
        link_in_bytes_per_second=link_in,
        gemm_flops_per_second={rows: _rate(product_with(matrix, rows, device)) for rows in NUM_ROWS},
    )


def _rate(read: Timed) -> float:
    return GIGA * median(read() for _ in range(NUM_READINGS))
