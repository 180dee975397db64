"""Attention on the CPU beside keys and values that stay in host memory, in front of an accelerator."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from runtime import PolicyConfig, Runtime
from runtime.config.settings import Admission, Attention, KVConfig, KVTier, Order, PolicyKind, RuntimeConfig, Tier
from runtime.errors import BrokenModelError, ConfigError
from runtime.plan.shape.extents import pinned_bytes
from runtime.sequences.sequence import Completion, Request
from runtime.stream.exchange import HostExchange, RoundTrip
from tests.fake_device import FakeDevice
from tests.runtime.test_correct import RATES
from tests.runtime.test_fidelity import config_for, tokens
from tests.support import Reference

pytestmark = pytest.mark.usefixtures("two_threads")

References = Callable[[str], Reference]
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


ROADS = [
    (Order.zigzag, Admission.wave, Tier.cpu),
    (Order.cgopipe, Admission.continuous, Tier.nvme),
    (Order.cgopipe, Admission.wave, Tier.nvme),
    (Order.zigzag, Admission.continuous, Tier.cpu),
]
CASES = [("llama", *road) for road in ROADS] + [(family, *road) for family in FAMILIES[1:] for road in ROADS[:2]]


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(("family", "schedule", "admission", "tier"), CASES)
def test_tokens_equal_transformers(
    family: str, schedule: Order, admission: Admission, tier: Tier, reference: References
) -> None:
    """With copies that are as late as they may be, and prompts in pieces beside rows that decode."""
    ref = reference(family)
    config = beside(ref, schedule=schedule, admission=admission, tier=tier)
    assert tokens(config, ref.prompts, FakeDevice((False,))) == ref.expected


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("late", list(itertools.product([False, True], repeat=2)), ids=str)
def test_tokens_do_not_depend_on_which_way_is_late(late: tuple[bool, bool], reference: References) -> None:
    ref = reference("llama")
    assert tokens(beside(ref, chunk=7), ref.prompts, FakeDevice((False, True, *late))) == ref.expected


def test_its_kernel_is_ready_before_the_first_pass(reference: References, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rates that are known nothing else would compile it: its first use takes seconds."""
    ref, prepared = reference("llama"), list[torch.dtype]()
    monkeypatch.setattr("runtime.attention.host_attention.prepare_decode_attention", prepared.append)
    for attention, expected in ((Attention.device, []), (Attention.cpu, [torch.float32])):
        config = beside(ref)
        runtime = Runtime(replace(config, policy=replace(config.policy, attention=attention)), device=FakeDevice())
        assert prepared == expected, "its memory is in no budget"
        prepared.clear()
        requests = [runtime.request("0", ref.prompts[0])]
        plan = runtime.plan([request for request in requests if isinstance(request, Request)], rates=RATES)
        with runtime.session(plan):
            assert prepared == expected


def test_without_the_wait_for_what_goes_down_the_tokens_are_wrong(
    reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = reference("llama")
    monkeypatch.setattr(RoundTrip, "wait_for_inputs", lambda round_trip: round_trip._inputs)
    assert is_wrong(ref, FakeDevice((False,)))


def test_without_the_wait_for_answers_the_tokens_are_wrong(
    reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = reference("llama")
    monkeypatch.setattr(HostExchange, "receive_output", lambda exchange, memory, _: exchange._free.append(memory))
    assert is_wrong(ref, FakeDevice((False,)))


def is_wrong(reference: Reference, device: FakeDevice) -> bool:
    """Tokens differ, or an answer was no number."""
    try:
        results = Runtime(beside(reference, chunk=7), device=device).generate(reference.prompts)
    except BrokenModelError:
        return True
    assert all(isinstance(result, Completion) for result in results)
    found = [list(result.token_ids) for result in results if isinstance(result, Completion)]
    return found != reference.expected


class Counting(FakeDevice):
    """Notes the pinned memory that is asked for, as torch's allocator rounds it."""

    def __init__(self) -> None:
        self.pinned = 0
        super().__init__((False,))

    def host_pages(self, num_bytes: int) -> torch.Tensor:
        self.pinned += pinned_bytes(num_bytes, is_aligned=False)
        return super().host_pages(num_bytes)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tokens of a pass, some hundred bytes, which are gone again."""
        pinned = self.pinned
        found = super().to_host(tensors)
        self.pinned = pinned
        return found


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_the_ledger_holds_every_pinned_byte(family: str, reference: References) -> None:
    ref, device = reference(family), Counting()
    runtime = Runtime(beside(ref), device=device)
    requests = [r for n, prompt in enumerate(ref.prompts) if isinstance(r := runtime.request(str(n), prompt), Request)]
    plan = runtime.plan(requests)
    host = next(ledger for ledger in plan.placement.ledgers if ledger.memory == "host")
    with runtime.session(plan) as session:
        for block in plan.blocks:
            session.run(block, requests)
    entries = {entry.name: entry.num_bytes for entry in host.entries}
    assert device.pinned == entries["KV pages"] + entries["KV exchange"]


@pytest.mark.parametrize("family", ["deepseek-v3", "falcon, first"])
def test_where_the_cpu_cannot_attend_keys_and_values_are_where_kv_says(family: str, reference: References) -> None:
    """Latents are expanded where the model computes; padded lanes run the model's own code."""
    ref = reference(family)
    for tier, fraction, num_layers in ((KVTier.device, None, 0), (KVTier.cpu, 0.0, 4)):
        config = replace(beside(ref), kv=KVConfig(tier=tier, device_fraction=fraction))
        runtime = Runtime(config, device=FakeDevice((False,)))
        request = runtime.request("0", ref.prompts[0])
        assert isinstance(request, Request)
        placement = runtime.plan([request]).placement
        assert placement.host_layers == frozenset()
        assert placement.decode_walk.cpu_attention == ()
        assert len(placement.kv.page_bytes) == num_layers


@pytest.mark.parametrize("tier", [KVTier.device, KVTier.nvme])
def test_keys_and_values_that_are_not_beside_the_cpu_are_refused(tier: KVTier, reference: References) -> None:
    ref = reference("llama")
    config = replace(beside(ref), kv=KVConfig(tier=tier))
    with pytest.raises(ConfigError, match=f"policy.attention=cpu .* not kv={tier.value}: set kv=cpu"):
        Runtime(config, device=FakeDevice((False,))).generate(ref.prompts)
