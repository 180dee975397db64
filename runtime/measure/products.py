"""How fast the engine multiplies: products of M rows with weights as they are stored, in the orientations that models
have, and how fast quantised rows are widened.

Weights are taken in turns from so many matrices that none is in a cache when its turn comes: in a run they come from a
slot that was just filled. M rows, N outputs, K inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F

from ..linear.panels import panels
from ..linear.rows import Rows, ScaledRows
from ..linear.stored import StoredWeight
from ..store.gguf import BLOCKS
from ..stream.device import ComputeDevice
from ..weights.gguf_blocks import GgufRows
from .row import Row, row_of
from .timing import Probe, Timed

MOST_ROWS_BESIDE = 256  # of kinds that only a person looks at
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ProductKind:
    """`is_flipped`: weights lie as (K, N), as GPT-2 keeps them, and not as `nn.Linear` does."""

    compute: str
    stored: str
    is_flipped: bool = False

    def __str__(self) -> str:
        return f"product, {self.compute} by {self.stored}{' flipped' if self.is_flipped else ''} weights"

    def name(self, num_rows: int) -> str:
        return f"{self}, M={num_rows}"


def usual_kind(dtype: str, device: ComputeDevice) -> ProductKind:
    """What nearly all checkpoints come to in this compute dtype: they hold bfloat16, which float32 on a CPU widens."""
    widens = dtype == "float32" and not device.is_accelerator
    return ProductKind(compute=dtype, stored="bfloat16" if widens else dtype)


def product_kinds(device: ComputeDevice) -> list[ProductKind]:
    usual = [usual_kind(dtype, device) for dtype in DTYPES]
    others = [ProductKind(compute="float32", stored=stored) for stored in ("float32", "float16")]
    flipped = [ProductKind(compute=kind.compute, stored=kind.stored, is_flipped=True) for kind in usual[:1]]
    return [*usual, *([] if device.is_accelerator else others), *flipped]


class Matrices:
    """(width, width) matrices of each dtype, `num_bytes` of them or one, made when they are first asked for."""

    def __init__(self, device: ComputeDevice, *, width: int, num_bytes: int):
        self._device, self.width, self._num_bytes = device, width, num_bytes
        self._made: dict[str, list[torch.Tensor]] = {}

    def of(self, dtype: str) -> Sequence[torch.Tensor]:
        if dtype not in self._made:
            one = torch.randn(self.width, self.width, device=self._device.torch_device).to(DTYPES[dtype])
            count = max(1, self._num_bytes // one.nbytes)
            self._made[dtype] = [one.clone() for _ in range(count)]
        return self._made[dtype]


def product_probes(
    kind: ProductKind, rows: Sequence[int], matrices: Matrices, device: ComputeDevice, *, longest_seconds: float
) -> Row:
    """By M."""

    def probe(num_rows: int) -> tuple[Probe, Timed]:
        x_MK = torch.randn(num_rows, matrices.width, device=device.torch_device).to(DTYPES[kind.compute])
        timed = Timed(2.0 * num_rows * matrices.width**2, product_of(kind, x_MK, matrices), device.finish)
        return Probe(name=kind.name(num_rows), unit="GFLOP/s", read=timed), timed

    return row_of(str(kind), rows, probe, longest_seconds=longest_seconds)


def product_of(kind: ProductKind, x_MK: torch.Tensor, matrices: Matrices) -> Callable[[], torch.Tensor]:
    """Each call takes the next matrix."""
    weights = cycle([_as_model_has_it(matrix, x_MK.dtype) for matrix in matrices.of(kind.stored)])
    bias_N = x_MK.new_zeros(matrices.width)
    if kind.is_flipped:
        return lambda: torch.addmm(bias_N, x_MK, next(weights))
    return lambda: F.linear(x_MK, next(weights))


def _as_model_has_it(matrix: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    if matrix.dtype == compute and matrix.device.type != "cpu":
        return matrix
    return StoredWeight([[matrix]], matrix.shape, compute, is_stacked=False)


def widening_probes(device: ComputeDevice, *, width: int) -> list[Probe]:
    """Numbers of float32 that quantised rows become, as inside a product: a panel at a time."""

    def probe(name: str, rows: Rows) -> Probe:
        def act() -> None:
            for _ in panels([rows], torch.float32):
                pass

        return Probe(name=f"widening, {name}", unit="G numbers/s", read=Timed(width * width, act, device.finish))

    def raw(num_columns: int) -> torch.Tensor:
        return torch.randint(0, 120, (width, num_columns), dtype=torch.uint8).to(device.torch_device)

    scales = torch.ones(-(-width // 128), -(-width // 128), device=device.torch_device)
    exponents = torch.ones(width, -(-width // 32), device=device.torch_device)
    found = [
        probe("FP8", ScaledRows(raw(width), torch.float8_e4m3fn, scales, 128, 128)),
        probe("MXFP4", ScaledRows(raw(width // 2), None, exponents, 1, 32)),
    ]
    for dtype in ("Q8_0", "Q4_K"):
        block = BLOCKS[dtype]
        stored = raw(width // block.num_numbers * block.num_bytes)
        found.append(probe(dtype, GgufRows(stored, dtype, width, None)))
    return found
