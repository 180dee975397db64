"""What cannot be is refused before a weight is read: of a checkpoint without weights, the settings are what the user
hears of."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from runtime import OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import (
    Attention,
    KVConfig,
    KVTier,
    MachineConfig,
    Order,
    PolicyKind,
    Prefetch,
    PrefetchConfig,
    Tier,
)
from runtime.errors import CheckpointError, ConfigError
from runtime.store.reader import Reader
from runtime.stream.device import ComputeDevice
from tests.fake_device import FakeDevice

PROMPTS = [[7, 8, 9, 10]] * 2


def policy(order: Order = Order.zigzag, attention: Attention = Attention.device) -> PolicyConfig:
    return PolicyConfig(
        kind=PolicyKind.fixed, micro_batch_size=1, num_micro_batches=2, schedule=order, attention=attention
    )


def config(**groups: object) -> RuntimeConfig:
    values: dict[str, object] = {"machine": MachineConfig(device="cpu"), "policy": policy()} | groups
    return RuntimeConfig(**values)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class Case:
    config: Callable[[], RuntimeConfig]
    message: str
    has_device: bool = False


OFF, IN_HOST = PrefetchConfig(kind=Prefetch.off), OffloadConfig(tier=Tier.cpu, resident_layers=0)
CASES = {
    "flexgen reads nothing ahead": Case(
        config=lambda: config(
            policy=policy(Order.flexgen), prefetch=OFF, offload=OffloadConfig(tier=Tier.nvme, resident_layers=0)
        ),
        message=r"policy\.schedule=flexgen .*prefetch=off .*prefetch=lookahead",
    ),
    "cgopipe copies nothing ahead": Case(
        config=lambda: config(policy=policy(Order.cgopipe, Attention.cpu), prefetch=OFF, offload=IN_HOST),
        message=r"policy\.schedule=cgopipe .*prefetch=lookahead",
        has_device=True,
    ),
    "one KV slot for two lanes at their attention": Case(
        config=lambda: config(
            policy=policy(attention=Attention.cpu), kv=KVConfig(tier=KVTier.nvme, device_fraction=0.0, num_slots=1)
        ),
        message=r"set kv\.num_slots=2",
    ),
    "the CPU attends elsewhere than its KV": Case(
        config=lambda: config(policy=policy(attention=Attention.cpu), kv=KVConfig(tier=KVTier.device)),
        message=r"policy\.attention=cpu .*kv=device: set kv=cpu",
        has_device=True,
    ),
    "more log-probabilities than tokens": Case(
        config=lambda: config(sampling=SamplingConfig(logprobs=100_000)), message=r"sampling\.logprobs=100000"
    ),
}


@pytest.fixture(autouse=True)
def missing_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(reader: Reader, *args: object) -> None:
        raise CheckpointError("the weights are missing")

    monkeypatch.setattr(Reader, "submit", fail)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_contradictions_are_refused_before_a_weight_is_read(case: Case) -> None:
    with pytest.raises(ConfigError, match=case.message):
        Runtime(case.config(), device=FakeDevice() if case.has_device else ComputeDevice("cpu")).generate(PROMPTS)


def test_what_agrees_gets_as_far_as_the_weights() -> None:
    with pytest.raises(CheckpointError, match="the weights are missing"):
        Runtime(config()).generate(PROMPTS)
