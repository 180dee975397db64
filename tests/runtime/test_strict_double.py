"""The double of a device shows mistakes that a real one shows now and then: each device or engine here makes one."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from runtime.config.settings import Admission, KVConfig, KVTier, Order, Tier
from runtime.errors import BrokenModelError
from runtime.stream.device import CopyPart
from runtime.stream.slots import DeferredTransfer
from tests.fake_device import Careless, FakeDevice, FakeEvent, FakeStream
from tests.fake_streams import Within
from tests.late_reads import files_are_read
from tests.runtime.test_beside import beside
from tests.runtime.test_fidelity import config_for, tokens
from tests.support import Reference

References = Callable[[str], Reference]
COMPUTE, COPIES, KV_IN = range(3)  # streams in the order in which the device makes them


def are_right(ref: Reference, device: FakeDevice, *, tier: Tier = Tier.cpu, kv: KVConfig | None = None) -> bool:
    config = replace(config_for(ref, tier=tier), kv=kv or KVConfig())
    try:
        return tokens(config, ref.prompts, device) == ref.expected
    except BrokenModelError:  # no numbers at all
        return False


def test_a_copy_spoils_its_target_until_it_is_waited_for() -> None:
    device = FakeDevice()
    target, event = torch.zeros(4), device.new_event()
    device.copy_all([CopyPart(torch.ones(4), target)], on=device.copy_stream, after=device.new_event())
    event.record(device.copy_stream)
    assert bool(target.isnan().all())
    event.synchronize()
    assert target.tolist() == [1.0] * 4


@pytest.mark.parametrize("tier", [Tier.cpu, Tier.nvme])
def test_weights_that_do_not_wait_for_their_slot_to_be_free_show_in_the_tokens(
    tier: Tier, reference: References
) -> None:
    ref, late = reference("llama"), (True, False)
    assert are_right(ref, FakeDevice(late), tier=tier)
    assert not are_right(ref, Careless(late, forgetful=COPIES), tier=tier)


def test_keys_and_values_that_do_not_wait_for_their_slot_to_be_free_show_in_the_tokens(reference: References) -> None:
    ref, late = reference("llama"), (True, True, False, True)
    kv = KVConfig(tier=KVTier.cpu, device_fraction=0.0)
    assert are_right(ref, FakeDevice(late), kv=kv)
    assert not are_right(ref, Careless(late, forgetful=KV_IN), kv=kv)


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("seed", range(3))
def test_irregular_streams_give_the_right_tokens(seed: int, reference: References) -> None:
    ref = reference("llama")
    config = beside(ref, schedule=Order.cgopipe, admission=Admission.continuous, tier=Tier.nvme, chunk=7)
    assert tokens(config, ref.prompts, FakeDevice(seed=seed)) == ref.expected


def test_an_event_without_a_stream_is_refused() -> None:
    """It would be the current device's."""
    with pytest.raises(RuntimeError, match="the current device's"):
        FakeEvent().record()


def test_no_other_thread_enters_a_stream_that_one_is_within() -> None:
    device = FakeDevice()
    within = device.on_stream(device.copy_stream)
    with within, ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="should not be initialized"):
        pool.submit(within.__enter__).result()


class SharedContexts(FakeDevice):
    """One context for each stream, as where the stream's object is entered itself."""

    def on_stream(self, stream: FakeStream) -> Within:
        return self.__dict__.setdefault("kept", {}).setdefault(stream, Within(stream))


def test_threads_that_meet_within_a_stream_show(reference: References) -> None:
    ref = reference("llama")
    config = beside(ref, schedule=Order.cgopipe, admission=Admission.continuous, tier=Tier.cpu, chunk=7)

    def run_often() -> None:
        for seed in range(20):
            tokens(config, ref.prompts, SharedContexts(seed=seed))

    with pytest.raises(RuntimeError, match="should not be initialized"):
        run_often()


def test_memory_of_inference_is_written_in_inference_alone() -> None:
    """As the device itself asks when the copy is queued, whoever waits for it."""
    device = FakeDevice()
    with torch.inference_mode():
        parts = [CopyPart(torch.ones(4), torch.zeros(4))]
        device.copy_all(parts, on=device.copy_stream, after=device.new_event())
    device.copy_stream.synchronize()
    assert parts[0].target.tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match="outside InferenceMode"):
        device.copy_all(parts, on=device.copy_stream, after=device.new_event())


def test_reads_that_nobody_waits_for_show_in_the_tokens(reference: References, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread would mostly have read by then."""
    ref = reference("llama")
    with files_are_read(is_late=True):
        assert are_right(ref, FakeDevice(), tier=Tier.nvme)
        monkeypatch.setattr(DeferredTransfer, "wait", lambda read: read.future.result())
        assert not are_right(ref, FakeDevice(), tier=Tier.nvme)
