"""Calibration of machine rates. They are fitted to profiled layers before a run, as products run faster alone than
within a layer, and corrected by the run's first passes. Pure functions: a resumed run derives the same rates.
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

MEASURED_ROWS = (1, 16, 64, 128, 256, 512)  # of products: sizes of short lanes, and those where kernels change
MIN_PRODUCT_SHARE = 0.25  # minimum share of a layer's time in products, to derive a rate from it
MAX_FIT_FACTOR = 2.0  # a fit changes product rates by 1/2 to 2
MAX_CORRECTION = 2.0  # a correction changes rates by 1/2 to 2; a larger error has another cause
MIN_SECONDS = 0.01  # minimum busy time of a resource to correct its rate
CORRECTED_RATES = {  # besides COMPUTE_RATES
    Resource.disk: "disk_bytes_per_second",
    Resource.host_to_device: "link_in_bytes_per_second",
    Resource.device_to_host: "link_out_bytes_per_second",
    Resource.cpu_attention: "cpu_attention_bytes_per_second",
}


@dataclass(frozen=True, kw_only=True)
class TypicalLoad:
    """Sizes of a block's lanes that product and attention times depend on."""

    chunk_tokens: int  # largest prefill tokens of a lane in a pass
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
        """True if rates measured for this load hold for the other: none of its sizes is more than twice as large."""
        own_sizes, other_sizes = astuple(self), astuple(other)
        return all(b <= 2 * a for a, b in zip(own_sizes, other_sizes, strict=True))

    @property
    def product_rows(self) -> list[int]:
        """The rows of products to measure, ascending, up to the maximum of the run."""
        max_rows = max(self.chunk_tokens, self.num_rows)
        return sorted({rows for rows in (*MEASURED_ROWS, self.chunk_tokens, self.num_rows) if rows <= max_rows})

    def profile_passes(self, position_bytes: int, max_bytes: int) -> list[list[Piece]]:
        """Returns the pieces of a packed lane in a decode pass halfway through the outputs, and in a prefill pass of
        whole prompts.

        Shortened if the KV of a layer, at `position_bytes` each, would exceed `most_bytes`.
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
    """Measured seconds of a lane around and in one layer."""

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
    """Returns the rates with fixed overheads: the time of `single`, a pass of one token, minus its products."""
    num_rows = min(rates.gemm_flops_per_second)
    products = 2.0 * num_rows * work.dense_weights / rates.gemm_flops_per_second[num_rows]
    turn = max(0.0, single.inside - products)
    return replace(rates, turn_seconds=turn, pass_seconds=single.before)


def fit_rates(
    rates: MachineRates, shape: ModelShape, work: StageWork, passes: Sequence[tuple[LaneWork, LayerSeconds]]
) -> MachineRates:
    """Returns rates that reproduce the measured seconds of the layer `work` for these lanes.

    Attention gets its measured rate. Product rates are fitted at the rows of the lanes, interpolated between them and
    constant beyond. They stay unchanged if `work` lacks some of the layer's products, such as experts run by model
    code."""
    has_known_products = not shape.expanded_kv_width and (not work.num_experts or rates.has_expert_rates)
    factors: dict[int, float] = {}
    for lane, layer_seconds in sorted(passes, key=lambda each: each[0].num_tokens):
        if layer_seconds.attention and lane.prefill_pairs:
            flops = 4.0 * shape.num_heads * shape.head_dim * lane.prefill_pairs
            rates = replace(rates, prefill_attention_flops_per_second=flops / layer_seconds.attention)
        elif layer_seconds.attention:
            rate = lane.kv_positions * work.kv_bytes / layer_seconds.attention
            # With an accelerator, the CPU's rate is separate.
            cpu_rate = rate if rates.link_in_bytes_per_second == UNLIMITED else rates.cpu_attention_bytes_per_second
            rates = replace(rates, attention_bytes_per_second=rate, cpu_attention_bytes_per_second=cpu_rate)
        products = 2.0 * lane.num_tokens * work.dense_weights / rates.gemm_rate(lane.num_tokens)
        other = lane.num_tokens * work.token_bytes / rates.memory_bytes_per_second + rates.turn_seconds
        product_seconds = layer_seconds.inside - other
        if has_known_products and product_seconds > MIN_PRODUCT_SHARE * layer_seconds.inside:
            factors[lane.num_tokens] = min(MAX_FIT_FACTOR, max(1 / MAX_FIT_FACTOR, products / product_seconds))
    if not factors:
        return rates
    points = list(factors.items())
    gemm = {rows: rate * interpolate(points, rows) for rows, rate in rates.gemm_flops_per_second.items()}
    return replace(rates, gemm_flops_per_second=gemm)


def correct_rates(
    rates: MachineRates, measured: Mapping[Resource, float], predicted: Mapping[Resource, float]
) -> MachineRates:
    """Returns `rates` corrected by the ratio of predicted to measured busy seconds of each resource in the same passes.

    `rates` are those of the run's start, so that repeated corrections stay within the bounds. All compute rates
    (products, attention, overheads) get the same factor.
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
    return result.map_rates(["turn_seconds", "pass_seconds"], lambda seconds: seconds / compute)
