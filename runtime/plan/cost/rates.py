"""How fast a machine is, in what a plan's time follows from."""

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
COMPUTE_RATES = (  # those of where the model computes
    "gemm_flops_per_second",
    "expert_flops_per_second",
    "memory_bytes_per_second",
    "attention_bytes_per_second",
    "prefill_attention_flops_per_second",
)
DEQUANTIZE_LAUNCHES = 2  # of one matrix, or of all experts', by kernels; operators of torch are about ten


class StoredWork(NamedTuple):
    """Weights that must be dequantized before they are multiplied: numbers, the bytes that they lie in, and how many
    matrices they are, those of experts in one place counted once."""

    num_numbers: float = 0.0
    num_bytes: float = 0.0
    num_matrices: float = 0.0

    @staticmethod
    def from_parameter(parameters: Iterable[Parameter], compute_dtype: str) -> "StoredWork":
        found = [p for p in parameters if needs_dequantizing(p, compute_dtype)]
        return StoredWork(
            float(sum(p.num_elements for p in found)),
            float(sum(p.num_bytes for p in found)),
            float(sum(len(p.pieces[0]) for p in found)),
        )

    def plus(self, other: "StoredWork") -> "StoredWork":
        return StoredWork(*(own + its for own, its in zip(self, other, strict=True)))

    def times(self, share: float) -> "StoredWork":
        return StoredWork(*(share * each for each in self))


NOTHING_STORED = StoredWork()


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """The rates of one machine, or of one rank's share of it, and one compute dtype; what is not named takes no time.

    `gemm_flops_per_second` maps rows (M) of a product to its rate, with weights as they are stored: what turns them
    into the compute dtype is in it. `expert_flops_per_second`: the same of an expert, from taking its tokens to adding
    what became of them; empty where it was not measured apart. `exchange`: all that ranks exchange in a layer, by bytes
    of the hidden vectors that go through it, and what it takes beside. `attention` is decode attention, by bytes of
    keys and values, where the model computes and on the CPU's workers; `prefill_attention` by FLOPs of the pairs that
    are looked at. `turn_seconds` is what a lane's pass through a stage takes beside all that, as launching its
    operators does, `hit_seconds` as much of each expert that is read by itself, `pass_seconds` a pass beside its turns.
    """

    disk_bytes_per_second: float
    gemm_flops_per_second: Mapping[int, float]
    link_in_bytes_per_second: float = UNLIMITED  # host -> device, from pinned memory
    link_out_bytes_per_second: float = UNLIMITED
    shard_bytes_per_second: float | None = None  # weights of which other ranks bring their shares; None: over the link
    memory_bytes_per_second: float = UNLIMITED  # of the compute device, read and written by activations
    attention_bytes_per_second: float = UNLIMITED
    cpu_attention_bytes_per_second: float = UNLIMITED
    prefill_attention_flops_per_second: float = UNLIMITED
    expert_flops_per_second: Mapping[int, float] = field(default_factory=dict)
    cpu_flops_per_second: float | None = None  # products on the CPU beside an accelerator; None: not known
    host_memory_bytes_per_second: float = UNLIMITED  # that disk, links and CPU share in front of an accelerator
    exchange_bytes_per_second: float = UNLIMITED
    exchange_seconds: float = 0.0
    dequantize_bytes_per_second: float = UNLIMITED  # of stored weights that become numbers, both counted
    launch_seconds: float = 0.0  # of one operator
    turn_seconds: float = 0.0
    hit_seconds: float = 0.0
    pass_seconds: float = 0.0

    @property
    def weights_in_bytes_per_second(self) -> float:
        """How fast weights come to where compute finds them."""
        return self.shard_bytes_per_second or self.link_in_bytes_per_second

    @property
    def host_shares(self) -> Mapping[Resource, float]:
        """The part of host memory's rate that each takes while it works by its own rate; none where that, or host
        memory's, has no limit."""
        rates = {
            Resource.disk: self.disk_bytes_per_second,
            Resource.host_to_device: self.link_in_bytes_per_second,
            Resource.device_to_host: self.link_out_bytes_per_second,
            Resource.cpu_attention: self.cpu_attention_bytes_per_second,
        }
        host = self.host_memory_bytes_per_second
        return {resource: rate / host for resource, rate in rates.items() if rate < UNLIMITED and host < UNLIMITED}

    def map_rates(self, names: Iterable[str], change: Callable[[float], float]) -> "MachineRates":
        """These rates with those of such names changed, by each number of rows where there are several; what is not
        known stays so."""

        def made(value: float | Mapping[int, float] | None) -> float | Mapping[int, float] | None:
            if isinstance(value, Mapping):
                return {rows: change(rate) for rows, rate in value.items()}
            return None if value is None else change(value)

        return replace(self, **{name: made(getattr(self, name)) for name in names})

    def layer_exchange_seconds(self, num_bytes: Numbers) -> Numbers:
        """Seconds in which ranks exchange what they make in a layer of hidden vectors of so many bytes."""
        return num_bytes / self.exchange_bytes_per_second + self.exchange_seconds

    def to_plain(self) -> dict[str, object]:
        """Plain values for JSON, which has neither infinity nor numbers as keys: text, both of them."""

        def plain(value: object) -> object:
            if isinstance(value, Mapping):
                return {str(rows): rate for rows, rate in value.items()}
            return str(value) if value == UNLIMITED else value

        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}

    @staticmethod
    def from_plain(values: Mapping[str, object]) -> "MachineRates":
        """The inverse of `to_plain`. Raises KeyError, TypeError or ValueError where `values` are no rates."""

        def rate(value: object) -> object:
            if isinstance(value, Mapping):
                return {int(rows): float(each) for rows, each in value.items()}
            return None if value is None else float(str(value))

        found = {each.name: rate(values[each.name]) for each in fields(MachineRates)}
        return MachineRates(**found)  # pyright: ignore[reportArgumentType] - names and types are checked above

    @property
    def has_expert_rates(self) -> bool:
        return bool(self.expert_flops_per_second)

    def gemm_rate(self, num_rows: Numbers) -> Numbers:
        """FLOP/s of a product of so many rows: linear between the measured points, constant beyond the last,
        proportional to the rows below the first."""
        return _rate(self._gemm_points, num_rows)

    def expert_rate(self, num_rows: Numbers) -> Numbers:
        """FLOP/s of an expert's product with its share of the tokens, as `gemm_rate` where it was not measured."""
        return _rate(self._expert_points or self._gemm_points, num_rows)

    def gemm_seconds(self, num_rows: Numbers, num_weights: Numbers | float) -> Numbers:
        """Seconds in which so many rows, more than none, are multiplied with so many weights."""
        return 2.0 * num_rows * num_weights / self.gemm_rate(num_rows)

    def has_code_kernels(self, item_bytes: int) -> bool:
        """Whether kernels of a device multiply a few rows, of so many bytes a number, with stored weights as they
        lie."""
        return self.dequantize_bytes_per_second < UNLIMITED and item_bytes == 2

    def codes_seconds(self, stored: StoredWork, num_rows: Numbers) -> Numbers:
        """Seconds in which kernels multiply so few rows with stored weights as they lie: those of reading the numbers
        in 16 bits, which four bits take as well since they are decoded on the way, or
        of the products at the rate of many rows, whichever are more."""
        reading = 2.0 * stored.num_numbers / self.dequantize_bytes_per_second
        products = 2.0 * num_rows * stored.num_numbers / max(self.gemm_flops_per_second.values())
        return larger(reading, products)

    def dequantize_seconds(self, stored: StoredWork, item_bytes: int) -> float:
        """Seconds in which stored weights become numbers of the compute dtype, of so many bytes each: all that they
        take is read and written once, by a few operators for each matrix."""
        moved = stored.num_bytes + stored.num_numbers * item_bytes
        launches = DEQUANTIZE_LAUNCHES * stored.num_matrices
        return moved / self.dequantize_bytes_per_second + launches * self.launch_seconds

    def experts_seconds(self, num_hit: Numbers, num_visits: Numbers, num_weights: float) -> Numbers:
        """Seconds in which each expert that is hit, of so many weights, multiplies its share of the visits."""
        return 2.0 * num_visits * num_weights / self.expert_rate(num_visits / num_hit)

    @cached_property
    def _gemm_points(self) -> list[tuple[int, float]]:
        return sorted(self.gemm_flops_per_second.items())

    @cached_property
    def _expert_points(self) -> list[tuple[int, float]]:
        return sorted(self.expert_flops_per_second.items())


def interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """Linear between points, which ascend; constant before the first and beyond the last."""
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
