"""How requests are grouped where nobody says."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.weightstream import make_requests
from runtime.batching.balance import Block
from runtime.config.settings import (
    Attention,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    Tier,
)
from runtime.library.api import Runtime
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.defaults import chunk_sizes, micro_batch_sizes
from runtime.plan.placement.memory import SequenceSize
from runtime.plan.placement.placement import Budgets
from runtime.plan.planner import RunPlan, plan_run
from runtime.units import GIB, MIB
from tests.support import synthesize
from tests.toy import toy_shape

KINDS = [PolicyKind.auto, PolicyKind.fixed]


def planned(
    policy: PolicyConfig,
    num_requests: int = 256,
    *,
    is_packed: bool = True,
    host_bytes: int = GIB,
    device_bytes: int | None = None,
    blocks: tuple[Block, ...] | None = None,
    resident_layers: int | None = None,
    rates: MachineRates | None = None,
) -> RunPlan:
    config = RuntimeConfig(policy=policy, offload=OffloadConfig(tier=Tier.nvme, resident_layers=resident_layers))
    sizes = [SequenceSize(num_prompt_tokens=20, max_new_tokens=4)] * num_requests
    budgets = Budgets(host_bytes=host_bytes, device_bytes=device_bytes)
    return plan_run(toy_shape(is_packed=is_packed), config, budgets, sizes, blocks=blocks, rates=rates)


def way(plan: RunPlan) -> tuple[int, int, int | None]:
    return plan.lane_size, plan.num_lanes, plan.policy.prefill_chunk_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_one_packed_lane_carries_a_block_where_the_cpu_computes(kind: PolicyKind) -> None:
    policy = PolicyConfig(kind=kind)
    assert way(planned(policy)) == (256, 1, 2048)
    assert way(planned(policy, is_packed=False)) == (64, 4, 512)
    assert way(planned(policy, device_bytes=GIB, resident_layers=0)) == (64, 4, 512)


@pytest.mark.parametrize("kind", KINDS)
def test_one_lane_is_launched_on_a_device_where_nothing_travels(kind: PolicyKind) -> None:
    policy = PolicyConfig(kind=kind)
    assert way(planned(policy, device_bytes=GIB)) == (256, 1, 2048)
    assert way(planned(policy, device_bytes=GIB, is_packed=False)) == (64, 4, 512)
    beside = replace(policy, attention=Attention.cpu)  # for one lane, while another is computed
    assert way(planned(beside, device_bytes=GIB)) == (64, 4, 512)


@pytest.mark.parametrize("kind", KINDS)
def test_rates_tell_whether_lanes_are_launched_one_by_one(kind: PolicyKind) -> None:
    """Of weights that are streamed: where launches take longer than bringing them, or not."""
    rates = MachineRates(disk_bytes_per_second=1e9, gemm_flops_per_second={1: 1e10, 64: 1e13})
    policy = PolicyConfig(kind=kind)
    for turn_seconds, width in ((0.1, 256), (1e-6, 64)):
        plan = planned(policy, device_bytes=GIB, resident_layers=0, rates=replace(rates, turn_seconds=turn_seconds))
        assert plan.lane_size == width


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("kind", KINDS)
def test_larger_micro_batches_take_no_room_from_keys_and_values(kind: PolicyKind) -> None:
    """They need more for activations and logits."""
    policy = PolicyConfig(kind=kind)
    found = {
        way(plan): len(plan.placement.kv.page_bytes)
        for plan in (planned(policy, host_bytes=n * MIB) for n in range(130, 400, 2))
    }
    assert set(found) >= {(64, 4, 512), (128, 2, 512), (256, 1, 1024), (256, 1, 2048)}
    assert not any(travelling for (width, *_), travelling in found.items() if width > 64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_chooses_its_chunks_anew(kind: PolicyKind) -> None:
    """Its blocks stay; what memory is left for them may have changed."""
    policy = PolicyConfig(kind=kind)
    small = next(n for n in range(130, 400, 2) if way(planned(policy, host_bytes=n * MIB)) == (256, 1, 1024))
    blocks = planned(policy).blocks
    for host_bytes, chunk in ((GIB, 2048), (small * MIB, 1024)):
        assert way(planned(policy, host_bytes=host_bytes, blocks=blocks)) == (256, 1, chunk)


def test_a_mixture_reads_its_experts_no_more_often_for_larger_micro_batches() -> None:
    shape = toy_shape()
    layers = [replace(stage, num_experts=8) if stage.kind.is_layer else stage for stage in shape.stages]
    mixture = replace(shape, stages=tuple(layers))
    policy, budgets, blocks = PolicyConfig(), Budgets(host_bytes=GIB), planned(PolicyConfig()).blocks
    assert micro_batch_sizes(shape, RuntimeConfig(), budgets) == (256, 128, 64)
    assert micro_batch_sizes(mixture, RuntimeConfig(), budgets) == (256, 64)
    assert chunk_sizes(shape, policy, blocks) == (2048, 1024)
    assert chunk_sizes(mixture, policy, blocks) == (2048,)


def test_what_is_given_stays() -> None:
    policy = PolicyConfig(micro_batch_size=8, num_micro_batches=3, prefill_chunk_tokens=100)
    assert way(planned(policy)) == way(planned(policy, device_bytes=GIB)) == (8, 3, 100)
    assert way(planned(PolicyConfig(micro_batch_size=128))) == (128, 2, 512)
    assert way(planned(PolicyConfig(num_micro_batches=2))) == (128, 1, 512)


@pytest.mark.parametrize(("family", "num_lanes"), [("llama", 1), ("bloom", 2)])
def test_a_runtime_plans_so(family: str, num_lanes: int, tmp_path: Path) -> None:
    path = str(synthesize(family, tmp_path))
    runtime = Runtime(RuntimeConfig(model=ModelConfig(path=path), machine=MachineConfig(device="cpu")))
    shape, is_packed = runtime.model.shape, num_lanes == 1
    assert (shape.has_fused_gates, shape.has_decode_kernel) == (is_packed, is_packed)
    requests = make_requests(runtime, [[5, 6, 7]] * 65)
    assert runtime.plan(requests).num_lanes == num_lanes
