"""Scratch memory for dequantized weights: an accelerator dequantizes a stage once for all lanes of a pass."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch

from ..events import Weights
from ..linear.stored import StoredWeight
from ..plan.placement.dequantized import DequantizedSize, area_bytes
from ..stream.device import ComputeDevice


@dataclass(eq=False)
class _Area:
    """Memory for the dequantized weights of one stage. `contents`: (stage, True if all of its weights are included);
    None if invalid."""

    buffer: torch.Tensor
    contents: tuple[int, bool] | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def fill(self, contents: tuple[int, bool], stored: Weights) -> None:
        self.invalidate()  # first: dequantizing may fail half-way
        self.weights = dequantize_all(stored, self.buffer)
        self.contents = contents

    def invalidate(self) -> None:
        self.contents = None


class DequantizedWeights:
    """Scratch areas, one for each stage that is computed at the same time. Only the engine calls it. Dequantized
    weights stay valid when the slot of their stage is refilled."""

    def __init__(self, device: ComputeDevice, size: DequantizedSize, dtype: torch.dtype, transposed: Collection[str]):
        """`dtype`: the model's compute dtype; weights of other dtypes are dequantized in their products. `transposed`:
        names of expert stacks that store each expert as (inputs, outputs)."""
        self._areas = [_Area(device.compute_buffer(size.area_bytes)) for _ in range(size.num_areas)]
        self._stages, self._dtype, self._transposed = size.stages, dtype, transposed

    def get(self, stage: int, stored: Weights, *, has_few_rows: bool) -> Weights:
        """A stage's weights, dequantized. Valid until `size.num_areas` other stages have been requested. With
        `has_few_rows`, weights that the device has kernels for stay quantized."""
        if stage not in self._stages:
            return stored
        contents = (stage, not has_few_rows)
        area = next((area for area in self._areas if area.contents == contents), None)
        if area is None:
            area = self._areas[0]
            quantized = {
                name: weight
                for name, weight in stored.items()
                if isinstance(weight, StoredWeight) and weight.compute_dtype == self._dtype
            }
            for name in self._kernel_weights(stored) if has_few_rows else ():
                quantized.pop(name, None)
            area.fill(contents, quantized)
        self._areas.remove(area)
        self._areas.append(area)  # least recently used first; reuse is safe, as its products are on the same stream
        return {**stored, **area.weights}

    def _kernel_weights(self, stored: Weights) -> set[str]:
        """Names of weights that device kernels multiply in their storage format: all expert stacks, or none."""
        names, stacks = set[str](), set[str]()
        for name, weight in stored.items():
            if weight.is_stacked if isinstance(weight, StoredWeight) else weight.dim() == 3:
                stacks.add(name)
            if not isinstance(weight, StoredWeight) or not weight.needs_dequantizing or not weight.has_kernels:
                continue
            if not weight.is_stacked or weight.is_transposed == (name in self._transposed):
                names.add(name)
        return names if stacks <= names else names - stacks

    def invalidate(self) -> None:
        """Invalidates all areas. Required when a recorded graph may write to them."""
        for area in self._areas:
            area.invalidate()


def dequantized_bytes(stored: Weights) -> int:
    """Bytes of buffer that `dequantize_all` needs."""
    return sum(area_bytes(num_bytes) for _, _, num_bytes in _weights_to_dequantize(stored))


def dequantize_all(stored: Weights, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Dequantizes weights that products cannot use as stored into `buffer`. Returns tensors by name."""
    weights, begin = dict[str, torch.Tensor](), 0
    for name, weight, num_bytes in _weights_to_dequantize(stored):
        weights[name] = weight.dequantize_into(buffer[begin : begin + num_bytes].view(weight.compute_dtype))
        begin += area_bytes(num_bytes)
    return weights


def _weights_to_dequantize(stored: Weights) -> Iterator[tuple[str, StoredWeight, int]]:
    """Name, weight, and size in bytes after dequantization."""
    for name, weight in stored.items():
        if isinstance(weight, StoredWeight) and weight.needs_dequantizing:
            count = sum(block.shape[0] * block.shape[1] for blocks in weight.entries for block in blocks)
            yield name, weight, count * weight.compute_dtype.itemsize
