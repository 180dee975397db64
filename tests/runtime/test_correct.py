"""Rates follow what the first passes took, within bounds."""

import pytest

from runtime.plan.cost.calibration import MAX_CORRECTION, correct_rates
from runtime.plan.cost.rates import UNLIMITED, MachineRates
from runtime.resources import Resource

RATES = MachineRates(
    disk_bytes_per_second=100.0, gemm_flops_per_second={1: 10.0, 64: 50.0}, expert_flops_per_second={1: 4.0},
    attention_bytes_per_second=30.0, cpu_attention_bytes_per_second=20.0, turn_seconds=0.5,
)  # fmt: skip


def test_a_resource_that_took_longer_is_slower_by_as_much_and_no_other_is() -> None:
    found = correct_rates(
        RATES, {Resource.disk: 1.25, Resource.compute: 2.0}, {Resource.disk: 1.0, Resource.compute: 2.0}
    )
    assert found.disk_bytes_per_second == pytest.approx(80.0)
    assert found.gemm_flops_per_second == RATES.gemm_flops_per_second
    assert found.cpu_attention_bytes_per_second == 20.0


def test_compute_is_corrected_as_a_whole() -> None:
    found = correct_rates(RATES, {Resource.compute: 1.0}, {Resource.compute: 1.6})
    assert found.gemm_flops_per_second == pytest.approx({1: 16.0, 64: 80.0})
    assert found.expert_flops_per_second == pytest.approx({1: 6.4})
    assert found.attention_bytes_per_second == pytest.approx(48.0)
    assert found.turn_seconds == pytest.approx(0.5 / 1.6)


@pytest.mark.parametrize(("measured", "factor"), [(100.0, 1 / MAX_CORRECTION), (0.02, MAX_CORRECTION)])
def test_no_rate_is_corrected_beyond_its_bounds(measured: float, factor: float) -> None:
    found = correct_rates(RATES, dict.fromkeys(Resource, measured), dict.fromkeys(Resource, 1.0))
    assert found.disk_bytes_per_second == 100.0 * factor
    assert found.cpu_attention_bytes_per_second == 20.0 * factor
    assert found.gemm_flops_per_second == {1: 10.0 * factor, 64: 50.0 * factor}
    assert found.link_in_bytes_per_second == UNLIMITED


@pytest.mark.parametrize(("measured", "predicted"), [(0.0, 3.0), (3.0, 0.0), (0.005, 0.009)])
def test_what_hardly_worked_says_nothing(measured: float, predicted: float) -> None:
    assert correct_rates(RATES, dict.fromkeys(Resource, measured), dict.fromkeys(Resource, predicted)) == RATES
