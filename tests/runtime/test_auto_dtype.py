"""`model.dtype=auto` is what a device multiplies natively, and a plan takes what the run would."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from runtime.config.settings import DType, MachineConfig, ModelConfig
from runtime.model import loading
from runtime.model.loading import load_model
from runtime.plan.cost.machine import make_machine
from runtime.plan.shape.dtypes import resolve_auto_dtype
from runtime.stream.device import has_bfloat16_units
from tests.runtime.test_profile import RATES
from tests.support import Reference
from tests.two_devices import FakeAccelerator

T4, A100 = (7, 5), (8, 0)
SECOND = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("stored", "has_bfloat16", "expected"),
    [
        (DType.bfloat16, True, DType.bfloat16),
        (DType.bfloat16, False, DType.float16),
        (DType.float16, True, DType.float16),
        (DType.float16, False, DType.float16),
        (DType.float32, False, DType.float32),
    ],
)
def test_a_device_computes_in_the_checkpoints_dtype_unless_it_has_no_units_for_it(
    stored: DType, has_bfloat16: bool, expected: DType
) -> None:
    assert resolve_auto_dtype(stored, has_device=True, has_bfloat16=has_bfloat16) is expected
    assert resolve_auto_dtype(stored, has_device=False) is DType.float32


@pytest.mark.parametrize(("capability", "hip", "expected"), [(T4, None, False), (A100, None, True), (T4, "6.4", True)])
def test_units_for_bfloat16_come_with_ampere(
    capability: tuple[int, int], hip: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = FakeAccelerator(monkeypatch)
    accelerator.capability = capability
    monkeypatch.setattr(torch.version, "hip", hip)
    assert has_bfloat16_units(SECOND) is expected
    assert accelerator.implied == set()


def test_a_run_on_a_device_without_units_says_what_it_computes_in(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a dtype that is given is left alone."""
    FakeAccelerator(monkeypatch).capability = T4
    monkeypatch.setattr(loading, "fill_buffers", lambda *args: None)  # there is none to move them to
    config = ModelConfig(name="test", path=str(reference("llama").directory))
    assert load_model(config, SECOND, None).compute_dtype is torch.float16
    assert "float16, not the checkpoint's bfloat16, for which Fake has no units" in caplog.text
    caplog.clear()
    assert load_model(replace(config, dtype=DType.bfloat16), SECOND, None).compute_dtype is torch.bfloat16
    assert load_model(config, torch.device("cpu"), None).compute_dtype is torch.float32
    assert not caplog.text


@pytest.mark.parametrize(("gflops", "expected"), [(90.0, DType.bfloat16), (10.0, DType.float16)])
def test_a_measured_machine_is_planned_with_what_it_multiplies_faster(gflops: float, expected: DType) -> None:
    """Of bfloat16, where float16 reaches 100: an emulation is many times slower."""
    assert RATES.float32 is not None
    found = {
        dtype: replace(RATES.float32, gemm_gflops=[1.0, fastest])
        for dtype, fastest in ((DType.bfloat16, gflops), (DType.float16, 100.0))
    }
    rates = replace(RATES, device_memory_gib=8.0, bfloat16=found[DType.bfloat16], float16=found[DType.float16])
    machine = MachineConfig(name="here", rates=rates)
    assert make_machine(machine) == make_machine(machine, expected)
    assert make_machine(machine).rates.gemm_rate(1e6) == pytest.approx(max(found[expected].gemm_gflops) * 1e9)
