"""The benchmark of matrix products of float32 inputs with weights of each storage format.

Compares product times with a floor, from the peak rates of multiply-adds and memory reads in the same rounds. Letters
of shapes: inputs x are (M, K), weights are (N, K), and their scales (N, G) for G groups of columns.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from statistics import median
from typing import Any

import numpy as np
import torch

from runtime.config.profiles import LinearBackend
from runtime.formats.kinds.rounded import Rounding
from runtime.formats.kinds.window4 import escape_words, pack_window4
from runtime.formats.module_tensors import ZEROS
from runtime.formats.registry import FORMATS as STORAGE_FORMATS
from runtime.formats.scaled_rows import SCALES, scaled_rows
from runtime.formats.storage_format import StoredMatrix
from runtime.linear.backends import BACKENDS, choose_backend, supports
from runtime.linear.blocks import Block
from runtime.linear.packed_rows import CodedRows
from runtime.linear.window4_rows import Window4Rows
from runtime.plan.shape.shapes import Companion, TensorSlice
from runtime.units import MIB

from .report import table
from .runner import ask_worker

WEIGHT_BYTES = 256 * MIB  # of the copies of a weight: more than a cache holds
SCALED_WIDTH = 128  # rows and columns that share a scale, as in most published checkpoints
TORCH_BACKENDS = (
    LinearBackend.weights_first,
    LinearBackend.inputs_first,
    LinearBackend.onednn,
)  # torch's products, measured in addition to the chosen backend
TORCH_FORMAT = "bf16"
GIGA = 1e9

Parts = tuple[torch.Tensor, ...]
StoredForm = tuple[Parts, Callable[..., Block]]  # the tensors of a stored weight, and a function that makes it of them


@dataclass(frozen=True, kw_only=True)
class ProductCase:
    """The times of one product: `best` is the shortest in seconds, `middle` the median of the medians of all rounds.
    `num_bytes`: of the weight. `is_chosen`: a run would choose this backend."""

    format: str
    backend: str
    is_chosen: bool
    num_rows: int
    num_bytes: int
    best: float
    middle: float


@dataclass(frozen=True, kw_only=True)
class ProductMeasurements:
    """The times of all products, and the highest FLOP/s and bytes/s of all rounds. `num_lanes`: floats in a vector
    register."""

    outputs: int
    inputs: int
    num_threads: int
    num_lanes: int
    flops_per_second: float
    bytes_per_second: float
    products: Sequence[ProductCase]

    def flops(self, product: ProductCase) -> float:
        return 2.0 * product.num_rows * self.outputs * self.inputs

    def share(self, product: ProductCase) -> float:
        """The floor as a fraction of the product's shortest time. The floor is the time for multiplying or for reading
        the weights, whichever is longer."""
        floor = max(self.flops(product) / self.flops_per_second, product.num_bytes / self.bytes_per_second)
        return floor / product.best


def measure_products(
    *, outputs: int, inputs: int, rows: Sequence[int], num_threads: int, rounds: int
) -> ProductMeasurements:
    """Measures in a separate process."""
    question = {"outputs": outputs, "inputs": inputs, "rows": list(rows), "num_threads": num_threads, "rounds": rounds}
    answer = ask_worker(__name__, question)
    return ProductMeasurements(**{**answer, "products": [ProductCase(**each) for each in answer["products"]]})


def products_table(measured: ProductMeasurements) -> str:
    rows = sorted({product.num_rows for product in measured.products})
    # The rows of the table by format and backend; in each, the products by number of rows.
    lines: dict[tuple[str, bool, str], dict[int, ProductCase]] = {}
    for product in measured.products:
        name = "" if product.is_chosen else product.backend  # the chosen backend may differ by rows
        lines.setdefault((product.format, product.is_chosen, name), {})[product.num_rows] = product
    body = []
    for (name, is_chosen, _), cells in lines.items():
        backends = ", ".join(dict.fromkeys(cells[num_rows].backend for num_rows in rows))
        body.append(
            [name, f"**{backends}**" if is_chosen else backends, *(_cell(measured, cells[each]) for each in rows)]
        )
    headings = [f"{measured.outputs} x {measured.inputs}, weights", "by", *(f"{num_rows} rows" for num_rows in rows)]
    return (
        f"{table(headings, body)}\n\n"
        "GFLOP/s of the fastest product, of the median in brackets, and the fastest as a share of the floor: the "
        f"longer of multiplying at {measured.flops_per_second / GIGA:.0f} GFLOP/s (multiply-adds in registers, "
        f"{measured.num_threads} threads, vectors of {measured.num_lanes}) and reading the weights at "
        f"{measured.bytes_per_second / GIGA:.1f} GB/s. Bold: the backend that a run chooses."
    )


def _cell(measured: ProductMeasurements, product: ProductCase) -> str:
    best, middle = (measured.flops(product) / seconds / GIGA for seconds in (product.best, product.middle))
    return f"{best:.0f} ({middle:.0f}), {measured.share(product):.0%}"


@dataclass(kw_only=True)
class ProductTimer:
    """Times one product. `best` and `medians`: seconds by round."""

    format: str
    backend: LinearBackend
    is_chosen: bool
    x_MK: torch.Tensor
    weights: Iterator[Block]
    num_bytes: int
    best: list[float]
    medians: list[float]

    def measure(self, seconds: float) -> None:
        """Repeats the product for `seconds`, at least once, with other copies of the weight each time."""
        multiply, found = BACKENDS[self.backend], list[float]()
        end = time.perf_counter() + seconds
        while not found or time.perf_counter() < end:
            begin = time.perf_counter()
            multiply(self.x_MK, [next(self.weights)])
            found.append(time.perf_counter() - begin)
        self.best.append(min(found))
        self.medians.append(median(found))


@torch.inference_mode()
def measure(
    *, outputs: int, inputs: int, rows: Sequence[int], num_threads: int, rounds: int, seconds: float = 0.1
) -> ProductMeasurements:
    """Measures each product for `seconds` in each round, after a warm-up that compiles kernels."""
    from .peaks import LANES, bytes_per_second, flops_per_second  # loads numba, for workers only

    torch.set_num_threads(num_threads)
    weights = {name: _copies(form) for name, form in _stored_forms(torch.randn(outputs, inputs) * 0.02).items()}
    cases = [case for name, copies in weights.items() for each in rows for case in _timers(name, copies, inputs, each)]
    for case in cases:
        case.measure(0.0)
        case.best.clear()
        case.medians.clear()
    plain = [block for block in weights["fp32"][0] if isinstance(block, torch.Tensor)]
    peaks = list[tuple[float, float]]()
    for _ in range(rounds):
        for name in weights:  # clock rates drift within a round: measure peaks next to the products of each format
            peaks.append((flops_per_second(num_threads), bytes_per_second(plain, num_threads)))
            for case in (case for case in cases if case.format == name):
                case.measure(seconds)
    products = [
        ProductCase(
            format=case.format,
            backend=case.backend.value,
            is_chosen=case.is_chosen,
            num_rows=len(case.x_MK),
            num_bytes=case.num_bytes,
            best=min(case.best),
            middle=median(case.medians),
        )
        for case in cases
    ]
    return ProductMeasurements(
        outputs=outputs,
        inputs=inputs,
        num_threads=num_threads,
        num_lanes=LANES,
        flops_per_second=max(flops for flops, _ in peaks),
        bytes_per_second=max(read for _, read in peaks),
        products=products,
    )


def _timers(name: str, copies: tuple[Sequence[Block], int], inputs: int, num_rows: int) -> Iterator[ProductTimer]:
    """Yields a timer for the backend that a run chooses and, for bf16, timers for torch's backends. `copies`: as from
    `_copies`."""
    (blocks, num_bytes), x_MK = copies, torch.randn(num_rows, inputs)
    chosen, weights = choose_backend(x_MK, blocks[:1]), cycle(blocks)
    candidates = TORCH_BACKENDS if name == TORCH_FORMAT else ()
    alternatives = [each for each in candidates if each is not chosen and supports(each, x_MK, blocks[:1])]
    for backend in (chosen, *alternatives):
        yield ProductTimer(
            format=name,
            backend=backend,
            is_chosen=backend is chosen,
            x_MK=x_MK,
            weights=weights,
            num_bytes=num_bytes,
            best=[],
            medians=[],
        )


def _copies(form: StoredForm) -> tuple[Sequence[Block], int]:
    """Copies of one weight that fill `WEIGHT_BYTES`, and the bytes of one copy."""
    parts, make_block = form
    num_bytes = sum(part.nbytes for part in parts)
    return [make_block(*(part.clone() for part in parts)) for _ in range(max(2, WEIGHT_BYTES // num_bytes))], num_bytes


def _stored_forms(numbers_NK: torch.Tensor) -> Mapping[str, StoredForm]:
    """The weight in each format of the table, as runs have it in memory."""
    return {
        TORCH_FORMAT: ((numbers_NK.bfloat16(),), _identity),
        "fp16": ((numbers_NK.half(),), _identity),
        "fp32": ((numbers_NK,), _identity),
        "fp8, published": _published_fp8(numbers_NK),
        "window4": _window4(numbers_NK),
        "int8": _rounded(numbers_NK, Rounding("int8")),
        "int4": _rounded(numbers_NK, Rounding("int4")),
        "GPTQ, 4 bits": _gptq(*numbers_NK.shape),
    }


def _identity(numbers_NK: torch.Tensor) -> Block:
    return numbers_NK


def _rounded(numbers_NK: torch.Tensor, rounding: Rounding) -> StoredForm:
    scales_NG = rounding.choose_scales(numbers_NK)
    return (rounding.encode(numbers_NK, scales_NG), scales_NG), lambda codes, scales: CodedRows(
        codes, scales, rounding.encoding
    )


def _window4(numbers_NK: torch.Tensor) -> StoredForm:
    packed = pack_window4(numbers_NK.bfloat16().view(torch.int16).numpy().view(np.uint16))
    escapes = torch.from_numpy(escape_words(packed, len(packed.columns)))
    num_starts = len(numbers_NK) + 1
    return (torch.from_numpy(packed.body), escapes), lambda body, escapes: Window4Rows(body, [escapes], num_starts)


def _published_fp8(numbers_NK: torch.Tensor) -> StoredForm:
    dtype, shape = torch.float8_e4m3fn, [-(-size // SCALED_WIDTH) for size in numbers_NK.shape]
    codes = (numbers_NK * 100).clamp(-448, 448).to(dtype).view(torch.uint8)
    return (codes, torch.full(shape, 0.01)), lambda raw, scales: scaled_rows(
        raw, dtype, scales, SCALED_WIDTH, SCALED_WIDTH
    )


def _gptq(num_rows: int, num_columns: int) -> StoredForm:
    """Random codes of 4 bits, with a scale for each group of `SCALED_WIDTH` columns. All zero points are 8 (7 is
    stored)."""
    num_groups = num_columns // SCALED_WIDTH
    codes = torch.randint(0, 256, (num_columns // 8, 4 * num_rows), dtype=torch.uint8)
    zeros = torch.full((num_groups, num_rows // 2), 0x77, dtype=torch.uint8).view(torch.int32)
    scales = torch.full((num_groups, num_rows), 0.003, dtype=torch.float16)

    def tensor_slice(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSlice:
        return TensorSlice(name=name, file="", offset=0, num_bytes=0, dtype=dtype, shape=shape)

    piece = TensorSlice(
        name="qweight",
        file="",
        offset=0,
        num_bytes=codes.nbytes,
        dtype="I32",
        shape=(num_rows, num_columns),
        format="gptq-int4",
        companions=(
            Companion(
                role=SCALES, tensor=tensor_slice("scales", "F16", (num_groups, num_rows)), block_columns=SCALED_WIDTH
            ),
            Companion(role=ZEROS, tensor=tensor_slice("qzeros", "I32", (num_groups, num_rows // 8))),
        ),
        constants=(1,),
        is_interleaved=True,
    )

    def made(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Block:
        companions = {SCALES: scales, ZEROS: zeros}
        return STORAGE_FORMATS[piece.format].rows(StoredMatrix(piece, codes.view(-1), companions))

    return (codes, scales, zeros), made


def answers(question: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's entry point (`benchmarks.worker`)."""
    yield asdict(measure(**question))
