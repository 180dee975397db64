"""One plan for all ranks: rank 0 makes it and tells the choices that it follows from; each makes the same plan of
them.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..batching.admission import most_cached
from ..config.profiles import BackendTable
from ..config.settings import Admission, ExpertPaging, PolicyKind, RuntimeConfig, SharePrefixes, Way
from ..errors import BudgetError, ConfigError, require
from ..plan.placement.memory import PAGE_TOKENS
from ..plan.planner import RunPlan, plan_policy
from ..plan.search.candidate import Problem
from ..plan.shape.model import ModelShape
from ..planning.planner import Planner
from ..ranks.ranks import Ranks
from ..sequences.sequence import Request
from .agreement import KIND
from .messages import Values, digest_of, read_blocks, read_choices

SESSION, OVER = "session", "over"
NOT_YET = "devices={} does not go with {} as yet: {}"


def for_ranks(config: RuntimeConfig, way: Way = Way.sharded) -> RuntimeConfig:
    """The config with what only one process can do left out, where the settings leave that open. Raises ConfigError
    where they ask for it."""
    paging, num_beams, is_divided = config.offload.expert_paging, config.sampling.num_beams or 1, way is Way.pipeline
    require(
        is_divided or paging in (ExpertPaging.auto, ExpertPaging.off),
        NOT_YET.format(way.value, f"offload.expert_paging={paging.value}", "layers are read whole, with auto or off"),
    )
    beams = NOT_YET.format(way.value, f"sampling.num_beams={num_beams}", "leave beams out, or take devices=one")
    require(num_beams == 1, beams)
    policy = replace(config.policy, share_prefixes=SharePrefixes.off)
    if is_divided:
        return replace(config, policy=policy)
    return replace(config, offload=replace(config.offload, expert_paging=ExpertPaging.off), policy=policy)


def require_shareable(shape: ModelShape, way: Way) -> None:
    """Raises ConfigError for a model that ranks cannot share."""
    require(not shape.has_encoder, NOT_YET.format(way.value, "an encoder in front of a decoder", "take devices=one"))


def require_told(requests: Sequence[Request], way: Way) -> None:
    """Raises ConfigError where ranks are asked for what only the last one in a pipeline comes to."""
    is_all = way is not Way.pipeline or all(request.generates for request in requests)
    require(is_all, NOT_YET.format(way.value, "scores and embeddings", "take devices=sharded, tensor or one"))


def plan_told(told: Values, planner: Planner, requests: Sequence[Request]) -> RunPlan:
    """The plan that rank 0 tells of, as every rank makes it. Raises ConfigError where this rank has other requests or
    weights, and BudgetError."""
    if told["requests"] != digest_of(requests):
        raise ConfigError(
            "devices: this rank has read other rows than rank 0: all ranks need the same data set, "
            "tokenizer and settings"
        )
    if told["weights"] != planner.model.fingerprint:
        raise ConfigError(
            "devices: this rank finds other weights than rank 0 at model.path: copy the same checkpoint to "
            "each machine, or read it where all see it"
        )
    policy, kv, prefetch, budgets = read_choices(told)
    policy = replace(policy, kind=PolicyKind.fixed, pin=None)
    config = replace(planner.config, policy=policy, kv=kv, prefetch=prefetch)
    sizes = [request.size for request in requests]
    problem = Problem(shape=planner.model.shape, config=config, budgets=budgets, sizes=sizes, rates=None)
    plan = plan_policy(problem, blocks=read_blocks(told))
    if policy.admission is Admission.continuous:
        _require_pages(plan, requests)
    return plan


def num_admitting(plan: RunPlan, requests: Sequence[Request], num_ranks: int) -> int:
    """How many ranks admit rows by themselves, each into an equal share of the pages of keys and values: so many that a
    share has room for the longest request, for which a plan that was told has room."""
    num_pages = plan.placement.kv.num_pages
    if not num_pages:
        return num_ranks
    return min(num_ranks, num_pages // max(1, _most_pages(requests)))


def _require_pages(plan: RunPlan, requests: Sequence[Request]) -> None:
    """Raises BudgetError where the longest request would find no room."""
    num_pages, most = plan.placement.kv.num_pages, _most_pages(requests)
    if num_pages and most > num_pages:
        raise BudgetError(
            f"policy.admission=continuous: keys and values of the longest request take {most} pages of {num_pages}: "
            "raise policy.num_micro_batches or offload.host_memory_gib, or set policy.admission=wave"
        )


def _most_pages(requests: Sequence[Request]) -> int:
    """The pages of the longest of them."""
    tokens = max((most_cached(len(each.prompt_ids), each.max_new_tokens) for each in requests), default=0)
    return -(-tokens // PAGE_TOKENS)


def backends_told(ranks: Ranks, table: BackendTable | None) -> BackendTable | None:
    """Rank 0's table, so that all ranks make the same products in the same way."""
    told = ranks.exchange({"table": None if table is None else table.to_plain()})[0]["table"]
    return None if told is None else BackendTable.from_plain(told)


def end_sessions(ranks: Ranks) -> None:
    """Says, as rank 0, that there will be no other session."""
    ranks.tell({KIND: OVER})
