"""Rates of a machine, as the cost model uses them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...resources import Resource
from ..placement.dequantized import needs_dequantizing
from ..shape.numbers import Numbers, larger
from ..shape.shapes import Parameter

UNLIMITED = float("inf")
COMPUTE_RATES = (  # rates of the compute device
    "gemm_flops_per_second",
    "expert_flops_per_second",
    "memory_bytes_per_second",
    "attention_bytes_per_second",
    "prefill_attention_flops_per_second",
)
DEQUANTIZE_LAUNCHES = 2  # per matrix, or stack of experts, with kernels; torch operators take about ten


class StoredWork(NamedTuple):
    """Quantized weights: elements, stored bytes, and matrices (a stack of experts counts once)."""

    num_elements: float = 0.0
    num_bytes: float = 0.0
    num_matrices: float = 0.0

    @staticmethod
    def from_parameters(parameters: Iterable[Parameter], compute_dtype: str) -> "StoredWork":
        quantized = [p for p in parameters if needs_dequantizing(p, compute_dtype)]
        return StoredWork(
            float(sum(p.num_elements for p in quantized)),
            float(sum(p.num_bytes for p in quantized)),
            float(sum(len(p.pieces[0]) for p in quantized)),
        )

    def plus(self, other: "StoredWork") -> "StoredWork":
        return StoredWork(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, share: float) -> "StoredWork":
        return StoredWork(*(share * value for value in self))


NOTHING_STORED = StoredWork()


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """Rates of a machine, or of one rank's share, for one compute dtype. The defaults cost nothing.

    `gemm_flops_per_second` maps the rows (M) of a product to its rate, including the conversion of stored weights.
    `expert_flops_per_second`: the same for an expert, from gathering its tokens to adding its outputs; empty if not
    measured. `exchange_*`: all exchanges between ranks in one layer: hidden-vector bytes per second, and latency.
    `attention_*`: decode attention per byte of KV, on the compute device and on the CPU's workers;
    `prefill_attention_*` per FLOP of query-key pairs. `turn_seconds`: overhead of a lane in a stage, such as launches;
    `hit_seconds`: of each paged expert; `pass_seconds`: of a pass.
    """

    disk_bytes_per_second: float
    gemm_flops_per_second: Mapping[int, float]
    link_in_bytes_per_second: float = UNLIMITED  # host -> device, from pinned memory
    link_out_bytes_per_second: float = UNLIMITED
    shard_bytes_per_second: float | None = None  # weights loaded in shards by all ranks; None: over the link
    memory_bytes_per_second: float = UNLIMITED  # of the compute device, read and written by activations
    attention_bytes_per_second: float = UNLIMITED
    cpu_attention_bytes_per_second: float = UNLIMITED
    prefill_attention_flops_per_second: float = UNLIMITED
    expert_flops_per_second: Mapping[int, float] = field(default_factory=dict)
    cpu_flops_per_second: float | None = None  # products on an accelerator's host; None: not known
    host_memory_bytes_per_second: float = UNLIMITED  # shared by disk, links and CPU; of an accelerator's host
    exchange_bytes_per_second: float = UNLIMITED
    exchange_seconds: float = 0.0
    dequantize_bytes_per_second: float = UNLIMITED  # stored and dequantized bytes together
    launch_seconds: float = 0.0  # of one operator
    turn_seconds: float = 0.0
    hit_seconds: float = 0.0
    pass_seconds: float = 0.0

    @property
    def weights_in_bytes_per_second(self) -> float:
        """The rate of weight transfers into the device's memory."""
        return self.shard_bytes_per_second or self.link_in_bytes_per_second

    @property
    def host_shares(self) -> Mapping[Resource, float]:
        """The share of host memory bandwidth that each resource uses while busy; empty if either rate is unlimited."""
        rates = {
            Resource.disk: self.disk_bytes_per_second,
            Resource.host_to_device: self.link_in_bytes_per_second,
            Resource.device_to_host: self.link_out_bytes_per_second,
            Resource.cpu_attention: self.cpu_attention_bytes_per_second,
        }
        host = self.host_memory_bytes_per_second
        return {resource: rate / host for resource, rate in rates.items() if rate < UNLIMITED and host < UNLIMITED}

    def map_rates(self, names: Iterable[str], change: Callable[[float], float]) -> "MachineRates":
        """Returns the rates with `change` applied to these fields, and to each entry of mappings; None stays None."""

        def map_value(value: float | Mapping[int, float] | None) -> float | Mapping[int, float] | None:
            if isinstance(value, Mapping):
                return {rows: change(rate) for rows, rate in value.items()}
            return None if value is None else change(value)

        return replace(self, **{name: map_value(getattr(self, name)) for name in names})

    def layer_exchange_seconds(self, num_bytes: Numbers) -> Numbers:
        """Returns the seconds of a layer's exchanges between ranks, for `num_bytes` of hidden vectors."""
        return num_bytes / self.exchange_bytes_per_second + self.exchange_seconds

    def to_plain(self) -> dict[str, object]:
        """Returns values for JSON, which has no infinity and no integer keys: both become text."""

        def plain(value: object) -> object:
            if isinstance(value, Mapping):
                return {str(rows): rate for rows, rate in value.items()}
            return str(value) if value == UNLIMITED else value

        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}

    @staticmethod
    def from_plain(values: Mapping[str, object]) -> "MachineRates":
        """Inverse of `to_plain`. Raises KeyError, TypeError or ValueError for invalid `values`."""

        def parse(value: object) -> object:
            if isinstance(value, Mapping):
                return {int(rows): float(rate) for rows, rate in value.items()}
            return None if value is None else float(str(value))

        rates = {field.name: parse(values[field.name]) for field in fields(MachineRates)}
        return MachineRates(**rates)  # pyright: ignore[reportArgumentType] - names and types are checked above

    @property
    def has_expert_rates(self) -> bool:
        return bool(self.expert_flops_per_second)

    def gemm_rate(self, num_rows: Numbers) -> Numbers:
        """Returns the FLOP/s of a product of `num_rows`: interpolated between measured points, constant beyond the
        last, proportional to the rows below the first."""
        return _rate(self._gemm_points, num_rows)

    def expert_rate(self, num_rows: Numbers) -> Numbers:
        """Returns the FLOP/s of an expert's product; that of `gemm_rate` if not measured."""
        return _rate(self._expert_points or self._gemm_points, num_rows)

    def gemm_seconds(self, num_rows: Numbers, num_weights: Numbers | float) -> Numbers:
        """Returns the seconds of a product; `num_rows` must be positive."""
        return 2.0 * num_rows * num_weights / self.gemm_rate(num_rows)

    def has_code_kernels(self, item_bytes: int) -> bool:
        """True if device kernels multiply a few rows with quantized codes directly."""
        return self.dequantize_bytes_per_second < UNLIMITED and item_bytes == 2

    def codes_seconds(self, stored: StoredWork, num_rows: Numbers) -> Numbers:
        """Returns the seconds of a product with quantized codes. Decoding and multiplying overlap: the longer counts.
        Decoding takes as long as reading 16-bit elements, as measured."""
        decoding = 2.0 * stored.num_elements / self.dequantize_bytes_per_second
        products = 2.0 * num_rows * stored.num_elements / max(self.gemm_flops_per_second.values())
        return larger(decoding, products)

    def dequantize_seconds(self, stored: StoredWork, item_bytes: int) -> float:
        """Returns the seconds to dequantize to `item_bytes` per element: one read, one write, a few launches."""
        num_bytes = stored.num_bytes + stored.num_elements * item_bytes
        launches = DEQUANTIZE_LAUNCHES * stored.num_matrices
        return num_bytes / self.dequantize_bytes_per_second + launches * self.launch_seconds

    def experts_seconds(self, num_hit: Numbers, num_visits: Numbers, num_weights: float) -> Numbers:
        """Returns the seconds of `num_hit` experts of `num_weights` each, with even shares of the visits."""
        return 2.0 * num_visits * num_weights / self.expert_rate(num_visits / num_hit)

    @cached_property
    def _gemm_points(self) -> list[tuple[int, float]]:
        return sorted(self.gemm_flops_per_second.items())

    @cached_property
    def _expert_points(self) -> list[tuple[int, float]]:
        return sorted(self.expert_flops_per_second.items())


def interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """Interpolates linearly between ascending points; constant outside."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def _rate(points: Sequence[tuple[int, float]], num_rows: Numbers) -> Numbers:
    if isinstance(num_rows, np.ndarray):
        return np.interp(num_rows, [0.0, *(rows for rows, _ in points)], [0.0, *(rate for _, rate in points)])
    first_rows, first = points[0]
    return first * num_rows / first_rows if num_rows <= first_rows else interpolate(points, num_rows)
