"""Greedy fp32 output equals `transformers.generate`, token for token, whatever road the weights take."""

from collections.abc import Callable

import pytest

from runtime import ModelConfig, OffloadConfig, PolicyConfig, PrefetchConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import DType, PolicyKind, Prefetch, Tier
from runtime.sequences.sequence import Completion
from runtime.stream.device import ComputeDevice
from tests.support import NUM_NEW_TOKENS, Reference

References = Callable[[str], Reference]
Runtimes = Callable[[RuntimeConfig], Runtime]


def config_for(
    reference: Reference,
    *,
    tier: Tier = Tier.nvme,
    prefetch: PrefetchConfig | None = None,
    resident_layers: int | None = 0,
    policy: PolicyConfig | None = None,
    sampling: SamplingConfig | None = None,
) -> RuntimeConfig:
    return RuntimeConfig(
        model=ModelConfig(name="test", path=str(reference.directory), dtype=DType.float32),
        offload=OffloadConfig(tier=tier, resident_layers=resident_layers, read_chunk_mib=1),
        prefetch=prefetch or PrefetchConfig(),
        policy=policy or PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=3, num_micro_batches=3),
        sampling=sampling or SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True),
    )


def tokens(config: RuntimeConfig, prompts: list[list[int]], device: ComputeDevice | None = None) -> list[list[int]]:
    return tokens_of(Runtime(config, device=device), prompts)


def tokens_of(runtime: Runtime, prompts: list[list[int]]) -> list[list[int]]:
    results = runtime.generate(prompts)
    assert all(isinstance(result, Completion) for result in results), results
    return [list(result.token_ids) for result in results if isinstance(result, Completion)]


@pytest.mark.dealt("tier", "kind", "family", most=3)
@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("kind", Prefetch)
@pytest.mark.parametrize("family", ["llama, tied", "mixtral", "falcon, first"])
def test_tier_and_prefetch_do_not_change_tokens(
    family: str, kind: Prefetch, tier: Tier, reference: References, opened: Runtimes
) -> None:
    ref = reference(family)
    config = config_for(ref, tier=tier, prefetch=PrefetchConfig(kind=kind, depth=2, block_layers=2), resident_layers=1)
    assert tokens_of(opened(config), ref.prompts) == ref.expected


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 7])
def test_chunks_and_micro_batches_do_not_change_tokens(
    micro_batch_size: int, chunk: int, reference: References, opened: Runtimes
) -> None:
    ref = reference("llama")
    policy = PolicyConfig(
        kind=PolicyKind.fixed, micro_batch_size=micro_batch_size, num_micro_batches=2, prefill_chunk_tokens=chunk
    )
    assert tokens_of(opened(config_for(ref, policy=policy)), ref.prompts) == ref.expected
