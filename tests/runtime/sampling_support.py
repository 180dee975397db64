"""What the tests of sampling share: runs of the engine, and transformers' answer to each prompt alone."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from runtime import (
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    Runtime,
    RuntimeConfig,
    SamplingConfig,
    SamplingOverrides,
)
from runtime.config.settings import DType, PolicyKind, Tier
from runtime.sequences.sampler import Sampler
from runtime.sequences.sequence import Completion, Request
from runtime.sequences.sequence import Sequence as Running
from tests.support import Reference

References = Callable[[str], Reference]


def runtime_for(
    reference: Reference,
    sampling: SamplingConfig,
    *,
    kind: PolicyKind = PolicyKind.fixed,
    eos: int | None = None,
    chunk_tokens: int | None = None,
    dtype: DType = DType.float32,
) -> Runtime:
    """Three sequences a lane, two lanes a block. `eos`: instead of the checkpoint's own."""
    config = RuntimeConfig(
        model=ModelConfig(name="test", path=str(reference.directory), dtype=dtype),
        offload=OffloadConfig(tier=Tier.nvme, resident_layers=2, host_memory_gib=1),
        policy=PolicyConfig(kind=kind, micro_batch_size=3, num_micro_batches=2, prefill_chunk_tokens=chunk_tokens),
        sampling=sampling,
    )
    runtime = Runtime(config)
    if eos is not None:
        object.__setattr__(runtime.model, "eos_token_ids", frozenset([eos]))
    return runtime


def complete(runtime: Runtime, requests: Sequence[Request]) -> list[Completion]:
    """In the order of `requests`."""
    completions: dict[tuple[str, int], Completion] = {}
    with runtime.open_with_backoff(requests) as (plan, session):
        for block in plan.blocks:
            completions |= {completion.request.key: completion for completion in session.run(block, requests)}
    return [completions[request.key] for request in requests]


def request_of(runtime: Runtime, id: str, prompt: Sequence[int] | str, **overrides: object) -> Request:
    request = runtime.request(id, prompt, overrides=SamplingOverrides(**overrides))  # pyright: ignore[reportArgumentType]
    assert isinstance(request, Request), request
    return request


def transformers_answer(
    model: PreTrainedModel,
    prompt: Sequence[int],
    seed: int,
    sampling: SamplingConfig,
    **settings: object,
) -> list[int]:
    """`settings` go to `generate` as they are."""
    torch.manual_seed(seed)
    ids = torch.tensor([prompt])
    warping = {} if sampling.is_greedy else {
        "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
    }  # fmt: skip
    known = {
        "do_sample": not sampling.is_greedy,
        "repetition_penalty": sampling.repetition_penalty,
        "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
        "max_new_tokens": sampling.max_new_tokens,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **(known | warping | settings))
    return out[0, len(prompt) :].tolist()


def running(
    prompt: Sequence[int] = (1, 2),
    *,
    max_new_tokens: int = 50,
    id: str = "0",
    sample_index: int = 0,
    temperature: float = 0.0,
    stop: Sequence[str] = (),
) -> Running:
    request = Request(
        id=id,
        prompt_ids=tuple(prompt),
        max_new_tokens=max_new_tokens,
        sample_index=sample_index,
        temperature=temperature,
        stop=tuple(stop),
    )
    return Running(request=request)


def logits_for(*tokens: int, size: int = 300) -> torch.Tensor:
    """Rows in which these tokens are the likeliest."""
    return torch.stack([torch.zeros(size).index_fill_(0, torch.tensor(token), 9.0) for token in tokens])


def step(sampler: Sampler, sequences: Sequence[Running], logits_BV: torch.Tensor, number: int) -> None:
    """What a pass does with them."""
    sampler.accept(sequences, sampler.sample(sequences, logits_BV), number)
