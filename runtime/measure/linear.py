"""Rates of matrix products with weights as stored, the fastest backend for them on this CPU, and rates of
dequantization. A backend is an implementation of such products, see `linear/backends.py`.

A kind of product is its dtypes and the layout of its weights. Calls use so many matrices in turn that none is in a
cache, as in a run. A product is x (M rows, K inputs) by weights (N outputs, K).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..config.profiles import FLOAT32, BackendTable, LinearBackend
from ..formats.kinds.gguf import gguf_rows
from ..formats.scaled_rows import ScaledRows
from ..linear.backends import BACKENDS, DTYPE_NAMES, default_backend, supported_backends
from ..linear.blocks import panels
from ..linear.rows import Rows
from ..linear.stored import StoredWeight
from ..store.gguf import BLOCKS
from ..stream.device import ComputeDevice
from .timing import Clock, Figure, Probe, Timer

MAX_REPORTED_ROWS = 256  # largest M of kinds that `weightstream measure` only prints, without use for plans
MIN_GAIN = 0.05  # least speedup over the default backend; less may be noise
# Numbers of rows M at which backends are compared. Beyond 512, ratios between backends change little.
ROWS = (1, 4, 16, 64, 256, 512)
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # x (M, K), weights (N, K) or (K, N) -> (M, N)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ProductKind:
    """A kind of product to measure with the default backend. `compute` and `stored`: dtypes of x and of the weights.
    `is_flipped`: weights are (K, N), as in GPT-2."""

    compute: str
    stored: str
    is_flipped: bool = False

    def __str__(self) -> str:
        return f"product, {self.compute} by {self.stored}{' flipped' if self.is_flipped else ''} weights"

    def name(self, num_rows: int) -> str:
        return f"{self}, M={num_rows}"


def typical_kind(dtype: str, device: ComputeDevice) -> ProductKind:
    """The most common product with this compute dtype. For float32 on a CPU, weights are bfloat16."""
    widens = dtype == "float32" and not device.is_accelerator
    return ProductKind(compute=dtype, stored="bfloat16" if widens else dtype)


def product_kinds(device: ComputeDevice) -> list[ProductKind]:
    """The kinds to measure: the typical ones, on a CPU two more for float32, and one with flipped weights."""
    typical = [typical_kind(dtype, device) for dtype in DTYPES]
    others = [ProductKind(compute="float32", stored=stored) for stored in ("float32", "float16")]
    flipped = [ProductKind(compute=kind.compute, stored=kind.stored, is_flipped=True) for kind in typical[:1]]
    return [*typical, *([] if device.is_accelerator else others), *flipped]


@dataclass(frozen=True, kw_only=True)
class ProbeSeries:
    """Probes of one kind of product, by number of rows M, ascending. `end_reason`: why larger M were skipped; None if
    none were."""

    probes: dict[int, Probe]
    end_reason: str | None

    def nearest(self, num_rows: int) -> Probe:
        """The probe for `num_rows`; beyond the largest M, the probe for the largest M."""
        return self.probes[min(num_rows, max(self.probes))]


def make_series(
    name: str, rows: Sequence[int], make_probe: Callable[[int], tuple[Probe, Timer]], *, longest_seconds: float
) -> ProbeSeries:
    """Builds the probes of one kind for M in `rows`. `make_probe(M)` returns a probe and the timer that it reads. Skips
    larger M once a call, after a warm-up, takes over `longest_seconds`."""
    probes: dict[int, Probe] = {}
    ascending = sorted(rows)
    for index, num_rows in enumerate(ascending):
        probes[num_rows], timer = make_probe(num_rows)
        seconds = timer.warm_seconds()
        if seconds > longest_seconds and ascending[index + 1 :]:
            missing = ", ".join(map(str, ascending[index + 1 :]))
            end = (
                f"{name}: M={num_rows} takes {seconds:.2g} s, limit {longest_seconds:.2g} s: M={missing} not measured, "
                f"assumed as fast as M={num_rows}; raise measure.seconds to measure it"
            )
            return ProbeSeries(probes=probes, end_reason=end)
    return ProbeSeries(probes=probes, end_reason=None)


class Matrices:
    """Random (width, width) matrices by dtype, created on first use: `num_bytes` per dtype, at least one matrix."""

    def __init__(self, device: ComputeDevice, *, width: int, num_bytes: int):
        self._device, self.width, self._num_bytes = device, width, num_bytes
        self._matrices: dict[str, list[torch.Tensor]] = {}

    def get(self, dtype: str) -> Sequence[torch.Tensor]:
        if dtype not in self._matrices:
            one = torch.randn(self.width, self.width, device=self._device.torch_device).to(DTYPES[dtype])
            count = max(1, self._num_bytes // one.nbytes)
            self._matrices[dtype] = [one.clone() for _ in range(count)]
        return self._matrices[dtype]


def matmul_timer(
    inputs: Sequence[torch.Tensor],
    batches: Sequence[Sequence[torch.Tensor]],
    device: ComputeDevice,
    multiply: Multiply = F.linear,
    *,
    clock: Clock = time.perf_counter,
) -> Timer:
    """Times products of a layer, in FLOPs. A call multiplies inputs[i] (M, K) by matrix i of a batch, for all i, and
    the next call uses the next batch of `batches`. All batches have matrices of the same shapes."""
    batch_cycle = cycle(batches)

    def multiply_batch() -> torch.Tensor:
        return [multiply(x_MK, weight) for x_MK, weight in zip(inputs, next(batch_cycle), strict=True)][-1]

    flops = sum(2.0 * len(x_MK) * weight.numel() for x_MK, weight in zip(inputs, batches[0], strict=True))
    return Timer(flops, multiply_batch, device.wait_for_compute, clock=clock)


def product_probes(
    kind: ProductKind, rows: Sequence[int], matrices: Matrices, device: ComputeDevice, *, longest_seconds: float
) -> ProbeSeries:
    """The probes of one kind of product with the default backend."""

    def probe(num_rows: int) -> tuple[Probe, Timer]:
        x_MK = torch.randn(num_rows, matrices.width, device=device.torch_device).to(DTYPES[kind.compute])
        timer = product_timer(kind, x_MK, matrices, device)
        return Probe(name=kind.name(num_rows), unit="GFLOP/s", read=timer), timer

    return make_series(str(kind), rows, probe, longest_seconds=longest_seconds)


def product_timer(kind: ProductKind, x_MK: torch.Tensor, matrices: Matrices, device: ComputeDevice) -> Timer:
    """Times one product per call, with the next matrix at each call."""

    def make_weight(matrix: torch.Tensor) -> torch.Tensor:
        if matrix.dtype == x_MK.dtype and matrix.device.type != "cpu":
            return matrix
        return StoredWeight([[matrix]], matrix.shape, x_MK.dtype, is_stacked=False)

    batches = [[make_weight(matrix)] for matrix in matrices.get(kind.stored)]
    bias_N = x_MK.new_zeros(matrices.width)

    def multiply_flipped(x_MK: torch.Tensor, weight_KN: torch.Tensor) -> torch.Tensor:
        return torch.addmm(bias_N, x_MK, weight_KN)

    return matmul_timer([x_MK], batches, device, multiply_flipped if kind.is_flipped else F.linear)


def upcast_probes(device: ComputeDevice, *, width: int) -> list[Probe]:
    """Probes of dequantizing quantized rows to float32 in a reused buffer, in numbers per second."""

    def probe(name: str, rows: Rows) -> Probe:
        def dequantize() -> None:
            for _ in panels([rows], torch.float32):
                pass

        timer = Timer(width * width, dequantize, device.wait_for_compute)
        return Probe(name=f"widening, {name}", unit="G numbers/s", read=timer)

    def random_bytes(num_columns: int) -> torch.Tensor:
        return torch.randint(0, 120, (width, num_columns), dtype=torch.uint8).to(device.torch_device)

    scales = torch.ones(-(-width // 128), -(-width // 128), device=device.torch_device)
    exponents = torch.ones(width, -(-width // 32), device=device.torch_device)
    probes = [
        probe("FP8", ScaledRows(random_bytes(width), torch.float8_e4m3fn, scales, 128, 128)),
        probe("MXFP4", ScaledRows(random_bytes(width // 2), None, exponents, 1, 32)),
    ]
    for dtype in ("Q8_0", "Q4_K"):
        block = BLOCKS[dtype]
        stored = random_bytes(width // block.num_numbers * block.num_bytes)
        probes.append(probe(dtype, gguf_rows(stored, dtype, width, None)))
    return probes


class BackendProductKind(NamedTuple):
    """A kind of product for which backends are compared. `inputs` and `stored`: dtypes of x and of the weights.
    `is_tall`: K > N."""

    inputs: str
    stored: str
    is_tall: bool

    def __str__(self) -> str:
        return BackendTable.kind(self.stored, is_tall=self.is_tall, inputs=self.inputs)

    @property
    def candidates(self) -> list[LinearBackend]:
        """The backends that support this kind on this machine."""
        x, weight = torch.zeros(1, 512, dtype=DTYPES[self.inputs]), torch.zeros(512, 512, dtype=DTYPES[self.stored])
        return supported_backends(x, [weight])

    def default(self, num_rows: int) -> LinearBackend:
        """The backend that runs use without measurements."""
        return default_backend(self.candidates.__contains__, num_rows, DTYPES[self.inputs])

    def name(self, backend: LinearBackend, num_rows: int) -> str:
        return f"{backend.value}, {self}, M={num_rows}"


def backend_product_kinds() -> Iterator[BackendProductKind]:
    """Yields all kinds for which backends are compared. Float32 inputs go with weights of any dtype, 16-bit inputs with
    weights of the same dtype."""
    for inputs, stored, is_tall in product(DTYPE_NAMES.values(), DTYPE_NAMES.values(), (False, True)):
        if inputs in (FLOAT32, stored):
            yield BackendProductKind(inputs, stored, is_tall)


def backend_probes(rows: Sequence[int], matrices: Matrices, *, longest_seconds: float) -> list[ProbeSeries]:
    """Probes of the rate in FLOPs of each kind and backend, at the numbers of rows in `ROWS` up to max(rows)."""

    def series(kind: BackendProductKind, backend: LinearBackend) -> ProbeSeries:
        # N : K is 4 : 1, or 1 : 4 if tall.
        num_inputs = matrices.width * 2 if kind.is_tall else matrices.width // 2

        def multiply(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
            return BACKENDS[backend](x_MK, [weight_NK])

        def probe(num_rows: int) -> tuple[Probe, Timer]:
            batches = [[matrix.view(-1, num_inputs)] for matrix in matrices.get(kind.stored)]
            x_MK = torch.randn(num_rows, num_inputs).to(DTYPES[kind.inputs])
            timer = matmul_timer([x_MK], batches, ComputeDevice("cpu"), multiply)
            return Probe(name=kind.name(backend, num_rows), unit="GFLOP/s", read=timer), timer

        return make_series(f"{backend.value}, {kind}", _compared_rows(rows), probe, longest_seconds=longest_seconds)

    return [series(kind, backend) for kind in backend_product_kinds() for backend in kind.candidates]


def fastest_backends(rows: Sequence[int], figures: Mapping[str, Figure]) -> BackendTable:
    """A table of the fastest backend by kind and M: the default, unless another is faster by `MIN_GAIN` in the median
    and its slowest round is faster than the default's fastest. For M that were skipped, a backend has its rate at the
    largest M measured. `figures`: by probe name."""

    def fastest(kind: BackendProductKind, num_rows: int) -> LinearBackend:
        def figure(backend: LinearBackend) -> Figure:
            # The figure at the largest measured M up to `num_rows`.
            names = [kind.name(backend, num_compared) for num_compared in _compared_rows([num_rows])]
            return next(figures[name] for name in reversed(names) if name in figures)

        default = kind.default(num_rows)
        best = max(kind.candidates, key=lambda backend: figure(backend).value)
        is_worth_it = figure(best).value > (1 + MIN_GAIN) * figure(default).value
        return best if is_worth_it and figure(best).low > figure(default).high else default

    compared = _compared_rows(rows)
    multipliers = {str(kind): [fastest(kind, num_rows) for num_rows in compared] for kind in backend_product_kinds()}
    return BackendTable(rows=compared, multipliers=multipliers)


def _compared_rows(rows: Sequence[int]) -> list[int]:
    """The numbers of rows in ROWS up to the largest of `rows`."""
    return [number for number in ROWS if number <= max(rows)]
