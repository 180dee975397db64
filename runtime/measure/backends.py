"""Which way to multiply is the fastest on this CPU: each with inputs and weights of each dtype,
wide and tall, at some rows.

M rows, N outputs, K inputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch

from ..config.profiles import FLOAT32, BackendTable, LinearBackend
from ..linear.backends import BACKENDS, STORED, default_backend, fitting
from ..stream.device import ComputeDevice
from .linear import DTYPES, Matrices, ProbeSeries, multiplying, series_of
from .timing import Figure, Probe, Timed

WORTHWHILE = 0.05  # by which another must be faster than the usual one: less is what a minute changes
ROWS = (1, 4, 16, 64, 256, 512)  # behind which ratios change little; beyond MANY_ROWS panels are larger


class Kind(NamedTuple):
    """Products of inputs of a dtype with weights that are stored in one, tall or wide."""

    inputs: str
    stored: str
    is_tall: bool

    def __str__(self) -> str:
        return BackendTable.kind(self.stored, is_tall=self.is_tall, inputs=self.inputs)

    @property
    def candidates(self) -> list[LinearBackend]:
        """What multiplies them here."""
        x, weight = torch.zeros(1, 512, dtype=DTYPES[self.inputs]), torch.zeros(512, 512, dtype=DTYPES[self.stored])
        return fitting(x, [weight])

    def usual(self, num_rows: int) -> LinearBackend:
        """What the rule takes here."""
        return default_backend(self.candidates.__contains__, num_rows, DTYPES[self.inputs])

    def name(self, backend: LinearBackend, num_rows: int) -> str:
        return f"{backend.value}, {self}, M={num_rows}"


def kinds() -> Iterator[Kind]:
    """Inputs of 16 bits meet weights that are stored in their own dtype."""
    for inputs, stored, is_tall in product(STORED.values(), STORED.values(), (False, True)):
        if inputs in (FLOAT32, stored):
            yield Kind(inputs, stored, is_tall)


def multiplier_rows(rows: Sequence[int], matrices: Matrices, *, longest_seconds: float) -> list[ProbeSeries]:
    """Probes of FLOPs, for each way to multiply a kind of weights."""

    def series(kind: Kind, backend: LinearBackend) -> ProbeSeries:
        def probe(num_rows: int) -> tuple[Probe, Timed]:
            return _probe(kind, num_rows=num_rows, backend=backend, matrices=matrices)

        return series_of(f"{backend.value}, {kind}", _rows(rows), probe, longest_seconds=longest_seconds)

    return [series(kind, backend) for kind in kinds() for backend in kind.candidates]


def product_table(rows: Sequence[int], figures: Mapping[str, Figure]) -> BackendTable:
    """The usual backend where no other is faster by `WORTHWHILE`, in all rounds. One that was too slow to be
    measured with so many rows is as fast as with the most that it was measured with."""

    def fastest(kind: Kind, num_rows: int) -> LinearBackend:
        def figure(backend: LinearBackend) -> Figure:
            names = [kind.name(backend, each) for each in _rows([num_rows])]
            return next(figures[name] for name in reversed(names) if name in figures)

        usual = kind.usual(num_rows)
        best = max(kind.candidates, key=lambda backend: figure(backend).value)
        is_worth_it = figure(best).value > (1 + WORTHWHILE) * figure(usual).value
        return best if is_worth_it and figure(best).low > figure(usual).high else usual

    found = _rows(rows)
    return BackendTable(
        rows=found, multipliers={str(kind): [fastest(kind, num_rows) for num_rows in found] for kind in kinds()}
    )


def _rows(rows: Sequence[int]) -> list[int]:
    """The rows that ways are compared at, as far as products are measured at all."""
    return [number for number in ROWS if number <= max(rows)]


def _probe(kind: Kind, *, num_rows: int, backend: LinearBackend, matrices: Matrices) -> tuple[Probe, Timed]:
    """Weights have four times as many outputs as inputs, or the other way round."""
    num_inputs = matrices.width * 2 if kind.is_tall else matrices.width // 2
    batches = [[matrix.view(-1, num_inputs)] for matrix in matrices.of(kind.stored)]

    def multiply(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        return BACKENDS[backend](x_MK, [weight_NK])

    x_MK = torch.randn(num_rows, num_inputs).to(DTYPES[kind.inputs])
    timed = multiplying([x_MK], batches, ComputeDevice("cpu"), multiply)
    return Probe(name=kind.name(backend, num_rows), unit="GFLOP/s", read=timed), timed
