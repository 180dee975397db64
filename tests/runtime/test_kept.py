"""An open runtime keeps what it has read within its budgets, and gives the tokens of a fresh one."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime import OffloadConfig, Runtime
from runtime.config.settings import Tier
from runtime.plan.cost.calibration import TypicalLoad
from runtime.plan.placement.placement import Budgets
from runtime.plan.shape.extents import group_layout
from runtime.planning import budgets
from runtime.planning import planner as planning
from runtime.sequences.sequence import Request
from runtime.stream.device import ComputeDevice
from runtime.stream.weight_cache import StageBytes, WeightCache
from runtime.units import GIB
from tests.fake_device import FakeDevice
from tests.runtime.library_support import (
    DEVICES,
    Reads,
    References,
    Remembering,
    RememberingFake,
    host_bytes_for,
    rates_of_any_load,
    reads,
    small_config,
)
from tests.runtime.test_fidelity import config_for, tokens_of

__all__ = ["rates_of_any_load", "reads"]


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(
    ("family", "device", "tier"),
    [
        *(("llama, tied", device, tier) for device in DEVICES for tier in ("auto", "none", "cpu", "nvme")),
        *(("mixtral", "cpu", tier) for tier in ("none", "nvme")),
        *(("mixtral", "fake", tier) for tier in ("auto", "cpu")),
    ],
)
def test_weights_that_are_kept_give_the_tokens_of_those_read_anew(
    family: str, device: str, tier: str, reference: References, reads: Reads
) -> None:
    """Batches of other shapes, the first one again at the end. What is streamed is read again, and nothing else."""
    ref = reference(family)
    config = config_for(ref, tier=Tier[tier], resident_layers=1)
    config = replace(config, offload=replace(config.offload, expert_paging="off"))
    fresh = Runtime(config, device=DEVICES[device]())
    assert tokens_of(fresh, ref.prompts) == ref.expected
    of_fresh = reads.take()
    with Runtime(config, device=DEVICES[device]()) as runtime:
        assert tokens_of(runtime, ref.prompts) == ref.expected
        assert reads.take() == of_fresh
        assert runtime._cache is not None
        groups = [[runtime.model.shape.stages[i] for i in key] for key in runtime._cache.weights.stages.resident]
        resident = sum(extent.num_bytes for group in groups for extent in group_layout(group).extents)
        assert tokens_of(runtime, ref.prompts[2:3]) == ref.expected[2:3]
        reads.take()
        assert tokens_of(runtime, ref.prompts) == ref.expected
        is_streamed = tier == "nvme" or (tier, device) == ("auto", "cpu")
        assert reads.take() == (of_fresh - resident if is_streamed else 0)
        assert resident > 0


def test_experts_in_host_memory_are_kept_too(reference: References, reads: Reads) -> None:
    ref = reference("qwen3-moe")
    config = config_for(ref, tier=Tier.cpu, resident_layers=1)
    config = replace(config, offload=replace(config.offload, expert_paging="hit"))
    with Runtime(config, device=FakeDevice()) as runtime:
        assert tokens_of(runtime, ref.prompts) == ref.expected
        assert reads.take() > 0
        assert runtime._cache is not None
        assert runtime._cache.weights.experts.in_host
        assert tokens_of(runtime, ref.prompts[1:]) == ref.expected[1:]
        assert reads.take() == 0


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("tier", ["auto", "none", "cpu", "nvme"])
@pytest.mark.parametrize("make", [Remembering, RememberingFake])
def test_between_calls_weights_are_held_and_nothing_else_and_after_the_end_nothing(
    make: Callable[[], Remembering], tier: str, reference: References
) -> None:
    ref, device = reference("llama"), make()
    before = threading.active_count(), len([*Path("/proc/self/fd").iterdir()])
    with Runtime(config_for(ref, tier=Tier[tier], resident_layers=1), device=device) as runtime:
        assert device.held_bytes == 0
        runtime.generate(ref.prompts)
        assert runtime._cache is not None
        weights = runtime._cache.weights
        assert device.held_bytes == weights.compute_bytes + weights.pinned_bytes > 0
        runtime.generate(ref.prompts[:1])
        assert device.held_bytes == weights.compute_bytes + weights.pinned_bytes
    assert device.held_bytes == 0
    assert (threading.active_count(), len([*Path("/proc/self/fd").iterdir()])) == before


def test_a_batch_that_takes_more_memory_keeps_fewer_weights_within_the_same_budget(reference: References) -> None:
    ref, kept = reference("llama"), list[int]()
    budget = host_bytes_for(ref, 4)
    with Runtime(small_config(ref, host_memory_gib=(budget + 4096) / GIB)) as runtime:
        for num_tokens in (20, 4, 20):  # the first measures for all
            request = runtime.request("0", [5] * num_tokens)
            assert isinstance(request, Request)
            with runtime.open_with_backoff([request]) as (plan, _):
                [ledger] = plan.placement.ledgers
                assert runtime._cache is not None
                kept.append(runtime._cache.weights.compute_bytes)
                resident = sum(e.num_bytes for e in ledger.entries if e.name in ("weights", "resident weights"))
                assert (ledger.fits, resident) == (True, kept[-1])
    assert 0 < kept[0] < kept[1] > kept[2] == kept[0]


@pytest.mark.parametrize(("free", "pinned"), [(7.9, 6.0), (6.0, 5.4)])
def test_of_a_host_three_quarters_are_pinned_at_most_unless_more_is_asked_for(
    free: float, pinned: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 GiB; where less is free, nine tenths of that, as where nothing is pinned."""
    monkeypatch.setattr(budgets, "available_bytes", lambda: int(free * GIB))
    monkeypatch.setattr(budgets, "total_bytes", lambda: 8 * GIB)
    found = {
        each: budgets.make_budgets(OffloadConfig(), each).host_bytes for each in (FakeDevice(), ComputeDevice("cpu"))
    }
    assert [value / GIB for value in found.values()] == pytest.approx([pinned, 0.9 * free])
    assert budgets.make_budgets(OffloadConfig(host_memory_gib=7.5), FakeDevice()).host_bytes == 7.5 * GIB


def test_weights_that_are_kept_are_free_for_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = WeightCache()
    kept.stages.resident[(0,)] = StageBytes(torch.empty(3 * 1024, dtype=torch.uint8), {}, 0)
    kept.experts.in_host[0] = torch.empty(512, dtype=torch.uint8)
    monkeypatch.setattr(budgets, "available_bytes", lambda: GIB)
    monkeypatch.setattr(budgets, "total_bytes", lambda: 4 * GIB)
    monkeypatch.setattr(budgets, "FREE_SHARE", 1)
    on_cpu = budgets.make_budgets(OffloadConfig(), ComputeDevice("cpu"), kept)
    assert on_cpu.host_bytes == GIB + 3 * 1024 + 512
    on_device = budgets.make_budgets(OffloadConfig(), FakeDevice(), kept)
    assert (on_device.host_bytes, on_device.device_bytes) == (GIB + 512, GIB + 3 * 1024)
    said = budgets.make_budgets(OffloadConfig(host_memory_gib=1, device_memory_gib=1), FakeDevice(), kept)
    assert (said.host_bytes, said.device_bytes) == (GIB, GIB)


@pytest.mark.parametrize(
    ("num_bytes", "of", "are_held"),
    [
        (100, Budgets(host_bytes=3684), True),
        (101, Budgets(host_bytes=3684), False),
        (100, Budgets(host_bytes=612, device_bytes=3172), True),
        (101, Budgets(host_bytes=700, device_bytes=3172), False),
        (100, Budgets(host_bytes=611, device_bytes=9999), False),
    ],
)
def test_measuring_again_has_room_beside_what_is_kept(num_bytes: int, of: Budgets, are_held: bool) -> None:
    kept = WeightCache()
    kept.stages.resident[(0,)] = StageBytes(torch.empty(3072, dtype=torch.uint8), {}, 0)
    kept.experts.in_host[0] = torch.empty(512, dtype=torch.uint8)
    kept.ensure_free(num_bytes, of)
    assert (kept.compute_bytes + kept.pinned_bytes > 0) is are_held


def test_rates_are_measured_again_only_for_a_load_of_more_than_twice_the_size(
    reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, measured, real = reference("llama"), list[TypicalLoad](), planning.measure_rates

    def counted(*of: object) -> object:
        measured.append(of[3])  # pyright: ignore
        return real(*of)  # pyright: ignore

    monkeypatch.setattr(planning, "measure_rates", counted)
    with Runtime(config_for(ref)) as runtime:
        for lengths, num_measured in [([8, 8], 1), ([8], 1), ([15], 1), ([40], 2), ([8, 8], 2), ([64], 2)]:
            runtime.generate([[5] * length for length in lengths])
            assert len(measured) == num_measured, lengths
