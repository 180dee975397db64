"""What tests of open runtimes share: counters of reads, devices that know what is held, and small budgets."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from runtime import ModelConfig, OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.model.loading import LoadedModel
from runtime.plan.cost.calibration import TypicalLoad
from runtime.plan.cost.rates import MachineRates
from runtime.plan.shape.extents import Extent
from runtime.planning import planner as planning
from runtime.sequences.sequence import Request
from runtime.store.reader import Reader
from runtime.store.transfer import PendingTransfer
from runtime.stream.device import ComputeDevice
from tests.fake_device import FakeDevice
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
        policy=PolicyConfig(
            kind="fixed", micro_batch_size=1, num_micro_batches=1, prefill_chunk_tokens=512, draft_tokens=0
        ),
        sampling=SamplingConfig(max_new_tokens=3, ignore_eos=True),
    )
