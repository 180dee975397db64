"""What a plan's timeline shows: a prefill pass and decode passes of the first block, as long as they are predicted."""

from itertools import pairwise

import pytest

from runtime.config.settings import Admission, OffloadConfig, PolicyConfig, PolicyKind, RuntimeConfig, Tier
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.placement import Budgets
from runtime.plan.planner import RunPlan, plan_run
from runtime.plan.timeline import Timeline, make_timeline
from runtime.resources import Resource
from runtime.units import GIB
from tests.toy import sizes_of, toy_shape

RATES = MachineRates(disk_bytes_per_second=1e8, gemm_flops_per_second={1: 1e9})
SHAPE = toy_shape()


def timeline(max_new_tokens: int, admission: Admission = Admission.wave) -> tuple[Timeline, RunPlan]:
    policy = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=2, admission=admission)
    config = RuntimeConfig(offload=OffloadConfig(tier=Tier.nvme, resident_layers=0), policy=policy)
    sizes = sizes_of([40] * 4, max_new_tokens=max_new_tokens)
    plan = plan_run(SHAPE, config, Budgets(host_bytes=GIB), sizes, rates=RATES)
    return make_timeline(SHAPE, plan, sizes, RATES), plan


def test_a_prefill_pass_and_three_decode_passes_follow_one_another() -> None:
    found, _ = timeline(9)
    assert found.description == "prefill pass 1 of 1 and decode passes 1 to 3 of 8 of the first block"
    assert list(found.names) == ["prefill pass", "decode pass 1", "decode pass 2", "decode pass 3"]
    assert all(before.end == after.begin for before, after in pairwise(found.passes))


@pytest.mark.parametrize(("max_new_tokens", "names"), [(1, 1), (2, 2)])
def test_there_are_no_more_decode_passes_than_the_block_has(max_new_tokens: int, names: int) -> None:
    found, _ = timeline(max_new_tokens)
    assert len(found.names) == len(found.passes) == names
    assert ("decode" in found.description) == (names > 1)


def test_a_decode_pass_takes_as_long_as_predicted() -> None:
    """Compute and reading are the prediction's to within what keys and values grow by."""
    found, plan = timeline(9)
    assert plan.prediction is not None
    last, decode = found.passes[-1], plan.prediction.decode
    assert last.end - last.begin == pytest.approx(decode.seconds / decode.num_passes, rel=0.02)
    for resource in (Resource.disk, Resource.compute):
        busy = sum(span.end - span.begin for span in last.spans if span.resource is resource)
        assert busy == pytest.approx(decode.busy_seconds[resource] / decode.num_passes, rel=0.02)


def test_continuous_admission_shows_passes_of_both() -> None:
    found, _ = timeline(9, Admission.continuous)
    assert set(found.names) == {"mixed pass"}
    assert len(found.passes) == 4
