"""A device that is not the current one, entered by several threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from runtime.config.settings import Admission, Order, Tier
from runtime.errors import ConfigError
from runtime.stream.device import ComputeDevice, CopyPart
from tests.runtime.test_beside import beside
from tests.runtime.test_fidelity import tokens
from tests.support import Reference
from tests.two_devices import FakeAccelerator, SecondDevice

References = Callable[[str], Reference]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    return FakeAccelerator(monkeypatch)


@pytest.mark.parametrize("tier", [Tier.cpu, Tier.nvme])
def test_a_run_takes_nothing_of_the_current_device(
    tier: Tier, reference: References, accelerator: FakeAccelerator
) -> None:
    """Its weights, keys, values and answers travel on the second device's streams, whichever thread sends them."""
    ref = reference("llama")
    config = beside(ref, schedule=Order.cgopipe, admission=Admission.continuous, tier=tier, chunk=7)
    assert tokens(config, ref.prompts, SecondDevice()) == ref.expected
    assert accelerator.implied == set()


def test_what_is_asked_of_a_device_is_asked_of_its_own(accelerator: FakeAccelerator) -> None:
    device = ComputeDevice("cuda:1")
    assert device.free_bytes() == accelerator.module.mem_get_info(torch.device("cuda", 1))[0]
    assert device.peak_bytes() == 101
    device.synchronize()
    device.wait_for_compute()
    device.compute_buffer(8)
    assert accelerator.implied == set()


def test_a_device_without_an_index_is_one_for_all_threads(accelerator: FakeAccelerator) -> None:
    """The one that was current as it was opened."""
    accelerator.set_current(1)
    device = ComputeDevice("cuda")
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(device.new_stream).result()
    assert stream is not None
    assert stream.device_index == 1


def test_two_threads_copy_on_one_stream_at_a_time(accelerator: FakeAccelerator) -> None:
    device = ComputeDevice("cuda")
    together = Barrier(2, timeout=5)

    class Meeting(torch.Tensor):
        def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            together.wait()  # both threads are between entering and leaving
            return self

    def copy() -> None:
        target = torch.zeros(4).as_subclass(Meeting)
        device.copy_all([CopyPart(torch.ones(4), target)], on=device.copy_stream, after=device.new_event())
        assert accelerator.current_stream(device.torch_device) is default

    default = accelerator.current_stream(device.torch_device)
    with ThreadPoolExecutor(2) as pool:
        for copied in [pool.submit(copy) for _ in range(2)]:
            copied.result()


def test_a_pass_like_the_last_makes_no_event_but_its_reference(accelerator: FakeAccelerator) -> None:
    device = ComputeDevice("cuda:1")

    def play() -> list[float]:
        seconds: list[float] = []
        for _ in range(3):
            begin = device.clock.begin(device.copy_stream)
            device.clock.end(begin, lambda began, ended: seconds.append(ended - began), device.copy_stream)
        device.wait_for_compute()
        device.clock.resolve()
        return seconds

    assert play() == play() == pytest.approx([1e-3] * 3)
    made = accelerator.made["timed events"]
    assert play() == pytest.approx([1e-3] * 3)
    assert accelerator.made["timed events"] == made + 1


def without_memory_figures(accelerator: FakeAccelerator) -> None:
    del accelerator.module.mem_get_info


def without_streams(accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> torch.Stream:
        raise RuntimeError("Backend doesn't support create streams.")

    monkeypatch.setattr(torch, "Stream", refuse)


@pytest.mark.parametrize("missing", ["memory statistics", "streams"])
def test_a_device_that_cannot_be_streamed_to_is_left_for_the_cpu(
    missing: str,
    accelerator: FakeAccelerator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As `mps` is; or refused, where it was named."""
    accelerator.type = "mps"
    if missing == "streams":
        without_streams(accelerator, monkeypatch)
    else:
        without_memory_figures(accelerator)
    assert not ComputeDevice("auto").is_accelerator
    assert f"no {missing} on mps" in caplog.text
    with pytest.raises(ConfigError, match=rf"machine\.device=mps: torch has no {missing} on mps.*machine=cpu"):
        ComputeDevice("mps")


@pytest.mark.parametrize(
    ("name", "why"), [("cuda:2", "finds 2: cuda:0 to cuda:1"), ("xpu", "supports only cuda and cpu")]
)
def test_a_device_that_is_not_there_is_refused(name: str, why: str, accelerator: FakeAccelerator) -> None:
    with pytest.raises(ConfigError, match=f"machine.device={name}: .*{why}"):
        ComputeDevice(name)
