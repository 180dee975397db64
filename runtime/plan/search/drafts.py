"""Chooses how many tokens of each sequence a decode pass guesses, see runtime/sequences/drafts.py."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ...config.settings import Admission, RuntimeConfig
from ..cost.predict import decode_pass_seconds
from ..cost.rates import MachineRates
from ..placement.memory import MicroBatch, draft_bytes
from ..shape.model import ModelShape
from .candidate import PlacedRun, Problem

MAX_FREE = 8  # tokens that are guessed by default: later ones are rarely right
FLOAT32_BYTES = 4
DRAFT_STEP = 4  # so many fewer are tried if memory for all of them costs too much
MAX_LOSS = 0.05  # most time that memory for guesses may add to a run, relative to the run
MAX_COST = 0.05  # most time that a guessed token of each sequence may add to a decode pass, relative to the pass


def draft_obstacle(config: RuntimeConfig, shape: ModelShape, *, has_rope_lengths: bool) -> str | None:
    """Returns the reason why no tokens can be guessed; None if there is none.

    `has_rope_lengths`: rotary embeddings depend on the length of the sequence.
    """
    if config.policy.draft_tokens == 0:
        return "policy.draft_tokens=0"
    if not shape.is_packed:
        return "this model runs in padded lanes, where tokens cannot be taken back"
    if has_rope_lengths:
        return "this model's rotary embeddings depend on the length"
    if (config.sampling.num_beams or 1) > 1:
        return "beam search"
    if config.policy.draft_tokens is None and shape.compute_dtype_bytes < FLOAT32_BYTES:
        return "more tokens in a pass can change 16-bit results: set policy.draft_tokens to guess all the same"
    return None


class DraftPlan(NamedTuple):
    """Most tokens that are guessed per sequence and decode pass. `token_cost`: seconds that one such token of each
    sequence adds to a pass, relative to the pass. `model_cost`: the same, if the draft model guesses it."""

    max_tokens: int
    token_cost: float = 0.0
    model_cost: float = 0.0


NO_DRAFTS = DraftPlan(0)


def choose_drafts(problem: Problem, run: PlacedRun) -> DraftPlan:
    """Returns how many tokens to guess: the configured number, or as many as cost little, in the memory that `run`
    leaves. They cost little if passes wait for weights, or if products with few rows do.
    """
    wanted = _wanted_drafts(problem, run)
    most = _num_fitting(run, problem.shape, wanted.max_tokens)
    return wanted if most == wanted.max_tokens else _cheap_drafts(problem, run, most)


def place_beside_drafts(problem: Problem, run: PlacedRun) -> PlacedRun:
    """Returns `run`, or if it leaves too little memory for guesses, the same blocks placed in what these leave.

    Prefill chunks may be halved for them, but the run must not take clearly longer.
    """
    policy, wanted = problem.config.policy, _wanted_drafts(problem, run).max_tokens
    fitting = _num_fitting(run, problem.shape, wanted)
    if fitting == wanted:
        return run
    before = problem.predict(run)
    chunks = [run.chunk_tokens] + [run.chunk_tokens // 2] * (policy.prefill_chunk_tokens is None)
    for chunk, count in product(chunks, range(wanted, fitting, -DRAFT_STEP)):
        placed = _place_beside(problem, run, chunk, count)
        after = problem.predict(placed)
        is_longer = before and after and after.seconds > (1 + MAX_LOSS) * before.seconds
        if placed.placement.fits and not is_longer:
            return placed
    return run


def _wanted_drafts(problem: Problem, run: PlacedRun) -> DraftPlan:
    """Same as `choose_drafts`, whatever memory is left."""
    policy, shape = problem.config.policy, problem.shape
    if run.placement.host_layers or run.placement.cpu_share is not None:
        return NO_DRAFTS  # buffers between CPU and device have room for one token of each sequence
    generates = any(size.max_new_tokens > 2 and not size.num_scored for size in problem.sizes)
    if not generates or draft_obstacle(problem.config, shape, has_rope_lengths=shape.restart_tokens is not None):
        return NO_DRAFTS
    return _cheap_drafts(problem, run, MAX_FREE if policy.draft_tokens is None else policy.draft_tokens)


def _cheap_drafts(problem: Problem, run: PlacedRun, limit: int) -> DraftPlan:
    """Returns the configured number of guesses, or as many as cost little; at most `limit`."""
    rates, lanes, shape = problem.rates, run.load.lanes, problem.shape
    if problem.config.policy.draft_tokens is not None:
        return DraftPlan(limit)
    if rates is None:
        return NO_DRAFTS
    without = decode_pass_seconds(shape, run.placement, lanes, rates)
    model_cost = _draft_model_seconds(shape, lanes, rates) / without if without else 0.0
    for count in range(limit, 0, -1):
        seconds = decode_pass_seconds(shape, run.placement, lanes, rates, num_drafted=count)
        if (cost := max(0.0, seconds / without - 1) / count) <= MAX_COST:
            return DraftPlan(count, cost, cost + model_cost)
    return NO_DRAFTS


def _num_bytes(run: PlacedRun, shape: ModelShape, chunk_tokens: int, num_drafted: int) -> int:
    beside_prompts = run.config.policy.admission is Admission.continuous
    return draft_bytes(shape, run.load.lanes, chunk_tokens, num_drafted, beside_prompts=beside_prompts)


def _num_fitting(run: PlacedRun, shape: ModelShape, limit: int) -> int:
    """Returns how many guesses, at most `limit`, fit in the memory that `run` leaves."""
    left = max(0, run.placement.compute_ledger.left_bytes)
    return next((n for n in range(limit, 0, -1) if _num_bytes(run, shape, run.chunk_tokens, n) <= left), 0)


def _place_beside(problem: Problem, run: PlacedRun, chunk_tokens: int, num_drafted: int) -> PlacedRun:
    """Returns `run` placed in the memory that so many guesses leave."""
    num_bytes = _num_bytes(run, problem.shape, chunk_tokens, num_drafted)
    smaller = replace(problem, config=run.config, budgets=problem.budgets.less_compute(num_bytes))
    placed = smaller.place_blocks(run.blocks, chunk_tokens)
    compute, *others = placed.placement.ledgers
    whole = replace(compute, budget_bytes=compute.budget_bytes + num_bytes)
    return replace(placed, placement=replace(placed.placement, ledgers=(whole, *others)))


def _draft_model_seconds(shape: ModelShape, lanes: Sequence[MicroBatch], rates: MachineRates) -> float:
    """Returns the seconds in which the draft model, if there is one, guesses a token of each sequence."""
    if shape.draft is None:
        return 0.0
    flops = sum(stage.flops_per_token for stage in shape.draft.stages)
    return sum(len(lane) * flops / rates.gemm_rate(len(lane)) for lane in lanes if lane)
