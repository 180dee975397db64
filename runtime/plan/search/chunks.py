"""How many tokens of a lane one prefill pass takes where nobody says: so many that their products take as long as
bringing the weights.

A pass brings the weights once for the chunks of all its lanes. While bytes are on their way for longer than compute
works, chunks of twice the size halve what is brought for the same prompts; once compute is busy for longer they only
take memory, which layers could stay in, unless products of twice the rows are faster by the row: an expert sees a few
of a chunk's tokens. So each doubling is placed and timed, decode passes with it, until prefill passes take hardly any
time but that of their products, and products are as fast as they get.
"""

from dataclasses import replace

from ...config.settings import Admission
from ..cost.predict import MAX_BLOCKS, Prediction, evenly, predict_roughly
from ..cost.rates import MachineRates
from ..placement.defaults import in_chunks
from ..placement.load import Load
from ..placement.memory import pass_tokens
from ..placement.placement import Placement
from ..shape.model import ModelShape
from .candidate import PlacedRun, Problem

NOTABLE = 0.05  # share of prefill passes, or of what a row of a product takes
WORTHWHILE = 0.02  # of the prefill's time, to be won by a chunk that takes more memory
ALL_TOKENS = 1 << 40


def balanced(problem: Problem, first: PlacedRun) -> PlacedRun:
    """`first`, whose chunks are as small as they should be, or the same blocks in larger chunks that take less time in
    all. It stays without rates to tell by, and where the settings say the chunks."""
    if problem.rates is None or problem.config.policy.prefill_chunk_tokens is not None:
        return first
    chosen = _chosen(problem, first, problem.rates)
    while chosen > first.chunk_tokens:
        run = problem.placed(first.blocks, chosen)
        if run.placement.fits:
            return run
        chosen //= 2
    return first


def _chosen(problem: Problem, first: PlacedRun, rates: MachineRates) -> int:
    """Tokens of the best chunk, by rough times of the block that takes most memory, or of a few blocks whose sequences
    come and go."""
    best = last = first.chunk_tokens
    most = max((pass_tokens(problem.shape, lane, ALL_TOKENS) for lane in first.load.lanes), default=0)
    if last >= most:
        return best
    found = shortest = _timed(problem, first, last, rates)
    while found is not None and shortest is not None and last < most:
        if not (_beside_products(first, found, rates) or _speeds_up(problem.shape, last, rates)):
            break
        last *= 2
        found = _timed(problem, first, last, rates)
        if found is not None and found.seconds < shortest.seconds - WORTHWHILE * shortest.prefill_seconds:
            best, shortest = last, found
    return best


def _beside_products(run: PlacedRun, prediction: Prediction, rates: MachineRates) -> bool:
    """Whether prefill passes take notable time that does not follow from their tokens: waiting for bytes, and what
    passing stages takes beside products."""
    passing = len(run.load.lanes) * len(run.load.shape.stages) * rates.turn_seconds + rates.pass_seconds
    prefill = prediction.prefill
    return prefill.stall_seconds + prefill.num_passes * passing > NOTABLE * prefill.seconds


def _speeds_up(shape: ModelShape, num_tokens: int, rates: MachineRates) -> bool:
    """Whether products of twice so many tokens are notably faster by the token, or an expert's of its share of them."""
    shares = {stage.num_experts_per_token / stage.num_experts for stage in shape.layers if stage.num_experts}
    ways = [(rates.gemm_rate, 1.0), *((rates.expert_rate, share) for share in shares)]
    return any(rate(2 * share * num_tokens) > (1 + NOTABLE) * rate(share * num_tokens) for rate, share in ways)


def _timed(problem: Problem, first: PlacedRun, num_tokens: int, rates: MachineRates) -> Prediction | None:
    """The prediction for chunks of so many tokens; None where there is no room."""
    if problem.config.policy.admission is Admission.continuous:
        run = problem.placed(evenly(first.blocks, MAX_BLOCKS), num_tokens)
        return problem.predicted(run) if run.placement.fits else None
    placement = _placement(problem, first, num_tokens)
    if not placement.fits:
        return None
    return predict_roughly(problem.shape, placement, first.load.lanes, num_tokens, rates)


def _placement(problem: Problem, first: PlacedRun, num_tokens: int) -> Placement:
    """The placement of the block that takes most memory in the chunks of `first`."""
    load = Load.of(problem.shape, first.load.lanes, num_tokens)
    load = replace(
        first.load,
        chunk_tokens=num_tokens,
        most_tokens=load.most_tokens,
        all_tokens=load.all_tokens,
        num_prefill_passes=load.num_prefill_passes,
    )
    config = replace(in_chunks(problem.config, num_tokens), prefetch=first.prefetch)
    return problem.place(config, load)
