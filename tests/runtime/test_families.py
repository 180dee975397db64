"""Each family in the support table equals `transformers.generate`, token for token, in every tier."""

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime import OffloadConfig, PolicyConfig, Runtime, SamplingConfig
from runtime.cache.paged import PagedKV
from runtime.config.profiles import LinearBackend
from runtime.config.settings import DType, ModelConfig, PolicyKind, RuntimeConfig, Tier
from runtime.model.families import FAMILIES
from runtime.sequences.sampler import Sampler
from runtime.sequences.sequence import Completion, FinishReason
from runtime.sequences.sequence import Sequence as Running
from tests.dealt import with_slow_others
from tests.support import KINDS_OF_ATTENTION, NUM_NEW_TOKENS, NUM_SAMPLED, TEMPERATURE, TOP_P, Reference

References = Callable[[str], Reference]
Runtimes = Callable[[RuntimeConfig], Runtime]

KINDS = {
    "packed": "llama",
    "latents": "deepseek-v3",
    "sliding": "gemma-3",
    "recurrent": "qwen3-next",
    "own": "bloom",
    "encoder": "t5",
}
PRODUCTS = {Tier.none: LinearBackend.weights_first, Tier.cpu: LinearBackend.vectors, Tier.nvme: LinearBackend.tiles}
GREEDY = SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)


def config_for(
    reference: Reference,
    tier: Tier = Tier.nvme,
    sampling: SamplingConfig = GREEDY,
    dtype: DType = DType.float32,
    **policy: int,
) -> RuntimeConfig:
    """3 lanes of 3 sequences at most, unless told otherwise; nothing resident where weights are streamed."""
    sizes = {"micro_batch_size": 3, "num_micro_batches": 3} | policy
    return RuntimeConfig(
        model=ModelConfig(name="test", path=str(reference.directory), dtype=dtype),
        offload=OffloadConfig(tier=tier, resident_layers=0, read_chunk_mib=1),
        policy=PolicyConfig(kind=PolicyKind.fixed, **sizes),
        sampling=sampling,
    )


def tokens(runtime: Runtime, prompts: list[list[int]]) -> list[list[int]]:
    results = runtime.generate(prompts)
    assert all(isinstance(result, Completion) for result in results), results
    return [list(result.token_ids) for result in results if isinstance(result, Completion)]


@pytest.mark.dealt
@pytest.mark.parametrize("tier", PRODUCTS)
@pytest.mark.parametrize("family", with_slow_others(FAMILIES, KINDS_OF_ATTENTION))
def test_greedy_tokens_equal_transformers_in_every_tier(
    family: str,
    tier: Tier,
    reference: References,
    opened: Runtimes,
    backend_is: Callable[[LinearBackend], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By torch's products and by each kernel's, which otherwise leave these small models to torch. Without a matrix
    unit, what would go there goes through vectors. Packed lanes narrow their last layer, if it attends once."""
    ref, narrowed, narrow = reference(family), list[int](), PagedKV.restrict_to_selected
    monkeypatch.setattr(
        PagedKV, "restrict_to_selected", lambda cache: narrowed.append(cache.num_selected) or narrow(cache)
    )
    runtime = opened(config_for(ref, tier, micro_batch_size=4, num_micro_batches=2))
    backend_is(PRODUCTS[tier])
    assert tokens(runtime, ref.prompts) == ref.expected
    assert bool(narrowed) == (runtime.model.shape.is_packed and family != "longcat-flash")


@pytest.mark.dealt(most=6)
@pytest.mark.parametrize("family", with_slow_others(FAMILIES, KINDS_OF_ATTENTION))
def test_sampled_tokens_equal_transformers_with_the_same_seeds(
    family: str, reference: References, opened: Runtimes
) -> None:
    ref = reference(family)
    sampling = SamplingConfig(
        max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True, temperature=TEMPERATURE, top_p=TOP_P, seed=0
    )
    config = config_for(ref, sampling=sampling, micro_batch_size=2, num_micro_batches=2)
    assert tokens(opened(config), ref.prompts[:NUM_SAMPLED]) == ref.sampled


@pytest.mark.dealt(most=4)
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_a_prefill_do_not_change_tokens(
    kind: str, chunk: int, reference: References, opened: Runtimes
) -> None:
    ref = reference(KINDS[kind])
    assert tokens(opened(config_for(ref, prefill_chunk_tokens=chunk)), ref.prompts) == ref.expected


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("kind", KINDS)
def test_lanes_that_are_filled_again_do_not_change_tokens(kind: str, reference: References, opened: Runtimes) -> None:
    ref = reference(KINDS[kind])
    again = opened(config_for(ref, micro_batch_size=2, num_micro_batches=1))
    assert tokens(again, ref.prompts) == ref.expected


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_that_finish_early_leave_the_others_unchanged(kind: str, reference: References) -> None:
    """An EOS that really occurs ends its sequence where transformers would; all others go on as before."""
    ref = reference(KINDS[kind])
    eos = ref.expected[1][4]
    runtime = Runtime(config_for(ref, sampling=SamplingConfig(max_new_tokens=NUM_NEW_TOKENS)))
    object.__setattr__(runtime.model, "eos_token_ids", frozenset([eos]))
    for result, full in zip(runtime.generate(ref.prompts), ref.expected, strict=True):
        assert isinstance(result, Completion)
        length = full.index(eos) + 1 if eos in full else len(full)
        assert list(result.token_ids) == full[:length]
        assert result.finish.value == ("eos" if eos in full else "length")


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("family", ["llama", "gemma-2", "deepseek-v3", "qwen3-next", "bloom"])
def test_logits_in_bfloat16_are_those_of_transformers(
    family: str, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 3 % of their deviation: products are summed in another order, and bfloat16 keeps 8 bits of each sum."""
    ref = reference(family)
    model = AutoModelForCausalLM.from_pretrained(ref.directory, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        theirs = torch.stack([model(torch.tensor([prompt])).logits[0, -1].float() for prompt in ref.prompts])
    ours: dict[str, torch.Tensor] = {}

    def keep(sampler: Sampler, sequences: Sequence[Running], logits_BV: torch.Tensor) -> torch.Tensor:
        ours.update({s.request.id: row.float() for s, row in zip(sequences, logits_BV, strict=True)})
        return torch.zeros(len(sequences), 1, dtype=torch.int32)

    def end(sampler: Sampler, sequences: Sequence[Running], drawn: torch.Tensor, step: int) -> None:
        for sequence in sequences:
            sequence.finish = FinishReason.length

    monkeypatch.setattr(Sampler, "sample", keep)
    monkeypatch.setattr(Sampler, "accept", end)
    Runtime(config_for(ref, dtype=DType.bfloat16)).generate(ref.prompts)
    found = torch.stack([ours[str(index)] for index in range(len(ref.prompts))])
    assert (found - theirs).norm() <= 0.03 * theirs.norm()
