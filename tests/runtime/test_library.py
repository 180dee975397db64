"""An open runtime keeps what it has read, gives the tokens of a fresh one, and leaves nothing behind."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import ModelConfig, OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig, budgets, planning
from runtime.config import Tier
from runtime.engine.sequence import Request
from runtime.errors import BudgetError, ClosedError, ConfigError, Interrupted
from runtime.model.loading import LoadedModel
from runtime.plan.cost.rates import MachineRates
from runtime.plan.cost.typical_load import TypicalLoad
from runtime.plan.placement.placement import Budgets
from runtime.plan.shape.extents import Extent, group_layout
from runtime.store.reader import Reader
from runtime.store.transfer import PendingTransfer
from runtime.stream.device import ComputeDevice
from runtime.stream.kept_weights import HostPiece, KeptWeights, StageBytes
from runtime.units import GIB
from tests.fake_device import FakeDevice
from tests.runtime.test_fidelity import config_for, tokens_of
from tests.support import Reference

References = Callable[[str], Reference]
RATES: dict[object, MachineRates] = {}
DEVICES = {"cpu": lambda: ComputeDevice("cpu"), "fake": FakeDevice}


@pytest.fixture(autouse=True)
def rates_of_any_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are measured for the first load and hold for all: these tests are not about speed."""
    measure = planning.measure_rates

    def rates_of(loaded: LoadedModel, reader: Reader, device: ComputeDevice, usual: TypicalLoad, paged: Any) -> Any:
        key = loaded.fingerprint, type(device), paged
        if key not in RATES:
            RATES[key] = measure(loaded, reader, device, usual, paged)
        return RATES[key]

    monkeypatch.setattr(planning, "measure_rates", rates_of)


class Reads:
    """What was read since it was asked last, in bytes; less what measuring reads."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self._asked: list[int] = []
        self._submit, self._measure = Reader.submit, planning.measure_rates
        patch.setattr(Reader, "submit", lambda *of: self._counted(*of))
        patch.setattr(planning, "measure_rates", self._measured)

    def _counted(self, reader: Reader, extents: Sequence[Extent], target: memoryview) -> PendingTransfer:
        self._asked.extend(extent.num_bytes for extent in extents)
        return self._submit(reader, extents, target)

    def _measured(self, *of: Any) -> MachineRates:
        before = len(self._asked)
        rates = self._measure(*of)
        del self._asked[before:]
        return rates

    def take(self) -> int:
        total = sum(self._asked)
        self._asked.clear()
        return total


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama, tied", "mixtral"])
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
        assert runtime._kept is not None
        groups = [[runtime.model.shape.stages[i] for i in key] for key in runtime._kept.weights.stages.resident]
        resident = sum(extent.num_bytes for group in groups for extent in group_layout(group).extents)
        assert tokens_of(runtime, ref.prompts[2:3]) == ref.expected[2:3]
        reads.take()
        assert tokens_of(runtime, ref.prompts) == ref.expected
        assert reads.take() == (of_fresh - resident if tier == "nvme" else 0)
        assert resident > 0


def test_experts_in_host_memory_are_kept_too(reference: References, reads: Reads) -> None:
    ref = reference("qwen3-moe")
    config = config_for(ref, tier=Tier.cpu, resident_layers=1)
    config = replace(config, offload=replace(config.offload, expert_paging="hit"))
    with Runtime(config, device=FakeDevice()) as runtime:
        assert tokens_of(runtime, ref.prompts) == ref.expected
        assert reads.take() > 0
        assert runtime._kept is not None
        assert runtime._kept.weights.experts.in_host
        assert tokens_of(runtime, ref.prompts[1:]) == ref.expected[1:]
        assert reads.take() == 0


class Remembering(ComputeDevice):
    """Knows which of its memory is still held."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[torch.Tensor]] = []
        super().__init__("cpu")

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        buffer = super().host_buffer(num_bytes)
        self._made.append(weakref.ref(buffer))
        return buffer

    @property
    def held_bytes(self) -> int:
        return sum(buffer.nbytes for made in self._made if (buffer := made()) is not None)


class RememberingFake(FakeDevice):
    """An accelerator that knows it."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[torch.Tensor]] = []
        super().__init__()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return self._remembered(super().host_buffer(num_bytes))

    def compute_buffer(self, num_bytes: int) -> torch.Tensor:
        return self._remembered(super().compute_buffer(num_bytes))

    def _remembered(self, buffer: torch.Tensor) -> torch.Tensor:
        self._made.append(weakref.ref(buffer))
        return buffer

    held_bytes = Remembering.held_bytes


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("make", [Remembering, RememberingFake])
def test_between_calls_weights_are_held_and_nothing_else_and_after_the_end_nothing(
    make: Callable[[], Remembering], tier: str, reference: References
) -> None:
    ref, device = reference("llama"), make()
    before = threading.active_count(), len([*Path("/proc/self/fd").iterdir()])
    with Runtime(config_for(ref, tier=Tier[tier], resident_layers=1), device=device) as runtime:
        assert device.held_bytes == 0
        runtime.generate(ref.prompts)
        assert runtime._kept is not None
        weights = runtime._kept.weights
        assert device.held_bytes == weights.compute_bytes + weights.pinned_bytes > 0
        runtime.generate(ref.prompts[:1])
        assert device.held_bytes == weights.compute_bytes + weights.pinned_bytes
    assert device.held_bytes == 0
    assert (threading.active_count(), len([*Path("/proc/self/fd").iterdir()])) == before


def test_an_end_is_an_end_for_every_call(reference: References) -> None:
    ref = reference("llama")
    runtime = Runtime(config_for(ref)).open()
    request = runtime.request("0", ref.prompts[0])
    assert isinstance(request, Request)
    plan, stream = runtime.plan([request]), runtime.stream(ref.prompts)
    next(stream)
    runtime.close()
    runtime.close()
    calls: list[Callable[[], object]] = [
        lambda: runtime.generate(ref.prompts),
        lambda: runtime.stream(ref.prompts),
        lambda: runtime.plan([request]),
        lambda: runtime.session(plan).__enter__(),
        runtime.open,
        lambda: next(stream),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


@pytest.mark.parametrize("admission", ["wave", "continuous"])
def test_completions_come_as_they_finish_and_know_their_prompts(admission: str, reference: References) -> None:
    ref = reference("llama")
    policy = PolicyConfig(kind="fixed", micro_batch_size=2, num_micro_batches=1, admission=admission)
    num_passes = 0

    def counts() -> bool:
        nonlocal num_passes
        num_passes += 1
        return False

    with Runtime(config_for(ref, policy=policy), should_stop=counts) as runtime:
        seen = [(num_passes, result) for result in runtime.stream(ref.prompts)]
        assert runtime.generate(ref.prompts) == sorted((each for _, each in seen), key=lambda each: each.prompt_index)
    assert {result.prompt_index: list(result.token_ids) for _, result in seen} == dict(enumerate(ref.expected))
    assert len({when for when, _ in seen}) > 1, "the first is there before the last is made"


@pytest.mark.parametrize("is_open", [True, False])
def test_whoever_breaks_off_ends_the_work_and_its_memory(is_open: bool, reference: References) -> None:
    ref, device, num_asked = reference("llama"), Remembering(), 0
    policy = PolicyConfig(kind="fixed", micro_batch_size=1, num_micro_batches=1)

    def counts() -> bool:
        nonlocal num_asked
        num_asked += 1
        return False

    runtime = Runtime(config_for(ref, policy=policy, resident_layers=1), device=device, should_stop=counts)
    if is_open:
        runtime.open()
    for result in runtime.stream(ref.prompts):
        assert result.is_ok
        break
    gc.collect()
    done, kept = num_asked, runtime._kept.weights.compute_bytes if runtime._kept is not None else 0
    assert device.held_bytes == kept
    assert (kept > 0) is is_open
    assert num_asked == done
    assert tokens_of(runtime, ref.prompts) == ref.expected
    assert num_asked - done > done, "all of them take more passes than one"
    runtime.close()


def test_a_later_call_ends_a_stream_which_says_so_instead_of_ending_early(reference: References) -> None:
    ref = reference("llama")
    with Runtime(config_for(ref)) as runtime:
        stream, exhausted = runtime.stream(ref.prompts), runtime.stream(ref.prompts[:1])
        with pytest.raises(ClosedError, match="ended by a later call"):
            next(stream)
        assert len(list(exhausted)) == 1
        assert tokens_of(runtime, ref.prompts) == ref.expected
        assert list(exhausted) == []


def test_an_input_without_an_end_is_read_in_windows(reference: References, reads: Reads) -> None:
    ref, given = reference("llama"), 0

    def prompts() -> Iterator[list[int]]:
        nonlocal given
        for index in count():
            given += 1
            yield ref.prompts[index % len(ref.prompts)]

    runtime = Runtime(config_for(ref, tier=Tier.none))
    found: dict[int, list[int]] = {}
    for result in runtime.stream(prompts(), window=3):
        found[result.prompt_index] = list(result.token_ids)
        if len(found) == 3:
            assert given == 3
            reads.take()
        if len(found) == 7:
            break
    assert (given, reads.take()) == (9, 0)
    assert runtime._kept is None
    assert all(tokens == ref.expected[index % len(ref.prompts)] for index, tokens in found.items())


def host_bytes_for(ref: Reference, num_tokens: int, **offload: Any) -> int:
    """What a plan takes for a prompt of so many tokens, in a plan that has all memory."""
    runtime = Runtime(small_config(ref, **offload))
    request = runtime.request("0", [5] * num_tokens)
    assert isinstance(request, Request)
    [ledger] = runtime.plan([request]).placement.ledgers
    return ledger.total_bytes


def small_config(ref: Reference, **offload: Any) -> RuntimeConfig:
    return RuntimeConfig(
        model=ModelConfig(path=str(ref.directory), dtype="float32"),
        offload=OffloadConfig(tier="nvme", **offload),
        kv="device",
        policy=PolicyConfig(kind="fixed", micro_batch_size=1, num_micro_batches=1, prefill_chunk_tokens=512),
        sampling=SamplingConfig(max_new_tokens=3, ignore_eos=True),
    )


def test_a_call_that_fails_leaves_the_runtime_usable(reference: References) -> None:
    ref, stops = reference("llama"), [False]
    budget = host_bytes_for(ref, 100, resident_layers=0)
    with Runtime(small_config(ref, host_memory_gib=budget / GIB), should_stop=lambda: stops[0]) as runtime:
        expected = [tokens[:3] for tokens in ref.expected[:1]]
        assert tokens_of(runtime, ref.prompts[:1]) == expected
        with pytest.raises(BudgetError, match=r"offload\.host_memory_gib"):
            runtime.generate([[5] * 250])
        with pytest.raises(ConfigError, match="prompt 1 must be"):
            runtime.generate([ref.prompts[0], 3.5])  # pyright: ignore
        stops[0] = True
        with pytest.raises(Interrupted):
            runtime.generate(ref.prompts[:1])
        stops[0] = False
        assert tokens_of(runtime, ref.prompts[:1]) == expected


def test_a_batch_that_takes_more_memory_keeps_fewer_weights_within_the_same_budget(reference: References) -> None:
    ref, kept = reference("llama"), list[int]()
    budget = host_bytes_for(ref, 4)
    with Runtime(small_config(ref, host_memory_gib=(budget + 4096) / GIB)) as runtime:
        for num_tokens in (4, 60, 4):
            request = runtime.request("0", [5] * num_tokens)
            assert isinstance(request, Request)
            with runtime.confirmed_session([request]) as (plan, _):
                [ledger] = plan.placement.ledgers
                assert runtime._kept is not None
                kept.append(runtime._kept.weights.compute_bytes)
                resident = sum(e.num_bytes for e in ledger.entries if e.name in ("weights", "resident weights"))
                assert (ledger.fits, resident) == (True, kept[-1])
    assert kept[0] > kept[1] < kept[2] == kept[0]


def test_weights_that_are_kept_are_free_for_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptWeights()
    kept.stages.resident[(0,)] = StageBytes(torch.empty(3 * 1024, dtype=torch.uint8), {}, 0)
    kept.experts.in_host[0] = [HostPiece(0, 512, torch.empty(512, dtype=torch.uint8))]
    monkeypatch.setattr(budgets, "available_bytes", lambda: GIB)
    monkeypatch.setattr(budgets, "FREE_SHARE", 1)
    on_cpu = budgets.budgets_of(OffloadConfig(), ComputeDevice("cpu"), kept)
    assert on_cpu.host_bytes == GIB + 3 * 1024 + 512
    on_device = budgets.budgets_of(OffloadConfig(), FakeDevice(), kept)
    assert (on_device.host_bytes, on_device.device_bytes) == (GIB + 512, GIB + 3 * 1024)
    said = budgets.budgets_of(OffloadConfig(host_memory_gib=1, device_memory_gib=1), FakeDevice(), kept)
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
    kept = KeptWeights()
    kept.stages.resident[(0,)] = StageBytes(torch.empty(3072, dtype=torch.uint8), {}, 0)
    kept.experts.in_host[0] = [HostPiece(0, 512, torch.empty(512, dtype=torch.uint8))]
    kept.leave_room(num_bytes, of)
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


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ("abc", "prompts must be an iterable of prompts, got one str: put it into a list"),
        (b"abc", "got one bytes"),
        ({"role": "user", "content": "x"}, "got one dict"),
        (7, "got one int"),
    ],
)
def test_one_prompt_where_many_are_expected_is_refused_before_anything_runs(prompts: object, said: str) -> None:
    runtime = Runtime()
    for call in (runtime.generate, runtime.stream):
        with pytest.raises(ConfigError) as caught:
            call(prompts)  # pyright: ignore
        assert said in str(caught.value)
    with pytest.raises(ConfigError, match="window must be 1 or more"):
        runtime.stream(["a"], window=0)
