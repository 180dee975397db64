"""Device memory for dequantized weights."""

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
    """Scratch memory for the dequantized weights of `stages`."""

    num_areas: int  # one per stage computed at the same time
    area_bytes: int
    stages: frozenset[int]

    @staticmethod
    def from_shape(shape: ModelShape, paged: Collection[int], num_open: int) -> "DequantizedSize | None":
        """Returns the size for a model's layers, without the experts of `paged` ones; None if nothing is quantized.

        Excludes embeddings, which are looked up by row, and the head, which runs once per pass.
        """
        sizes, dtype, item = dict[int, int](), shape.compute_dtype, shape.compute_dtype_bytes
        for stage in shape.stages:
            if stage.kind.is_layer:
                parameters = (stage.dense if stage.index in paged else stage).parameters
                sizes[stage.index] = sum(
                    area_bytes(p.num_elements * item) for p in parameters if needs_dequantizing(p, dtype)
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
    """True if a matrix or stack is stored quantized, or in another dtype than `compute_dtype` (safetensors name; empty
    if unknown)."""
    pieces = [piece for entry in parameter.pieces for piece in entry if len(parameter.shape) > 1]
    others = {*FLOATS} - {compute_dtype} if compute_dtype in FLOATS else ()
    return any(piece.format or piece.dtype in others for piece in pieces)


def area_bytes(num_bytes: int) -> int:
    return round_up(num_bytes, ALIGNMENT)
