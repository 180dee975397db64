"""Rates and overheads of a machine, from which the cost model computes seconds.

A **lane** is a micro-batch; a **paged** expert is read by itself, only when a token is routed to it.
"""

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
# Kernel launches to dequantize a matrix, or the experts' matrices of one kind. Plain torch operators take about ten.
DEQUANTIZE_LAUNCHES = 2


class StoredWork(NamedTuple):
    """Amount of quantized weights, possibly an average."""

    num_elements: float = 0.0
    num_bytes: float = 0.0  # as stored
    num_matrices: float = 0.0  # a matrix of each expert, stored as one stack, counts once

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
    """Rates of a machine, or of one rank's share, for one compute dtype.

    An operation takes no time at its default rate. `gemm_flops_per_second` and `expert_flops_per_second` map the rows
    of a product to its FLOP/s. They include the conversion of stored weights; those of experts also include gathering
    tokens and adding outputs.
    """

    disk_bytes_per_second: float
    gemm_flops_per_second: Mapping[int, float]
    link_in_bytes_per_second: float = UNLIMITED  # host to device, from pinned memory
    link_out_bytes_per_second: float = UNLIMITED  # device to host
    shard_bytes_per_second: float | None = None  # weights that all ranks load in shards; None: each uses its own link
    memory_bytes_per_second: float = UNLIMITED  # memory of the compute device, for activations
    attention_bytes_per_second: float = UNLIMITED  # KV bytes in decode attention on the compute device
    cpu_attention_bytes_per_second: float = UNLIMITED  # KV bytes in decode attention on the CPU
    prefill_attention_flops_per_second: float = UNLIMITED  # FLOPs of pairs of query and key
    expert_flops_per_second: Mapping[int, float] = field(default_factory=dict)  # empty: not measured
    cpu_flops_per_second: float | None = None  # products on the host of an accelerator; None: not known
    host_memory_bytes_per_second: float = UNLIMITED  # of an accelerator's host; disk, links and CPU share it
    exchange_bytes_per_second: float = UNLIMITED  # hidden-vector bytes in all exchanges between ranks in a layer
    exchange_seconds: float = 0.0  # latency of these exchanges
    dequantize_bytes_per_second: float = UNLIMITED  # stored bytes read plus dequantized bytes written
    launch_seconds: float = 0.0  # per operator
    turn_seconds: float = 0.0  # overhead of a lane in a stage, such as kernel launches
    hit_seconds: float = 0.0  # overhead of an expert that is multiplied by itself, as one that was read
    pass_seconds: float = 0.0  # overhead of a pass

    @property
    def weights_in_bytes_per_second(self) -> float:
        """The rate at which weights reach the device's memory."""
        return self.shard_bytes_per_second or self.link_in_bytes_per_second

    @property
    def host_shares(self) -> Mapping[Resource, float]:
        """The share of host memory bandwidth that each resource uses while busy.

        Omits resources with an unlimited rate; empty if the bandwidth of host memory is unlimited.
        """
        rates = {
            Resource.disk: self.disk_bytes_per_second,
            Resource.host_to_device: self.link_in_bytes_per_second,
            Resource.device_to_host: self.link_out_bytes_per_second,
            Resource.cpu_attention: self.cpu_attention_bytes_per_second,
        }
        host = self.host_memory_bytes_per_second
        return {resource: rate / host for resource, rate in rates.items() if rate < UNLIMITED and host < UNLIMITED}

    def map_rates(self, names: Iterable[str], change: Callable[[float], float]) -> "MachineRates":
        """Returns the rates with `change` applied to the named fields: to numbers, and to all values of mappings."""

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
        """Returns the FLOP/s of a product of `num_rows`.

        It is interpolated between measured numbers of rows, constant above the largest, and proportional to the rows
        below the smallest.
        """
        return _rate(self._gemm_points, num_rows)

    def expert_rate(self, num_rows: Numbers) -> Numbers:
        """Returns the FLOP/s of an expert with `num_rows` tokens. Uses `gemm_rate` if experts were not measured."""
        return _rate(self._expert_points or self._gemm_points, num_rows)

    def gemm_seconds(self, num_rows: Numbers, num_weights: Numbers | float) -> Numbers:
        """Returns the seconds of a product of `num_rows`, which must be positive, with `num_weights`."""
        return 2.0 * num_rows * num_weights / self.gemm_rate(num_rows)

    def has_code_kernels(self, item_bytes: int) -> bool:
        """True if device kernels multiply a few rows with quantized codes directly. `item_bytes`: compute dtype."""
        return self.dequantize_bytes_per_second < UNLIMITED and item_bytes == 2

    def codes_seconds(self, stored: StoredWork, num_rows: Numbers) -> Numbers:
        """Returns the seconds of a product with quantized codes.

        Decoding and multiplying overlap, so the longer one counts. Measurements show that decoding takes as long as
        reading 16-bit elements.
        """
        decoding = 2.0 * stored.num_elements / self.dequantize_bytes_per_second
        products = 2.0 * num_rows * stored.num_elements / max(self.gemm_flops_per_second.values())
        return larger(decoding, products)

    def dequantize_seconds(self, stored: StoredWork, item_bytes: int) -> float:
        """Returns the seconds to read and dequantize weights, and to write them with `item_bytes` per element."""
        num_bytes = stored.num_bytes + stored.num_elements * item_bytes
        launches = DEQUANTIZE_LAUNCHES * stored.num_matrices
        return num_bytes / self.dequantize_bytes_per_second + launches * self.launch_seconds

    def experts_seconds(self, num_hit: Numbers, num_visits: Numbers, num_weights: float) -> Numbers:
        """Returns the seconds of `num_hit` experts of `num_weights` each, if all have the same number of tokens.

        `num_visits`: tokens of all these experts together.
        """
        return 2.0 * num_visits * num_weights / self.expert_rate(num_visits / num_hit)

    @cached_property
    def _gemm_points(self) -> list[tuple[int, float]]:
        return sorted(self.gemm_flops_per_second.items())

    @cached_property
    def _expert_points(self) -> list[tuple[int, float]]:
        return sorted(self.expert_flops_per_second.items())


def interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """Interpolates linearly between points (x, y) with ascending x; constant outside."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def _rate(points: Sequence[tuple[int, float]], num_rows: Numbers) -> Numbers:
    """Returns the FLOP/s for `num_rows`. `points`: (rows, FLOP/s), ascending."""
    if isinstance(num_rows, np.ndarray):
        return np.interp(num_rows, [0.0, *(rows for rows, _ in points)], [0.0, *(rate for _, rate in points)])
    first_rows, first = points[0]
    return first * num_rows / first_rows if num_rows <= first_rows else interpolate(points, num_rows)
