"""What a machine is measured for, and rates made to agree with what was seen: before a run with whole layers, as
products by themselves are faster than among all that a layer does, and nothing but a profiling pass tells by how much;
in a run with its first passes, which show what a measurement of a second could not. Pure, so that a run that is resumed
comes to the same rates.
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

MEASURED_ROWS = (1, 16, 64, 128, 256, 512)  # of products; short lanes, and where the product's own code changes
MIN_PRODUCT_SHARE = 0.25  # of what a layer took, for its products: with less of it they say nothing of each other
MAX_ANCHOR_FACTOR = 2.0  # a rate of products changes by a factor of 1/2 to 2
MAX_CORRECTION = 2.0  # a rate is corrected by a factor of 1/2 to 2: beyond, something else than the rate is wrong
MIN_SECONDS = 0.01  # of a resource's work, below which it says nothing
CORRECTED_RATES = {  # beside what compute is made of
    Resource.disk: "disk_bytes_per_second",
    Resource.host_to_device: "link_in_bytes_per_second",
    Resource.device_to_host: "link_out_bytes_per_second",
    Resource.cpu_attention: "cpu_attention_bytes_per_second",
}


@dataclass(frozen=True, kw_only=True)
class TypicalLoad:
    """What the lanes of a block have: most tokens in a prefill pass, rows that decode, and what a row has."""

    chunk_tokens: int
    num_rows: int
    num_prompt_tokens: int  # of a prompt
    num_positions: int  # that a row looks at in the middle of its answer

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
        """Whether what was measured for this load tells of the other: where nothing in it is more than twice as large.
        Smaller sizes are among those that are measured."""
        ours, theirs = astuple(self), astuple(other)
        return all(b <= 2 * a for a, b in zip(ours, theirs, strict=True))

    @property
    def product_rows(self) -> list[int]:
        """Ascending; nothing in the run has more than the last."""
        most = max(self.chunk_tokens, self.num_rows)
        return sorted({rows for rows in (*MEASURED_ROWS, self.chunk_tokens, self.num_rows) if rows <= most})

    def profile_passes(self, position_bytes: int, most_bytes: int) -> list[list[Piece]]:
        """What a packed lane carries in a decode pass in the middle of the answers, and in a prefill pass whose prompts
        are whole; shorter where the keys and values of a layer, at `position_bytes` each, would take more than
        `most_bytes`."""
        most = max(1, most_bytes // position_bytes)
        chunk, prompt = min(self.chunk_tokens, most), self.num_prompt_tokens
        prompts = [min(prompt, chunk - begin) for begin in range(0, chunk, prompt)]
        num_rows = min(self.num_rows, most)
        past = max(1, min(self.num_positions, most // num_rows) - 1)
        return [
            [Piece(past=past, new=1, num_selected=1)] * num_rows,
            [Piece(past=0, new=new, num_selected=1) for new in prompts],
        ]


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """The seconds of a lane in one layer: from the beginning of the pass to it; in it, its experts not run; and in its
    attention apart, 0 where the model attends by itself."""

    before: float
    inside: float
    attention: float

    @staticmethod
    def mean(times: Sequence["LayerSeconds"]) -> "LayerSeconds":
        """What several passes alike took in the mean."""
        return LayerSeconds(
            before=fmean(each.before for each in times),
            inside=fmean(each.inside for each in times),
            attention=fmean(each.attention for each in times),
        )


def with_overheads(rates: MachineRates, work: StageWork, single: LayerSeconds) -> MachineRates:
    """`single` is of one token: what its products do not explain is what a turn takes in any case."""
    num_rows = min(rates.gemm_flops_per_second)
    products = 2.0 * num_rows * work.dense_weights / rates.gemm_flops_per_second[num_rows]
    turn = max(0.0, single.inside - products)
    return replace(rates, turn_seconds=turn, pass_seconds=single.before)


def anchor_rates(
    rates: MachineRates, shape: ModelShape, work: StageWork, passes: Sequence[tuple[LaneWork, LayerSeconds]]
) -> MachineRates:
    """Rates with which the layer `work` takes each of these lanes as long as it took them.

    Attention gets the rate that it had. The rate of products changes at the rows that the lanes have, in between
    by their distance, beyond as at the last; it stays where a layer has others that `work` does not tell apart, such as
    experts that its own code runs, or what expands latents.
    """
    is_distinguished = not shape.expanded_kv_width and (not work.num_experts or rates.has_expert_rates)
    factors: dict[int, float] = {}
    for lane, layer_seconds in sorted(passes, key=lambda each: each[0].num_tokens):
        if layer_seconds.attention and lane.prefill_pairs:
            flops = 4.0 * shape.num_heads * shape.head_dim * lane.prefill_pairs
            rates = replace(rates, prefill_attention_flops_per_second=flops / layer_seconds.attention)
        elif layer_seconds.attention:
            rate = lane.kv_positions * work.kv_bytes / layer_seconds.attention
            # The CPU beside an accelerator has a rate of its own.
            cpu_rate = rate if rates.link_in_bytes_per_second == UNLIMITED else rates.cpu_attention_bytes_per_second
            rates = replace(rates, attention_bytes_per_second=rate, cpu_attention_bytes_per_second=cpu_rate)
        products = 2.0 * lane.num_tokens * work.dense_weights / rates.gemm_rate(lane.num_tokens)
        other = lane.num_tokens * work.token_bytes / rates.memory_bytes_per_second + rates.turn_seconds
        product_seconds = layer_seconds.inside - other
        if is_distinguished and product_seconds > MIN_PRODUCT_SHARE * layer_seconds.inside:
            factors[lane.num_tokens] = min(MAX_ANCHOR_FACTOR, max(1 / MAX_ANCHOR_FACTOR, products / product_seconds))
    if not factors:
        return rates
    points = list(factors.items())
    gemm = {rows: rate * interpolate(points, rows) for rows, rate in rates.gemm_flops_per_second.items()}
    return replace(rates, gemm_flops_per_second=gemm)


def correct_rates(
    rates: MachineRates, measured: Mapping[Resource, float], predicted: Mapping[Resource, float]
) -> MachineRates:
    """`measured` and `predicted` are the seconds that resources worked in the same passes; `rates`, from which was
    predicted, are those of the run's start, so that bounds hold over several corrections.

    What compute is made of, products, attention and Python, is corrected by one factor: passes tell no more.
    """

    def factor(resource: Resource) -> float:
        """Above 1 where the machine is faster than it was taken to be."""
        was, is_reported = measured.get(resource, 0.0), predicted.get(resource, 0.0)
        if min(was, is_reported) < MIN_SECONDS:
            return 1.0
        return min(MAX_CORRECTION, max(1 / MAX_CORRECTION, is_reported / was))

    compute = factor(Resource.compute)
    result = rates.map_rates(COMPUTE_RATES, lambda rate: rate * compute)
    for resource, name in CORRECTED_RATES.items():
        result = replace(result, **{name: getattr(rates, name) * factor(resource)})
    return result.map_rates(["turn_seconds", "pass_seconds"], lambda seconds: seconds / compute)
