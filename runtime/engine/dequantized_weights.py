"""Stored weights of the stages that are computed, as plain numbers in an accelerator's memory: dequantized once for all
lanes that pass a stage, as each lane by itself would dequantize them anew at each of its products.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch

from ..events import Weights
from ..linear.stored import StoredWeight
from ..plan.placement.dequantized import DequantizedSize, area_bytes
from ..stream.device import ComputeDevice


@dataclass(eq=False)
class _Area:
    """Memory for the dequantized weights of one stage; `holds` are the stage and whether all that needs it is there,
    None: nothing yet."""

    buffer: torch.Tensor
    contents: tuple[int, bool] | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def fill(self, holds: tuple[int, bool], stored: Weights) -> None:
        """Dequantizes these weights in the place of what is here, which is lost even where that fails."""
        self.invalidate()
        self.weights = dequantize_all(stored, self.buffer)
        self.contents = holds

    def invalidate(self) -> None:
        self.contents = None


class DequantizedWeights:
    """Scratch areas, one for each stage that is computed at once. Not thread-safe: only the engine calls it.

    All that is queued for an area is queued on the compute stream, where what is dequantized into it comes behind the
    products of the stage before. What was dequantized stays right when its stage's slot is filled with others' bytes.
    """

    def __init__(self, device: ComputeDevice, size: DequantizedSize, dtype: torch.dtype, transposed: Collection[str]):
        """`dtype`: the model's, for which areas are sized; the few matrices that a class keeps in another are left to
        their products. `transposed`: names of stacks whose experts a class keeps as (inputs, outputs)."""
        self._areas = [_Area(device.compute_buffer(size.area_bytes)) for _ in range(size.num_areas)]
        self._layers, self._dtype, self._transposed = size.stages, dtype, transposed

    def get(self, stage: int, stored: Weights, *, has_few_rows: bool) -> Weights:
        """Returns a stage's weights, dequantized ones in the places of those that are stored otherwise than products
        want them. They are valid until as many other stages have been asked for as there are areas. Lanes that have
        few rows multiply what is stored as it lies, as far as the device has kernels for that."""
        if stage not in self._layers:
            return stored
        holds = (stage, not has_few_rows)
        area = next((area for area in self._areas if area.contents == holds), None)
        if area is None:
            area = self._areas[0]
            wanted = {
                name: weight
                for name, weight in stored.items()
                if isinstance(weight, StoredWeight) and weight.compute_dtype == self._dtype
            }
            for name in self._multiplied_as_stored(stored) if has_few_rows else ():
                wanted.pop(name, None)
            area.fill(holds, wanted)
        self._areas.remove(area)
        self._areas.append(area)  # the one that was asked for last goes last
        return {**stored, **area.weights}

    def _multiplied_as_stored(self, stored: Weights) -> set[str]:
        """The names of weights that kernels multiply as they lie. Of stacks of experts, which are multiplied together,
        all do or none."""
        found, stacks = set[str](), set[str]()
        for name, weight in stored.items():
            if weight.is_stacked if isinstance(weight, StoredWeight) else weight.dim() == 3:
                stacks.add(name)
            if not isinstance(weight, StoredWeight) or not weight.needs_dequantizing or not weight.has_kernels:
                continue
            if not weight.is_stacked or weight.is_transposed == (name in self._transposed):
                found.add(name)
        return found if stacks <= found else found - stacks

    def invalidate(self) -> None:
        """Has the next pass dequantize all that it asks for: others may have written into the areas, or will."""
        for area in self._areas:
            area.invalidate()


def dequantized_bytes(stored: Weights) -> int:
    """The bytes that `dequantized` needs."""
    return sum(area_bytes(num_bytes) for _, _, num_bytes in _weights_to_dequantize(stored))


def dequantize_all(stored: Weights, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns plain tensors, by name, of what lies otherwise than products want it, one behind the other in the
    buffer."""
    found, begin = dict[str, torch.Tensor](), 0
    for name, weight, num_bytes in _weights_to_dequantize(stored):
        found[name] = weight.dequantize_into(buffer[begin : begin + num_bytes].view(weight.compute_dtype))
        begin += area_bytes(num_bytes)
    return found


def _weights_to_dequantize(stored: Weights) -> Iterator[tuple[str, StoredWeight, int]]:
    """Name, weight, and the bytes of its numbers."""
    for name, weight in stored.items():
        if isinstance(weight, StoredWeight) and weight.needs_dequantizing:
            count = sum(block.shape[0] * block.shape[1] for blocks in weight.entries for block in blocks)
            yield name, weight, count * weight.compute_dtype.itemsize
