"""Device memory into which the weights of a whole stage are dequantized, once for all lanes (micro-batches)."""

from collections.abc import Collection
from dataclasses import dataclass

from ...units import round_up
from ..shape.dtypes import FLOATS
from ..shape.model import ModelShape
from ..shape.shapes import Parameter
from .ledger import Entry
from .memory import DEQUANTIZING_BYTES

ALIGNMENT = 256  # bytes, preferred by matrix kernels


@dataclass(frozen=True, kw_only=True)
class DequantizedSize:
    """Sizes of the scratch areas for dequantized weights. Each area holds one stage at a time."""

    num_areas: int  # number of stages computed at the same time
    area_bytes: int
    stages: frozenset[int]  # stages with weights to dequantize

    @staticmethod
    def from_shape(shape: ModelShape, paged: Collection[int], num_open: int) -> "DequantizedSize | None":
        """Returns the sizes for the layers of a model, with `num_open` areas; None if no layer is quantized.

        Excludes experts of `paged` stages, which are read one by one. Embeddings, which are looked up by row, and the
        head, which runs once per pass, are not dequantized here.
        """
        sizes, dtype, item_bytes = dict[int, int](), shape.compute_dtype, shape.compute_dtype_bytes
        for stage in shape.stages:
            if stage.kind.is_layer:
                parameters = (stage.dense if stage.index in paged else stage).parameters
                sizes[stage.index] = sum(
                    area_bytes(p.num_elements * item_bytes) for p in parameters if needs_dequantizing(p, dtype)
                )
        stages = frozenset(stage for stage, num_bytes in sizes.items() if num_bytes)
        if not stages:
            return None
        return DequantizedSize(num_areas=num_open, area_bytes=max(sizes.values()), stages=stages)

    @property
    def entry(self) -> Entry:
        num_bytes = self.num_areas * self.area_bytes + DEQUANTIZING_BYTES
        equation = f"{self.num_areas} x {self.area_bytes:,} B per layer + {DEQUANTIZING_BYTES:,} B of temporaries"
        return Entry(name="dequantized weights", num_bytes=num_bytes, equation=equation)


def needs_dequantizing(parameter: Parameter, compute_dtype: str) -> bool:
    """True if a matrix, or stack of matrices, is stored quantized or in another dtype than `compute_dtype`.

    `compute_dtype`: safetensors name; empty if unknown.
    """
    pieces = [piece for entry in parameter.pieces for piece in entry if len(parameter.shape) > 1]
    other_floats = {*FLOATS} - {compute_dtype} if compute_dtype in FLOATS else ()
    return any(piece.format or piece.dtype in other_floats for piece in pieces)


def area_bytes(num_bytes: int) -> int:
    """Returns the bytes that a dequantized matrix takes in an area."""
    return round_up(num_bytes, ALIGNMENT)
