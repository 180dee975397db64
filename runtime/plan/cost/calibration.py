"""Calibration of machine rates, by profiled layers before a run, and by the first passes of the run.

Rates measured on single products are too optimistic, as products run faster alone than within a layer. The functions
are pure, so that a resumed run derives the same rates. A **lane** is a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean

from ...resources import Resource
from ..placement.memory import MicroBatch, pass_tokens
from ..shape.model import ModelShape
from .lane_work import LaneWork, Piece
from .rates import COMPUTE_RATES, UNLIMITED, MachineRates, interpolate
from .work import StageWork

MEASURED_ROWS = (1, 16, 64, 128, 256, 512)  # rows of measured products: small lanes, and sizes where kernels change
MIN_PRODUCT_SHARE = 0.25  # a layer that spends less of its time in products is not used to fit their rate
MAX_FIT_FACTOR = 2.0  # a fit changes product rates by 1/2 to 2
MAX_CORRECTION = 2.0  # a correction changes rates by 1/2 to 2; a larger error has another cause
MIN_SECONDS = 0.01  # the rate of a resource that was busy for less time is not corrected
CORRECTED_RATES = {  # resource -> field of `MachineRates`; compute has `COMPUTE_RATES`
    Resource.disk: "disk_bytes_per_second",
    Resource.host_to_device: "link_in_bytes_per_second",
    Resource.device_to_host: "link_out_bytes_per_second",
    Resource.cpu_attention: "cpu_attention_bytes_per_second",
}


@dataclass(frozen=True, kw_only=True)
class TypicalLoad:
    """Sizes of a run's lanes that determine the time of products and attention."""

    chunk_tokens: int  # maximum prefill tokens of a lane in a pass
    num_rows: int  # sequences of the largest lane
    num_prompt_tokens: int  # per prompt, on average
    num_positions: int  # KV positions of an average sequence halfway through its output

    @staticmethod
    def from_lanes(shape: ModelShape, lanes: Sequence[MicroBatch], prefill_chunk_tokens: int) -> "TypicalLoad":
        sizes = [size for lane in lanes for size in lane]
        num_prompt = sum(size.num_prompt_tokens for size in sizes) // max(1, len(sizes))
        num_new = sum(size.max_new_tokens for size in sizes) // max(1, len(sizes))
        return TypicalLoad(
            chunk_tokens=max([1, *(pass_tokens(shape, lane, prefill_chunk_tokens) for lane in lanes)]),
            num_rows=max([1, *map(len, lanes)]),
            num_prompt_tokens=max(1, num_prompt),
            num_positions=max(1, num_prompt + num_new // 2),
        )

    def covers(self, other: "TypicalLoad") -> bool:
        """True if rates measured for this load are valid for `other`: its sizes are at most twice as large."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(other_size <= 2 * own_size for own_size, other_size in pairs)

    @property
    def product_rows(self) -> list[int]:
        """The rows of products to measure, ascending, up to the maximum of the run."""
        max_rows = max(self.chunk_tokens, self.num_rows)
        return sorted({rows for rows in (*MEASURED_ROWS, self.chunk_tokens, self.num_rows) if rows <= max_rows})

    def profile_passes(self, position_bytes: int, max_bytes: int) -> list[list[Piece]]:
        """Returns two passes to profile, as the sequences of a packed lane.

        The first is a decode pass halfway through the outputs, the second a prefill pass of whole prompts. They have
        fewer or shorter sequences if the KV of a layer would exceed `max_bytes`, at `position_bytes` per position.
        """
        max_positions = max(1, max_bytes // position_bytes)
        chunk, prompt = min(self.chunk_tokens, max_positions), self.num_prompt_tokens
        prompts = [min(prompt, chunk - begin) for begin in range(0, chunk, prompt)]
        num_rows = min(self.num_rows, max_positions)
        num_cached = max(1, min(self.num_positions, max_positions // num_rows) - 1)
        return [
            [Piece(past=num_cached, new=1, num_selected=1)] * num_rows,
            [Piece(past=0, new=new, num_selected=1) for new in prompts],
        ]


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Measured seconds of one lane in one layer, and before the layer."""

    before: float  # from the start of the pass to the layer
    inside: float  # in the layer, experts excluded
    attention: float  # 0: not timed separately

    @staticmethod
    def mean(times: Sequence["LayerSeconds"]) -> "LayerSeconds":
        return LayerSeconds(
            before=fmean(each.before for each in times),
            inside=fmean(each.inside for each in times),
            attention=fmean(each.attention for each in times),
        )


def with_overheads(rates: MachineRates, work: StageWork, single: LayerSeconds) -> MachineRates:
    """Returns the rates with overheads from a measured pass of one token.

    `work` is the work of the measured layer, `single` its time. The overhead of a turn is that time minus the products.
    """
    num_rows = min(rates.gemm_flops_per_second)
    products = 2.0 * num_rows * work.dense_weights / rates.gemm_flops_per_second[num_rows]
    turn = max(0.0, single.inside - products)
    return replace(rates, turn_seconds=turn, pass_seconds=single.before)


def fit_rates(
    rates: MachineRates, shape: ModelShape, work: StageWork, passes: Sequence[tuple[LaneWork, LayerSeconds]]
) -> MachineRates:
    """Returns rates with which the cost model reproduces measured times. `passes`: lanes, with their time in a layer.

    `work` is the work of that layer. Attention gets its measured rate. Product rates are multiplied by a factor, known
    at the measured numbers of rows, interpolated between them and constant beyond. Product rates stay unchanged if
    `work` does not include all products of the layer, such as experts that model code runs.
    """
    has_known_products = not shape.expanded_kv_width and (not work.num_experts or rates.has_expert_rates)
    factors: dict[int, float] = {}
    for lane, layer_seconds in sorted(passes, key=lambda each: each[0].num_tokens):
        if layer_seconds.attention and lane.prefill_pairs:
            flops = 4.0 * shape.num_heads * shape.head_dim * lane.prefill_pairs
            rates = replace(rates, prefill_attention_flops_per_second=flops / layer_seconds.attention)
        elif layer_seconds.attention:
            rate = lane.kv_positions * work.kv_bytes / layer_seconds.attention
            # Without an accelerator (no link), this is also the rate of attention on the CPU.
            cpu_rate = rate if rates.link_in_bytes_per_second == UNLIMITED else rates.cpu_attention_bytes_per_second
            rates = replace(rates, attention_bytes_per_second=rate, cpu_attention_bytes_per_second=cpu_rate)
        predicted = 2.0 * lane.num_tokens * work.dense_weights / rates.gemm_rate(lane.num_tokens)
        other = lane.num_tokens * work.token_bytes / rates.memory_bytes_per_second + rates.turn_seconds
        product_seconds = layer_seconds.inside - other
        if has_known_products and product_seconds > MIN_PRODUCT_SHARE * layer_seconds.inside:
            factors[lane.num_tokens] = min(MAX_FIT_FACTOR, max(1 / MAX_FIT_FACTOR, predicted / product_seconds))
    if not factors:
        return rates
    points = list(factors.items())
    gemm = {rows: rate * interpolate(points, rows) for rows, rate in rates.gemm_flops_per_second.items()}
    return replace(rates, gemm_flops_per_second=gemm)


def correct_rates(
    rates: MachineRates, measured: Mapping[Resource, float], predicted: Mapping[Resource, float]
) -> MachineRates:
    """Returns `rates` multiplied by the ratio of predicted to measured busy seconds, for each resource.

    `measured` and `predicted` are for the same passes. `rates` must be those of the run's start, so that repeated
    corrections stay within the bounds. All rates of compute (products, attention, overheads) get the same factor.
    """

    def factor(resource: Resource) -> float:
        """Returns a factor above 1 if the machine is faster than predicted."""
        actual, expected = measured.get(resource, 0.0), predicted.get(resource, 0.0)
        if min(actual, expected) < MIN_SECONDS:
            return 1.0
        return min(MAX_CORRECTION, max(1 / MAX_CORRECTION, expected / actual))

    compute = factor(Resource.compute)
    result = rates.map_rates(COMPUTE_RATES, lambda rate: rate * compute)
    for resource, name in CORRECTED_RATES.items():
        result = replace(result, **{name: getattr(rates, name) * factor(resource)})
    return result.map_rates(["turn_seconds", "hit_seconds", "pass_seconds"], lambda seconds: seconds / compute)
