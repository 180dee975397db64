"""What torch keeps of a device's memory, and of pinned memory, is free for the next plan; and what it says when there
is none left."""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from runtime import OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import PolicyKind, Tier
from runtime.engine.session import Session
from runtime.errors import BudgetError
from runtime.out_of_memory import is_out_of_memory
from runtime.plan.cost.machine import make_machine
from runtime.plan.placement.ledger import LIBRARY_BYTES
from runtime.plan.placement.load import Load
from runtime.plan.placement.memory import ALLOCATOR_SLACK_BYTES
from runtime.plan.placement.placement import Budgets
from runtime.plan.placement.placer import choose_placement
from runtime.planning import budgets
from runtime.sequences.sequence import Request
from runtime.stream.device import ALLOCATOR_VARIABLES, ComputeDevice
from runtime.units import GIB, MIB, gib_to_bytes
from tests.caching_device import CachingDevice
from tests.runtime.test_profile import profile
from tests.toy import toy_shape
from tests.two_devices import FakeAccelerator

PROMPTS = [[5, 6, 7]] * 8
CONFIG = RuntimeConfig(
    offload=OffloadConfig(tier=Tier.cpu, resident_layers=0),
    policy=PolicyConfig(kind=PolicyKind.auto, micro_batch_size=4, num_micro_batches=2),
    sampling=SamplingConfig(max_new_tokens=2, ignore_eos=True),
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CachingDevice:
    device = CachingDevice(device_bytes=160 * MIB, host_bytes=160 * MIB)
    monkeypatch.setattr(budgets, "available_bytes", lambda: device.pinned.unreserved)
    return device


def requests_of(runtime: Runtime) -> list[Request]:
    made = [runtime.request(str(index), prompt) for index, prompt in enumerate(PROMPTS)]
    return [request for request in made if isinstance(request, Request)]


def test_the_second_plan_of_a_process_has_the_memory_of_the_first(device: CachingDevice) -> None:
    runtime = Runtime(CONFIG, device=device)
    requests = requests_of(runtime)
    first = runtime.plan(requests).budgets
    runtime.generate(PROMPTS)
    gc.collect()
    assert device.free_bytes() == device.own.total - device.own.allocated > device.own.unreserved
    assert device.pinned.reserved > device.pinned.allocated
    assert runtime.plan(requests).budgets == first


def test_a_revised_plan_has_the_memory_that_its_session_holds(device: CachingDevice) -> None:
    runtime = Runtime(replace(CONFIG, policy=PolicyConfig(kind=PolicyKind.hrm)), device=device)
    requests = requests_of(runtime)
    with runtime.open_with_backoff(requests) as (plan, _):
        assert device.own.allocated > 0
        assert plan.rates is not None
        assert runtime.revised(plan, requests, plan.rates).budgets == plan.budgets
        assert runtime.budgets() != plan.budgets


FAILURES = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "pinned": torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cublas, full card": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    "cublasLt": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasLtMatmul with transpose_mat1 1"
    ),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "rocm": RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    "xpu": RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_what_libraries_say_of_a_full_memory_is_understood(failure: str) -> None:
    assert is_out_of_memory(FAILURES[failure])


def test_other_failures_of_libraries_are_not_taken_for_it() -> None:
    assert not is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"))
    assert not is_out_of_memory(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The first so many tries of a session fail as a full card does, once all of its memory is taken."""
    probe = Session.probe

    def fail(num_tries: int) -> None:
        left = iter(range(num_tries))

        def failing_probe(session: Session, requests: list[Request]) -> None:
            probe(session, requests)
            if next(left, None) is not None:
                raise RuntimeError(*FAILURES["cublas, full card"].args)  # one that keeps no frames of an earlier try

        monkeypatch.setattr(Session, "probe", failing_probe)

    return fail


def test_backing_off_plans_with_the_memory_of_the_first_try(
    device: CachingDevice, failing: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    failing(1)
    runtime = Runtime(CONFIG, device=device)
    requests = requests_of(runtime)
    first = runtime.plan(requests)
    with caplog.at_level(logging.WARNING), runtime.open_with_backoff(requests) as (plan, _):
        assert plan.num_lanes * plan.lane_size == first.num_lanes * first.lane_size / 2
        assert plan.budgets == first.budgets
    assert "trying again with half as many sequences per block" in caplog.text


def test_a_card_that_stays_full_is_a_refusal_that_says_what_was_said_and_the_keys(
    device: CachingDevice, failing: Callable[[int], None]
) -> None:
    failing(2)
    runtime = Runtime(CONFIG, device=device)
    said = r"(?s)CUBLAS_STATUS.*device memory:.*lower offload\.device_memory_gib or .*policy\.micro_batch_size"
    with pytest.raises(BudgetError, match=said), runtime.open_with_backoff(requests_of(runtime)):
        pass


def test_a_device_budget_holds_for_torchs_allocator_while_a_session_is_open(device: CachingDevice) -> None:
    """Above what was in tensors before."""
    runtime = Runtime(replace(CONFIG, offload=replace(CONFIG.offload, device_memory_gib=0.1)), device=device)
    requests, before = requests_of(runtime), device.compute_buffer(MIB)
    with runtime.open_with_backoff(requests):
        room = gib_to_bytes(0.1) + len(before) - device.own.allocated
        device.compute_buffer(room)
        with pytest.raises(torch.OutOfMemoryError):
            device.compute_buffer(room + 1)
    device.compute_buffer(room + 1)


def test_a_limit_is_a_share_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = FakeAccelerator(monkeypatch)
    device = ComputeDevice("cuda:1")
    device.set_memory_limit(GIB)
    assert accelerator.limits == {1: 0.25}
    device.set_memory_limit(None)
    assert accelerator.limits == {1: 1.0}
    device.set_memory_limit(5 * GIB)
    assert accelerator.limits == {1: 1.0}


def test_segments_grow_unless_the_user_configures_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = FakeAccelerator(monkeypatch)
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    ComputeDevice("cuda")
    assert accelerator.settings == ["expandable_segments:True"]
    for name in ALLOCATOR_VARIABLES:
        with monkeypatch.context() as context:
            context.setenv(name, "max_split_size_mb:512")
            ComputeDevice("cuda")
    assert len(accelerator.settings) == 1


def test_a_device_that_maps_no_pages_has_whole_segments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = FakeAccelerator(monkeypatch)

    def refuse(*sizes: int, **options: object) -> torch.Tensor:
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(torch, "empty", refuse)
    ComputeDevice("cuda")
    assert accelerator.settings == ["expandable_segments:True", "expandable_segments:False"]
    assert "cuda:0 does not support expandable segments" in caplog.text


def test_what_libraries_take_is_a_term_of_the_devices_ledger_and_a_heaps_slack_is_none() -> None:
    """And of every device, where a machine has several."""
    shape, load = toy_shape(), Load.from_lanes(toy_shape(), [], 512)
    totals: dict[int, int] = {}
    for count in (0, 1, 4):
        budgets = Budgets(host_bytes=GIB, device_bytes=4 * GIB, library_bytes=count * LIBRARY_BYTES)
        ledger = choose_placement(shape, CONFIG, budgets, load).ledgers[0]
        entries = {entry.name: entry for entry in ledger.entries}
        assert ("libraries" in entries) == (count > 0)
        assert ("slack 48 MiB" in entries["workspace"].equation) == (count == 0)
        totals[count] = ledger.total_bytes
    assert totals[1] - totals[0] == LIBRARY_BYTES - ALLOCATOR_SLACK_BYTES
    assert totals[4] - totals[1] == 3 * LIBRARY_BYTES


def test_a_run_and_a_plan_leave_a_device_the_same_for_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeAccelerator(monkeypatch)
    offload = OffloadConfig(device_memory_gib=2.0)
    found = budgets.make_budgets(offload, ComputeDevice("cuda"))
    assert found.library_bytes == LIBRARY_BYTES == make_machine(profile("t4")).budgets.library_bytes
    assert budgets.make_budgets(offload, ComputeDevice("cpu")).library_bytes == 0
    assert make_machine(profile("4xt4")).budgets.library_bytes == LIBRARY_BYTES, "of each device"


def test_pinned_memory_that_cannot_be_had_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeAccelerator(monkeypatch)
    device = ComputeDevice("cuda")

    def refuse(*sizes: int, **options: object) -> torch.Tensor:
        raise FAILURES["pinned"]

    monkeypatch.setattr(torch, "empty", refuse)
    for take in (device.host_buffer, device.host_pages):
        with pytest.raises(MemoryError, match=r"64 MiB.* cannot be pinned \(CUDA error: out of memory\)"):
            take(64 * MIB)


def test_caches_are_emptied_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    FakeAccelerator(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append("device"))
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: emptied.append("host"))
    ComputeDevice("cuda").empty_caches()
    assert emptied == ["device", "host"]
    ComputeDevice("cpu").empty_caches()
    assert len(emptied) == 2
