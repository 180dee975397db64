"""JSON messages between ranks: states of unfinished sequences, completions, and the plan of a run.

Rank 0 plans and broadcasts its choices. Every rank builds the same plan from these choices.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from ..batching.admission import max_cached_tokens
from ..batching.balance import Block
from ..config.settings import (
    Admission,
    ExpertPaging,
    KVConfig,
    Parallelism,
    PolicyConfig,
    PolicyKind,
    PrefetchConfig,
    RuntimeConfig,
    SharePrefixes,
)
from ..errors import BudgetError, ConfigError, require
from ..plan.placement.memory import PAGE_TOKENS
from ..plan.placement.placement import Budgets
from ..plan.planner import RunPlan, plan_policy
from ..plan.search.candidate import Problem
from ..planning.planner import Planner
from ..ranks.ranks import Ranks
from ..sequences.sequence import Completion, FinishReason, Request, SequenceState, TokenLogprobs, TokenScore

Values: TypeAlias = Mapping[str, Any]  # a JSON object
Finished: TypeAlias = Sequence[tuple[int, Completion]]  # (index of the request, completion)
# Values of the key `kind`. A rank sends LANES before a pass, with its number of lanes (micro-batches), and ENDED after
# it. It sends STATES to request the states of sequences, and with its own states. It sends STOPPING when it stops.
KIND, LANES, STATES, ENDED, STOPPING = "kind", "lanes", "states", "ended", "stopping"


def encode_states(states: Mapping[int, SequenceState]) -> list[Values]:
    """Encodes states by request index, for `decode_states`; beams are not supported."""
    return [
        {
            "index": index,
            "tokens": state.token_ids,
            "logprobs": _encode_logprobs(state.logprobs),
            "generator": None if state.generator_state is None else base64.b64encode(state.generator_state).decode(),
        }
        for index, state in states.items()
    ]


def decode_states(values: Sequence[Values]) -> dict[int, SequenceState]:
    return {
        value["index"]: SequenceState(
            token_ids=tuple(value["tokens"]),
            logprobs=_decode_logprobs(value["logprobs"]),
            generator_state=None if value["generator"] is None else base64.b64decode(value["generator"]),
        )
        for value in values
    }


def encode_completions(completions: Finished) -> list[Values]:
    """Encodes completions for `decode_completions`; beams are not supported."""
    return [
        {
            "index": index,
            "tokens": completion.token_ids,
            "text": completion.text,
            "finish": completion.finish.value,
            "error": completion.error,
            "logprobs": _encode_logprobs(completion.logprobs),
            "reasoning": completion.reasoning,
            "scores": [[score.own, score.top_ids, score.top, score.greedy_id] for score in completion.scores],
            "vector": None if completion.vector is None else base64.b64encode(completion.vector.tobytes()).decode(),
        }
        for index, completion in completions
    ]


def decode_completions(values: Sequence[Values], requests: Sequence[Request]) -> list[tuple[int, Completion]]:
    return [
        (
            item["index"],
            Completion(
                request=requests[item["index"]],
                token_ids=tuple(item["tokens"]),
                text=item["text"],
                finish=FinishReason(item["finish"]),
                error=item["error"],
                logprobs=_decode_logprobs(item["logprobs"]),
                reasoning=item["reasoning"],
                scores=tuple(
                    TokenScore(own=own, top_ids=tuple(ids), top=tuple(top), greedy_id=greedy)
                    for own, ids, top, greedy in item["scores"]
                ),
                vector=None if item["vector"] is None else np.frombuffer(base64.b64decode(item["vector"]), np.float32),
            ),
        )
        for item in values
    ]


def _encode_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[list[object]]:
    return [[each.own, each.top_ids, each.top] for each in logprobs]


def _decode_logprobs(values: Sequence[Sequence[Any]]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(own=own, top_ids=tuple(ids), top=tuple(top)) for own, ids, top in values)


def plan_to_broadcast(plan: RunPlan, requests: Sequence[Request], weights: str) -> Values:
    """The message with the choices that determine a plan, and digests of requests and weights. `weights`: the digest of
    the weights."""
    return {
        "blocks": [[block.index, block.micro_batches] for block in plan.blocks],
        "policy": _to_plain(plan.policy),
        "kv": _to_plain(plan.kv),
        "prefetch": _to_plain(plan.prefetch),
        "budgets": vars(plan.budgets),
        "requests": requests_digest(requests),
        "weights": weights,
    }


def _to_plain(config: PolicyConfig | KVConfig | PrefetchConfig) -> Values:
    """Converts a config's fields to JSON values; an enum becomes its name."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {key: value.name if isinstance(value, Enum) else value for key, value in values.items()}


def requests_digest(requests: Sequence[Request]) -> str:
    """SHA-256 of the requests in their order."""
    digest = hashlib.sha256()
    for each in requests:
        options = (each.max_new_tokens, each.sampling_key, each.stop, each.scoring, each.encoding)
        digest.update(repr((each.key, each.prompt_ids, *options)).encode() + b"\n")
    return digest.hexdigest()


SESSION, END = "session", "end"  # values of `kind`: rank 0 opens a session; there are no more sessions
UNSUPPORTED = "devices={} does not support {}: {}"  # (value of `devices`, feature, remedy)


def config_for_ranks(config: RuntimeConfig, way: Parallelism = Parallelism.sharded) -> RuntimeConfig:
    """Returns the config without features that need a single process. Raises ConfigError if such a feature was
    explicitly set."""
    paging, num_beams = config.offload.expert_paging, config.sampling.num_beams or 1
    is_pipeline = way is Parallelism.pipeline
    require(
        is_pipeline or paging in (ExpertPaging.auto, ExpertPaging.off),
        UNSUPPORTED.format(way.value, f"offload.expert_paging={paging.value}", "set offload.expert_paging=auto or off"),
    )
    beams = f"sampling.num_beams={num_beams}"
    require(num_beams == 1, UNSUPPORTED.format(way.value, beams, "set sampling.num_beams=1, or devices=one"))
    drafts = f"policy.draft_tokens={config.policy.draft_tokens}"
    require(
        not config.policy.draft_tokens,
        UNSUPPORTED.format(way.value, drafts, "set policy.draft_tokens=null, or devices=one"),
    )
    policy = replace(config.policy, share_prefixes=SharePrefixes.off, draft_tokens=0)
    if is_pipeline:
        return replace(config, policy=policy)
    return replace(config, offload=replace(config.offload, expert_paging=ExpertPaging.off), policy=policy)


def plan_from_broadcast(message: Values, planner: Planner, requests: Sequence[Request]) -> RunPlan:
    """Builds the plan from rank 0's message. Raises ConfigError if this rank has other requests or weights than rank 0,
    and BudgetError if the plan does not fit this rank's memory."""
    if message["requests"] != requests_digest(requests):
        raise ConfigError(
            "devices: this rank has other requests than rank 0: use the same data, tokenizer and settings"
        )
    if message["weights"] != planner.model.fingerprint:
        raise ConfigError(
            "model.path: this rank has other weights than rank 0: copy the same checkpoint to each machine, or use a "
            "shared directory"
        )
    kv, prefetch = KVConfig(**message["kv"]), PrefetchConfig(**message["prefetch"])
    policy = replace(PolicyConfig(**message["policy"]), kind=PolicyKind.fixed, pin=None)
    blocks = tuple(Block(index=index, micro_batches=tuple(map(tuple, lanes))) for index, lanes in message["blocks"])
    config = replace(planner.config, policy=policy, kv=kv, prefetch=prefetch)
    sizes = [request.size for request in requests]
    problem = Problem(
        shape=planner.model.shape, config=config, budgets=Budgets(**message["budgets"]), sizes=sizes, rates=None
    )
    plan = plan_policy(problem, blocks=blocks)
    if policy.admission is Admission.continuous:
        num_pages, needed = plan.placement.kv.num_pages, _max_request_pages(requests)
        if num_pages and needed > num_pages:
            raise BudgetError(
                f"policy.admission=continuous: the longest request needs {needed} KV pages of {num_pages}: "
                "raise policy.num_micro_batches or offload.host_memory_gib, or set policy.admission=wave"
            )
    return plan


def num_admitting_ranks(plan: RunPlan, requests: Sequence[Request], num_ranks: int) -> int:
    """Number of ranks that compute sequences when the KV pages are divided equally among them. A rank's share must
    fit the longest request, so this may be less than `num_ranks`."""
    num_pages = plan.placement.kv.num_pages
    if not num_pages:
        return num_ranks
    return min(num_ranks, num_pages // max(1, _max_request_pages(requests)))


def _max_request_pages(requests: Sequence[Request]) -> int:
    """KV pages of the longest request."""
    tokens = max((max_cached_tokens(len(each.prompt_ids), each.max_new_tokens) for each in requests), default=0)
    return -(-tokens // PAGE_TOKENS)


def end_sessions(ranks: Ranks) -> None:
    """Announces, from rank 0, that there will be no more sessions."""
    ranks.broadcast({KIND: END})
