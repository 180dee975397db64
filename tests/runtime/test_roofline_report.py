"""A plan's operations stand below the roofs over them, and turning points lie where two roofs meet."""

import pytest

from runtime.config.settings import Attention, OffloadConfig, Order, PolicyConfig, PolicyKind, RuntimeConfig, Tier
from runtime.plan.cost.machine import Machine
from runtime.plan.cost.rates import MachineRates
from runtime.plan.planner import plan_run
from runtime.plan.roofline_report import RooflineReport, make_roofline_report
from runtime.units import GIB, MIB
from tests.toy import sizes_of, toy_shape

RATES = MachineRates(
    disk_bytes_per_second=1e9,
    gemm_flops_per_second={1: 2e10, 200: 4e12},
    link_in_bytes_per_second=1e10,
    link_out_bytes_per_second=1e10,
    attention_bytes_per_second=8e10,
    cpu_attention_bytes_per_second=4e10,
    cpu_flops_per_second=1e11,
)
SHAPE = toy_shape()


def roofs(
    *, has_device: bool = True, tier: Tier = Tier.nvme, attention: Attention = Attention.device
) -> RooflineReport:
    machine = Machine(name="m", host_bytes=2 * GIB, device_bytes=160 * MIB if has_device else None, rates=RATES)
    policy = PolicyConfig(
        kind=PolicyKind.fixed, micro_batch_size=4, num_micro_batches=2, attention=attention, schedule=Order.zigzag
    )
    config = RuntimeConfig(offload=OffloadConfig(tier=tier, resident_layers=0), policy=policy)
    plan = plan_run(SHAPE, config, machine.budgets, sizes_of([40] * 8, max_new_tokens=8), rates=RATES)
    return make_roofline_report(SHAPE, machine, plan)


def test_each_memory_and_each_road_is_a_roof() -> None:
    assert [roof.link for roof in roofs().roofs] == ["device memory", "host memory", "link", "disk"]
    assert [roof.link for roof in roofs(has_device=False).roofs] == ["host memory", "disk"]


@pytest.mark.parametrize(("tier", "road"), [(Tier.nvme, "disk"), (Tier.cpu, "link")])
def test_streamed_weights_stand_on_the_roof_of_their_slowest_road(tier: Tier, road: str) -> None:
    found = roofs(tier=tier)
    [level] = [roof.level for roof in found.roofs if roof.link == road]
    weights = found.operations[1]
    assert weights.flops_per_second == pytest.approx(level.bytes_per_second * weights.intensity)
    assert found.num_sequences == 8


def test_attention_runs_at_the_rate_of_where_it_is() -> None:
    on_device, on_cpu = roofs().operations[0], roofs(attention=Attention.cpu).operations[0]
    assert on_device.flops_per_second == pytest.approx(2 * on_cpu.flops_per_second)
    assert on_cpu.name == "attention, on the CPU"


def test_turning_points_are_where_the_links_roof_meets_another_processors_peak() -> None:
    first, second = roofs(tier=Tier.cpu).turning_points
    assert (first.name, first.flops_per_second) == ("P1", pytest.approx(RATES.cpu_flops_per_second))
    assert second.intensity == pytest.approx(second.flops_per_second / RATES.link_in_bytes_per_second)


def test_without_an_accelerator_there_is_no_first_turning_point() -> None:
    assert [point.name for point in roofs(has_device=False).turning_points] == ["P2"]
