"""Which way to multiply is the fastest on this CPU: each with weights of each dtype, wide and tall, at some rows.

M rows, N outputs, K inputs.
"""

from collections.abc import Mapping, Sequence
from itertools import product

import torch

from ..linear.backends import BACKENDS, STORED, default_backend, fitting
from ..profiles import BackendTable, LinearBackend
from ..stream.device import ComputeDevice
from .linear import Matrices, ProbeSeries, multiplying, series_of
from .timing import Figure, Probe, Timed

WORTHWHILE = 0.05  # by which another must be faster than the usual one: less is what a minute changes
ROWS = (1, 4, 16, 64, 256, 512)  # behind which ratios change little; beyond MANY_ROWS panels are larger


def multiplier_rows(rows: Sequence[int], matrices: Matrices, *, longest_seconds: float) -> list[ProbeSeries]:
    """Probes of FLOPs, for each way to multiply a kind of weights."""

    def series(stored: str, is_tall: bool, backend: LinearBackend) -> ProbeSeries:
        def probe(num_rows: int) -> tuple[Probe, Timed]:
            return _probe(stored, is_tall=is_tall, num_rows=num_rows, backend=backend, matrices=matrices)

        name = f"{backend.value}, {BackendTable.kind(stored, is_tall=is_tall)}"
        return series_of(name, _rows(rows), probe, longest_seconds=longest_seconds)

    return [
        series(stored, is_tall, backend)
        for stored, is_tall in product(STORED.values(), (False, True))
        for backend in candidates(stored)
    ]


def product_table(rows: Sequence[int], figures: Mapping[str, Figure]) -> BackendTable:
    """The usual backend where no other is faster by `WORTHWHILE`, in all rounds. One that was too slow to be
    measured with so many rows is as fast as with the most that it was measured with."""

    def fastest(stored: str, is_tall: bool, num_rows: int) -> LinearBackend:
        def figure(backend: LinearBackend) -> Figure:
            names = [_name(stored, is_tall=is_tall, num_rows=each, backend=backend) for each in _rows([num_rows])]
            return next(figures[name] for name in reversed(names) if name in figures)

        ways = candidates(stored)
        usual = default_backend(ways.__contains__, num_rows)
        best = max(ways, key=lambda backend: figure(backend).value)
        is_worth_it = figure(best).value > (1 + WORTHWHILE) * figure(usual).value
        return best if is_worth_it and figure(best).low > figure(usual).high else usual

    found = _rows(rows)
    kinds = product(STORED.values(), (False, True))
    return BackendTable(
        rows=found,
        multipliers={
            BackendTable.kind(stored, is_tall=is_tall): [fastest(stored, is_tall, num_rows) for num_rows in found]
            for stored, is_tall in kinds
        },
    )


def _rows(rows: Sequence[int]) -> list[int]:
    """The rows that ways are compared at, as far as products are measured at all."""
    return [number for number in ROWS if number <= max(rows)]


def candidates(stored: str) -> list[LinearBackend]:
    """What multiplies float32 with weights of this dtype here."""
    return fitting(torch.zeros(1, 512), [torch.zeros(512, 512, dtype=getattr(torch, stored))])


def _name(stored: str, *, is_tall: bool, num_rows: int, backend: LinearBackend) -> str:
    return f"{backend.value}, {BackendTable.kind(stored, is_tall=is_tall)}, M={num_rows}"


def _probe(
    stored: str, *, is_tall: bool, num_rows: int, backend: LinearBackend, matrices: Matrices
) -> tuple[Probe, Timed]:
    """Weights have four times as many outputs as inputs, or the other way round."""
    num_inputs = matrices.width * 2 if is_tall else matrices.width // 2
    name = _name(stored, is_tall=is_tall, num_rows=num_rows, backend=backend)
    batches = [[matrix.view(-1, num_inputs)] for matrix in matrices.of(stored)]

    def multiply(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        return BACKENDS[backend](x_MK, [weight_NK])

    timed = multiplying([torch.randn(num_rows, num_inputs)], batches, ComputeDevice("cpu"), multiply)
    return Probe(name=name, unit="GFLOP/s", read=timed), timed
