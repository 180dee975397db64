"""Chooses how many tokens of each sequence a decode pass guesses, see runtime/sequences/drafts.py."""

from collections.abc import Sequence
from typing import NamedTuple

from ...config.settings import Admission, RuntimeConfig
from ..cost.predict import decode_pass_seconds
from ..cost.rates import MachineRates
from ..placement.memory import MicroBatch, max_draft_tokens
from ..shape.model import ModelShape
from .candidate import PlacedRun, Problem

MAX_FREE = 8  # tokens that are guessed by default: later ones are rarely right
FLOAT32_BYTES = 4
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
    """Returns how many tokens to guess: the configured number, or as many as cost little.

    They cost little if passes wait for weights, or if products with few rows do. Memory can lower the number: guesses
    use only what the plan leaves.
    """
    policy, shape = problem.config.policy, problem.shape
    if run.placement.host_layers or run.placement.cpu_share is not None:
        return NO_DRAFTS  # buffers between CPU and device have room for one token of each sequence
    generates = any(size.max_new_tokens > 2 and not size.num_scored for size in problem.sizes)
    if not generates or draft_obstacle(problem.config, shape, has_rope_lengths=shape.restart_tokens is not None):
        return NO_DRAFTS
    memory = "device" if run.placement.has_device else "host"
    compute = next(ledger for ledger in run.placement.ledgers if ledger.memory == memory)
    limit = MAX_FREE if policy.draft_tokens is None else policy.draft_tokens
    limit = max_draft_tokens(
        shape,
        run.load.lanes,
        run.chunk_tokens,
        max(0, compute.left_bytes),
        limit,
        beside_prompts=policy.admission is Admission.continuous,
    )
    if problem.rates is None or not limit:
        return NO_DRAFTS if policy.draft_tokens is None else DraftPlan(limit)
    rates, lanes = problem.rates, run.load.lanes

    def cost(num_drafted: int) -> float:
        seconds = decode_pass_seconds(shape, run.placement, lanes, rates, num_drafted=num_drafted)
        return max(0.0, seconds / without - 1) / num_drafted

    without = decode_pass_seconds(shape, run.placement, lanes, rates)
    if policy.draft_tokens is not None:
        return DraftPlan(limit)
    model_cost = _draft_model_seconds(shape, lanes, rates) / without if without else 0.0
    plans = (DraftPlan(count, (each := cost(count)), each + model_cost) for count in range(limit, 0, -1))
    return next((plan for plan in plans if plan.token_cost <= MAX_COST), NO_DRAFTS)


def _draft_model_seconds(shape: ModelShape, lanes: Sequence[MicroBatch], rates: MachineRates) -> float:
    """Returns the seconds in which the draft model, if there is one, guesses a token of each sequence."""
    if shape.draft is None:
        return 0.0
    flops = sum(stage.flops_per_token for stage in shape.draft.stages)
    return sum(len(lane) * flops / rates.gemm_rate(len(lane)) for lane in lanes if lane)
