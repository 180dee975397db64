"""Chooses how many tokens of each sequence a decode pass guesses, see runtime/sequences/drafts.py."""

from ...config.settings import RuntimeConfig
from ..cost.predict import decode_pass_seconds
from ..placement.memory import max_draft_tokens
from ..shape.model import ModelShape
from .candidate import PlacedRun, Problem

MAX_FREE = 8  # tokens that are guessed by default: later ones are rarely right
FLOAT32_BYTES = 4
MAX_SLOWDOWN = 0.01  # of a decode pass, for guesses to count as free


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


def draft_tokens(problem: Problem, run: PlacedRun) -> int:
    """Returns the number of tokens per sequence and decode pass to guess at most.

    It is the configured number, or the largest with which passes take as long as without. This is above 0 if passes
    wait for weights. Memory can lower both: guesses use only what the plan leaves.
    """
    policy, shape = problem.config.policy, problem.shape
    if run.placement.host_layers or run.placement.cpu_share is not None:
        return 0  # buffers between CPU and device have room for one token of each sequence
    generates = any(size.max_new_tokens > 2 and not size.num_scored for size in problem.sizes)
    if not generates or draft_obstacle(problem.config, shape, has_rope_lengths=shape.restart_tokens is not None):
        return 0
    compute = next(
        ledger for ledger in run.placement.ledgers if (ledger.memory == "device") == run.placement.has_device
    )
    limit = MAX_FREE if policy.draft_tokens is None else policy.draft_tokens
    spare_bytes = max(0, compute.left_bytes)
    limit = max_draft_tokens(shape, run.load.lanes, run.chunk_tokens, spare_bytes, limit)
    if policy.draft_tokens is not None:
        return limit
    if problem.rates is None:
        return 0
    rates, lanes = problem.rates, run.load.lanes

    def seconds(num_drafted: int) -> float:
        return decode_pass_seconds(shape, run.placement, lanes, rates, num_drafted=num_drafted)

    most = (1 + MAX_SLOWDOWN) * seconds(0)
    return next((count for count in range(limit, 0, -1) if seconds(count) <= most), 0)
