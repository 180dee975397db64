"""How much of an accelerator's memory a stage's weights take as plain numbers, where they are stored otherwise."""

from collections.abc import Collection
from dataclasses import dataclass

from ...units import round_up
from ..shape.model import ModelShape
from ..shape.shapes import Parameter
from .ledger import Entry
from .memory import DEQUANTIZING_BYTES

ALIGNMENT = 256  # bytes, at which kernels like matrices to begin
FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True, kw_only=True)
class DequantizedSize:
    """`num_areas` of `area_bytes`, for the weights of as many stages that are computed at once, each of `stages`."""

    num_areas: int
    area_bytes: int
    stages: frozenset[int]

    @staticmethod
    def from_shape(shape: ModelShape, paged: Collection[int], num_open: int) -> "DequantizedSize | None":
        """Returns the size for a model's layers, of `paged` ones without their experts; None where nothing is stored
        otherwise than it is multiplied. Embeddings are looked up row by row, and the head runs once in a pass."""
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
        equation = f"{self.num_areas} x {self.area_bytes:,} B of a layer + {DEQUANTIZING_BYTES:,} B on the way there"
        return Entry(name="dequantized weights", num_bytes=num_bytes, equation=equation)


def needs_dequantizing(parameter: Parameter, compute_dtype: str) -> bool:
    """Whether a matrix, or a stack of them, lies in a storage format or in another dtype than the one that it is
    multiplied in, by safetensors' name, which is empty where it is not known."""
    if len(parameter.shape) < 2:
        return False
    return any(
        piece.format or (compute_dtype in FLOATS and piece.dtype in FLOATS and piece.dtype != compute_dtype)
        for blocks in parameter.pieces
        for piece in blocks
    )


def area_bytes(num_bytes: int) -> int:
    return round_up(num_bytes, ALIGNMENT)
