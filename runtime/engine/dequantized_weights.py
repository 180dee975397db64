"""Stored weights of the stages that are computed, as plain numbers in an accelerator's memory: dequantized once for all
lanes that pass a stage, as each lane by itself would dequantize them anew at each of its products.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..events import Weights
from ..linear.stored import StoredWeight
from ..plan.placement.dequantized import DequantizedSize, area_bytes
from ..stream.device import ComputeDevice


@dataclass(eq=False)
class _Area:
    """Memory for the dequantized weights of one stage; `stage` is the one that they are of, None: no one's yet."""

    buffer: torch.Tensor
    stage: int | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


class DequantizedWeights:
    """Scratch areas, one for each stage that is computed at once. Not thread-safe: only the engine calls it.

    All that is queued for an area is queued on the compute stream, where what is dequantized into it comes behind the
    products of the stage before. What was dequantized stays right when its stage's slot is filled with others' bytes.
    """

    def __init__(self, device: ComputeDevice, size: DequantizedSize):
        self._areas = [_Area(device.compute_buffer(size.area_bytes)) for _ in range(size.num_areas)]
        self._layers = size.stages

    def of(self, stage: int, stored: Weights) -> Weights:
        """Returns a stage's weights, dequantized ones in the places of those that are stored otherwise than products
        want them. They are valid until as many other stages have been asked for as there are areas."""
        if stage not in self._layers:
            return stored
        area = next((area for area in self._areas if area.stage == stage), None)
        if area is None:
            area = self._areas[0]
            area.stage, area.weights = stage, dequantized(stored, area.buffer)
        self._areas.remove(area)
        self._areas.append(area)  # the one that was asked for last goes last
        return {**stored, **area.weights}


def room_for(stored: Weights) -> int:
    """The bytes that `dequantized` needs."""
    return sum(area_bytes(num_bytes) for _, _, num_bytes in _to_dequantize(stored))


def dequantized(stored: Weights, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns plain tensors, by name, of what lies otherwise than products want it, one behind the other in the
    buffer."""
    found, begin = dict[str, torch.Tensor](), 0
    for name, weight, num_bytes in _to_dequantize(stored):
        found[name] = weight.dequantize_into(buffer[begin : begin + num_bytes].view(weight.compute_dtype))
        begin += area_bytes(num_bytes)
    return found


def _to_dequantize(stored: Weights) -> Iterator[tuple[str, StoredWeight, int]]:
    """Name, weight, and the bytes of its numbers."""
    for name, weight in stored.items():
        if isinstance(weight, StoredWeight) and weight.needs_dequantizing:
            count = sum(block.shape[0] * block.shape[1] for blocks in weight.entries for block in blocks)
            yield name, weight, count * weight.compute_dtype.itemsize
