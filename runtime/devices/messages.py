"""What ranks tell one another of rows, as values of JSON: states of sequences, completions, and the plan of a run."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from ..batching.balance import Block
from ..config.settings import KVConfig, PolicyConfig, PrefetchConfig
from ..plan.placement.placement import Budgets
from ..plan.planner import RunPlan
from ..sequences.sequence import Completion, FinishReason, Request, TokenLogprobs, TokenScore, Unfinished, Vector

Values: TypeAlias = Mapping[str, Any]
Finished: TypeAlias = Sequence[tuple[int, Completion]]


def written_states(states: Mapping[int, Unfinished]) -> list[Values]:
    """`read_states` reads them; beams are not among them."""
    return [
        {
            "place": place,
            "tokens": state.token_ids,
            "logprobs": _written_logprobs(state.logprobs),
            "generator": None if state.generator_state is None else base64.b64encode(state.generator_state).decode(),
        }
        for place, state in states.items()
    ]


def read_states(values: Sequence[Values]) -> dict[int, Unfinished]:
    return {
        each["place"]: Unfinished(
            token_ids=tuple(each["tokens"]),
            logprobs=_read_logprobs(each["logprobs"]),
            generator_state=None if each["generator"] is None else base64.b64decode(each["generator"]),
        )
        for each in values
    }


def written_completions(completions: Finished) -> list[Values]:
    """`read_completions` reads them; beams are not among them."""
    return [
        {
            "place": place,
            "tokens": each.token_ids,
            "text": each.text,
            "finish": each.finish.value,
            "error": each.error,
            "logprobs": _written_logprobs(each.logprobs),
            "reasoning": each.reasoning,
            "scores": [[score.own, score.top_ids, score.top, score.greedy_id] for score in each.scores],
            "vector": None if each.vector is None else base64.b64encode(each.vector.tobytes()).decode(),
        }
        for place, each in completions
    ]


def read_completions(values: Sequence[Values], requests: Sequence[Request]) -> list[tuple[int, Completion]]:
    return [
        (
            each["place"],
            Completion(
                request=requests[each["place"]],
                token_ids=tuple(each["tokens"]),
                text=each["text"],
                finish=FinishReason(each["finish"]),
                error=each["error"],
                logprobs=_read_logprobs(each["logprobs"]),
                reasoning=each["reasoning"],
                scores=tuple(
                    TokenScore(own=own, top_ids=tuple(ids), top=tuple(top), greedy_id=greedy)
                    for own, ids, top, greedy in each["scores"]
                ),
                vector=_read_vector(each["vector"]),
            ),
        )
        for each in values
    ]


def _written_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[list[object]]:
    return [[each.own, each.top_ids, each.top] for each in logprobs]


def _read_logprobs(values: Sequence[Sequence[Any]]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(own=own, top_ids=tuple(ids), top=tuple(top)) for own, ids, top in values)


def _read_vector(values: str | None) -> Vector | None:
    return None if values is None else np.frombuffer(base64.b64decode(values), np.float32)


def written_plan(plan: RunPlan, requests: Sequence[Request], weights: str) -> Values:
    """The choices that a plan follows from, and of which requests and weights it is."""
    return {
        "blocks": [[block.index, block.micro_batches] for block in plan.blocks],
        "policy": _plain(plan.policy),
        "kv": _plain(plan.kv),
        "prefetch": _plain(plan.prefetch),
        "budgets": vars(plan.budgets),
        "requests": digest_of(requests),
        "weights": weights,
    }


def read_blocks(values: Values) -> tuple[Block, ...]:
    return tuple(Block(index=index, micro_batches=tuple(map(tuple, lanes))) for index, lanes in values["blocks"])


def read_choices(values: Values) -> tuple[PolicyConfig, KVConfig, PrefetchConfig, Budgets]:
    """Policy, KV and prefetch as resolved, and the budgets."""
    return (
        PolicyConfig(**values["policy"]),
        KVConfig(**values["kv"]),
        PrefetchConfig(**values["prefetch"]),
        Budgets(**values["budgets"]),
    )


def _plain(config: PolicyConfig | KVConfig | PrefetchConfig) -> Values:
    """The config's keys; one that holds an enum reads its name back."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {key: value.name if isinstance(value, Enum) else value for key, value in values.items()}


def digest_of(requests: Sequence[Request]) -> str:
    """The same for the same requests in the same order."""
    digest = hashlib.sha256()
    for each in requests:
        asked = (each.max_new_tokens, each.cuts, each.stop, each.scoring, each.encoding)
        digest.update(repr((each.key, each.prompt_ids, *asked)).encode() + b"\n")
    return digest.hexdigest()
