"""Attention on the CPU beside keys and values that stay in host memory, in front of an accelerator."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from runtime import PolicyConfig
from runtime.config import Admission, Attention, KVConfig, KVTier, Order, PolicyKind, RuntimeConfig, Tier
from tests.fake_device import Careless, FakeDevice, FakeEvent
from tests.runtime.test_fidelity import config_for, tokens
from tests.support import Reference

References = Callable[[str], Reference]
COMPUTE, COPIES, DOWN, UP = range(4)  # streams in the order in which the device makes them
FAMILIES = ("llama", "mixtral", "gemma-2", "gpt-oss", "deepseek-v3")


def beside(
    reference: Reference,
    *,
    schedule: Order = Order.zigzag,
    admission: Admission = Admission.wave,
    tier: Tier = Tier.cpu,
    chunk: int = 24,
) -> RuntimeConfig:
    policy = PolicyConfig(
        kind=PolicyKind.fixed,
        micro_batch_size=2,
        num_micro_batches=3,
        admission=admission,
        schedule=schedule,
        attention=Attention.cpu,
        prefill_chunk_tokens=chunk,
    )
    return replace(config_for(reference, tier=tier, policy=policy), kv=KVConfig(tier=KVTier.cpu))


@pytest.mark.parametrize("tier", [Tier.cpu, Tier.nvme])
@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize("schedule", [Order.zigzag, Order.cgopipe])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers(
    family: str, schedule: Order, admission: Admission, tier: Tier, reference: References
) -> None:
    ref = reference(family)
    config = beside(ref, schedule=schedule, admission=admission, tier=tier)
    assert tokens(config, ref.prompts, FakeDevice((False,))) == ref.expected
