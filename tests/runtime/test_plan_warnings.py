"""A setting without effect in a plan is named, with what to do; one that has an effect is not."""

from dataclasses import replace

import pytest

from runtime import Runtime
from runtime.config.settings import (
    Admission,
    Attention,
    Dequantize,
    ExpertPaging,
    KVConfig,
    KVTier,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    Order,
    PolicyConfig,
    PolicyKind,
    Prefetch,
    PrefetchConfig,
    RuntimeConfig,
    Tier,
)
from runtime.errors import CheckpointError
from runtime.plan.placement.placement import Budgets
from runtime.plan.plan_warnings import ineffective_settings, plan_warnings, slow_settings
from runtime.plan.planner import RunPlan, plan_run
from runtime.plan.shape.model import ModelShape
from runtime.stream.weights import WeightStream
from runtime.units import GIB, MIB
from tests.toy import sizes_of, toy_mixture, toy_shape

DENSE, MIXTURE, PADDED = toy_shape(), toy_mixture(), toy_shape(is_packed=False)
STORED = replace(DENSE, compute_dtype="BF16")
LATENT = replace(DENSE, expanded_kv_width=512)
HOST, DEVICE = Budgets(host_bytes=4 * GIB), Budgets(host_bytes=4 * GIB, device_bytes=4 * GIB)
SIZES = sizes_of([30] * 8)


def offload(tier: Tier = Tier.nvme, **keys: object) -> RuntimeConfig:
    """Nothing is resident unless `keys` say so."""
    values: dict[str, object] = {"tier": tier, "resident_layers": 0} | keys
    return RuntimeConfig(offload=OffloadConfig(**values), policy=policy().policy)  # pyright: ignore[reportArgumentType]


def policy(**keys: object) -> RuntimeConfig:
    values: dict[str, object] = {"kind": PolicyKind.fixed, "micro_batch_size": 4, "num_micro_batches": 2} | keys
    return RuntimeConfig(policy=PolicyConfig(**values))  # pyright: ignore[reportArgumentType]


def recorded(config: RuntimeConfig) -> RuntimeConfig:
    return replace(config, model=ModelConfig(graphs=True))


def searched(**keys: object) -> RuntimeConfig:
    sizes: dict[str, object] = {"micro_batch_size": None, "num_micro_batches": None}
    return policy(kind=PolicyKind.auto, **(sizes | keys))


def kv(tier: KVTier, **keys: object) -> RuntimeConfig:
    return replace(policy(), kv=KVConfig(tier=tier, **keys))  # pyright: ignore[reportArgumentType]


def prefetch(kind: Prefetch, tier: Tier = Tier.nvme, **keys: int) -> RuntimeConfig:
    return replace(offload(tier, resident_layers=None), prefetch=PrefetchConfig(kind=kind, **keys))


def streamed(config: RuntimeConfig) -> RuntimeConfig:
    return replace(config, offload=OffloadConfig(tier=Tier.nvme, resident_layers=0))


def plan(config: RuntimeConfig, shape: ModelShape, budgets: Budgets) -> RunPlan:
    return plan_run(shape, config, budgets, SIZES)


CASES: dict[str, tuple[RuntimeConfig, ModelShape, Budgets, list[str]]] = {
    "defaults": (RuntimeConfig(), DENSE, HOST, []),
    "defaults, accelerator": (RuntimeConfig(), MIXTURE, DEVICE, []),
    "batched, dense": (policy(schedule=Order.module_batched), DENSE, HOST, ["policy.schedule=module_batched"]),
    "batched, mixture": (policy(schedule=Order.module_batched), MIXTURE, HOST, []),
    "hit, dense": (offload(expert_paging=ExpertPaging.hit), DENSE, HOST, ["offload.expert_paging=hit"]),
    "all, dense": (offload(expert_paging=ExpertPaging.all), DENSE, HOST, ["offload.expert_paging=all"]),
    "off, dense": (offload(expert_paging=ExpertPaging.off), DENSE, HOST, []),
    "hit, mixture": (offload(expert_paging=ExpertPaging.hit), MIXTURE, HOST, []),
    "hit, all resident": (
        offload(expert_paging=ExpertPaging.hit, resident_layers=8), MIXTURE, HOST, ["offload.expert_paging=hit"],
    ),
    "CPU attends": (policy(attention=Attention.cpu), DENSE, HOST, []),
    "CPU attends, padded": (policy(attention=Attention.cpu), PADDED, HOST, ["policy.attention=cpu"]),
    "CPU attends, padded, accelerator": (policy(attention=Attention.cpu), PADDED, DEVICE, ["policy.attention=cpu"]),
    "CPU attends, latents": (policy(attention=Attention.cpu), LATENT, HOST, []),
    "CPU attends, latents, accelerator": (policy(attention=Attention.cpu), LATENT, DEVICE, ["policy.attention=cpu"]),
    "kv=cpu": (kv(KVTier.cpu), DENSE, HOST, ["kv=cpu"]),
    "kv=cpu, accelerator": (kv(KVTier.cpu, device_fraction=0.0), DENSE, DEVICE, []),
    "kv=cpu, room": (kv(KVTier.cpu), DENSE, DEVICE, ["kv=cpu"]),
    "kv=nvme, room": (kv(KVTier.nvme), DENSE, HOST, ["kv=nvme"]),
    "kv=nvme, all stay": (kv(KVTier.nvme, device_fraction=1.0), DENSE, HOST, ["kv.device_fraction=1"]),
    "kv=cpu, all stay": (kv(KVTier.cpu, device_fraction=1.0), DENSE, DEVICE, ["kv.device_fraction=1"]),
    "kv=device, half": (kv(KVTier.device, device_fraction=0.5), DENSE, HOST, ["kv.device_fraction=0.5"]),
    "kv=nvme, half": (kv(KVTier.nvme, device_fraction=0.5, num_slots=5, directory="x"), DENSE, HOST, []),
    "kv=auto, slots": (kv(KVTier.auto, num_slots=5), DENSE, HOST, ["kv.num_slots=5"]),
    "kv=auto, directory": (kv(KVTier.auto, directory="x"), DENSE, HOST, ["kv.directory=x"]),
    "kv=cpu, directory": (kv(KVTier.cpu, device_fraction=0.0, directory="x"), DENSE, DEVICE, ["kv.directory=x"]),
    "CPU attends, fraction": (
        replace(policy(attention=Attention.cpu), kv=KVConfig(device_fraction=0.5)),
        DENSE, DEVICE, ["kv.device_fraction=0.5"],
    ),
    "depth": (streamed(prefetch(Prefetch.lookahead, depth=3)), DENSE, HOST, []),
    "depth, off": (streamed(prefetch(Prefetch.off, depth=3)), DENSE, HOST, ["prefetch.depth=3"]),
    "depth, block": (streamed(prefetch(Prefetch.block, depth=3)), DENSE, HOST, ["prefetch.depth=3"]),
    "depth, cost_aware": (streamed(prefetch(Prefetch.cost_aware, depth=3)), DENSE, HOST, ["prefetch.depth=3"]),
    "depth, off, paged": (
        replace(offload(expert_paging=ExpertPaging.hit), prefetch=PrefetchConfig(kind=Prefetch.off, depth=3)),
        MIXTURE, HOST, [],
    ),
    "blocks": (streamed(prefetch(Prefetch.block, block_layers=3)), DENSE, HOST, []),
    "blocks, lookahead": (
        streamed(prefetch(Prefetch.lookahead, block_layers=3)), DENSE, HOST, ["prefetch.block_layers=3"],
    ),
    "nothing streams": (prefetch(Prefetch.off, Tier.none), DENSE, HOST, ["prefetch=off"]),
    "continuous": (policy(admission=Admission.continuous), DENSE, HOST, []),
    "continuous, padded": (policy(admission=Admission.continuous), PADDED, HOST, ["policy.admission=continuous"]),
    "pin": (policy(pin="abc"), DENSE, HOST, ["policy.pin=abc"]),
    "pin, auto": (searched(pin="abc"), DENSE, HOST, []),
    "sizes, auto": (searched(micro_batch_size=8), DENSE, HOST, []),
    "resident": (offload(resident_layers=2), DENSE, HOST, []),
    "resident, offload=none": (offload(Tier.none, resident_layers=2), DENSE, HOST, ["offload.resident_layers=2"]),
    "offload=cpu": (offload(Tier.cpu, resident_layers=None), DENSE, HOST, ["offload=cpu"]),
    "offload=cpu, accelerator": (offload(Tier.cpu), DENSE, DEVICE, []),
    "device budget": (offload(device_memory_gib=1.0), DENSE, HOST, ["offload.device_memory_gib=1"]),
    "device budget, accelerator": (offload(device_memory_gib=1.0), DENSE, DEVICE, []),
    "stage": (offload(dequantize=Dequantize.stage), STORED, DEVICE, []),
    "stage, CPU": (offload(dequantize=Dequantize.stage), STORED, HOST, ["offload.dequantize=stage"]),
    "product, plain": (offload(dequantize=Dequantize.product), DENSE, DEVICE, ["offload.dequantize=product"]),
    "recorded": (recorded(policy(num_micro_batches=1)), DENSE, DEVICE, []),
    "recorded, streamed": (recorded(offload()), DENSE, DEVICE, ["model.graphs=true"]),
    "recorded, lanes": (recorded(policy()), DENSE, DEVICE, ["model.graphs=true"]),
}  # fmt: skip


@pytest.mark.parametrize(("config", "shape", "budgets", "keys"), CASES.values(), ids=CASES)
def test_settings_without_effect_are_named(
    config: RuntimeConfig, shape: ModelShape, budgets: Budgets, keys: list[str]
) -> None:
    found = ineffective_settings(config, shape, plan(config, shape, budgets), has_device=budgets.has_device)
    assert len(found) == len(keys), found
    for key, sentence in zip(keys, found, strict=True):
        assert sentence.startswith(f"{key} ")
        assert ";" in sentence, "it says what to do"
        assert "\n" not in sentence


@pytest.mark.parametrize("paging", [ExpertPaging.hit, ExpertPaging.all])
@pytest.mark.parametrize(
    ("order", "num_lanes", "is_slow"),
    [(Order.zigzag, 2, True), (Order.zigzag, 1, False), (Order.module_batched, 2, False)],
)
def test_experts_that_each_lane_reads_for_itself_are_slow(
    order: Order, num_lanes: int, is_slow: bool, paging: ExpertPaging
) -> None:
    config = offload(expert_paging=paging)
    config = replace(config, policy=replace(config.policy, schedule=order, num_micro_batches=num_lanes))
    found = slow_settings(config, plan(config, MIXTURE, HOST))
    assert ["up to 2 times" in sentence for sentence in found] == [True] * is_slow


@pytest.mark.parametrize(("tier", "num_warnings"), [(KVTier.auto, 1), (KVTier.nvme, 0)])
def test_kv_that_lands_on_disk_by_itself_is_said_with_the_budget(tier: KVTier, num_warnings: int) -> None:
    """Whoever asks for the disk knows."""
    config = replace(offload(), kv=KVConfig(tier=tier))
    sizes = sizes_of([1500] * 8)
    narrow = plan_run(DENSE, config, Budgets(host_bytes=180 * MIB), sizes)
    assert narrow.placement.kv.page_bytes
    found = plan_warnings(config, DENSE, narrow, has_device=False)
    assert len(found) == num_warnings
    assert all("offload.host_memory_gib" in sentence for sentence in found)
    assert all("or set kv.dtype=int8" in sentence for sentence in found)


def test_a_runtime_gives_its_advice_once_before_it_reads_weights(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RuntimeConfig(kv=KVConfig(tier=KVTier.cpu), machine=MachineConfig(device="cpu"))
    runtime = Runtime(config)

    def fail(stream: WeightStream) -> None:
        raise CheckpointError("no weights")

    monkeypatch.setattr(WeightStream, "_load_resident", fail)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no weights"):
            runtime.generate([[7, 8, 9]])
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["kv=cpu is the same as kv=device without an accelerator; kv=nvme stores the KV cache on disk"]
