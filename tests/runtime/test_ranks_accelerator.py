"""Ranks that each have an accelerator come to the tokens of transformers, in every way; each takes another one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from runtime import OffloadConfig, Runtime, RuntimeConfig
from runtime.config.settings import DevicesConfig, DividedExperts, Gather, Parallelism, Tier
from runtime.devices.shared_run import accelerator_index, choose_rank_device, require_same_devices
from runtime.errors import ConfigError
from runtime.model.loading import LoadedModel
from runtime.plan.placement.load import Load
from runtime.plan.placement.placement import Budgets
from runtime.plan.placement.placer import choose_placement
from runtime.plan.shape.model import ModelShape
from runtime.ranks.ranks import Ranks
from runtime.stream.device import ComputeDevice
from runtime.units import GIB
from tests.fake_device import FakeDevice
from tests.rank_processes import in_ranks
from tests.runtime.gpu_support import CUDA, on_the_device
from tests.runtime.rank_runs import completed
from tests.runtime.test_fidelity import config_for
from tests.runtime.test_ranks import counted_reads
from tests.runtime.test_weight_stream import shape, tensors
from tests.support import Reference

__all__ = ["shape", "tensors"]  # fixtures

References = Callable[[str], Reference]
RunCase = tuple[DevicesConfig, RuntimeConfig, Sequence[Sequence[int]]]
WAYS = (
    DevicesConfig(way=Parallelism.sharded, gather=Gather.memory),
    DevicesConfig(way=Parallelism.sharded, gather=Gather.collective),
    DevicesConfig(way=Parallelism.tensor),
    DevicesConfig(way=Parallelism.pipeline),
)


def generated(ranks: Ranks, cases: Sequence[RunCase]) -> list[tuple[list[list[int]], int]]:
    """What each of several runs generates, and how many bytes this rank has read. Copies are late in every other
    rank."""
    results = list[tuple[list[list[int]], int]]()
    for devices, config, prompts in cases:
        ranks.devices = devices
        device = FakeDevice((False, ranks.rank % 2 == 0))
        with counted_reads() as read:
            results.append((completed(Runtime(config, ranks=ranks, device=device), prompts), read.num_bytes))
    return results


@pytest.mark.slow("runtime/test_ranks_features.py::test_every_way_comes_to_the_completions_of_one_process")
def test_tokens_of_ranks_with_accelerators_are_those_of_transformers_in_every_way(reference: References) -> None:
    """From disk and from host memory, with a layer that stays on the device and with none. Of what they share each rank
    reads its share."""
    ref, moe = reference("llama"), reference("qwen3-moe")
    configs = [config_for(ref, tier=Tier.nvme, resident_layers=1), config_for(ref, tier=Tier.cpu, resident_layers=0)]
    cases = [(way, config, ref.prompts) for way in WAYS for config in configs]
    mixtures = (
        WAYS[0],
        *(
            DevicesConfig(way=Parallelism.tensor, experts=experts)
            for experts in (DividedExperts.rows, DividedExperts.whole)
        ),
    )
    cases += [(way, config_for(moe, tier=Tier.cpu, resident_layers=1), moe.prompts) for way in mixtures]
    ranks = in_ranks(2, generated, cases)
    for found in ranks:
        assert [tokens for tokens, _ in found] == [*[ref.expected] * len(WAYS) * 2, *[moe.expected] * len(mixtures)]
    for (way, *_), (_, first), (_, second) in zip(cases, *ranks, strict=True):
        if way.way is Parallelism.sharded:
            assert first == pytest.approx(second, rel=0.05)


def on_cuda(ranks: Ranks, cases: Sequence[RunCase]) -> list[list[list[int]]]:
    results = list[list[list[int]]]()
    for devices, config, prompts in cases:
        ranks.devices = devices
        results.append(completed(Runtime(replace(config, machine=CUDA), ranks=ranks), prompts))
    return results


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_cards_come_to_the_tokens_of_one_in_every_way(reference: References) -> None:
    ref = reference("llama")
    configs = [config_for(ref, tier=Tier.nvme, resident_layers=1), config_for(ref, tier=Tier.cpu, resident_layers=0)]
    cases = [(way, config, ref.prompts) for way in WAYS for config in configs]
    for found in in_ranks(2, on_cuda, cases):
        assert found == [on_the_device(ref)] * len(cases)


def test_of_devices_together_each_has_slots_and_weights_that_stay(shape: ModelShape) -> None:
    config = RuntimeConfig(offload=OffloadConfig(tier=Tier.nvme, resident_layers=1))
    found = dict[int, dict[str, int]]()
    for count in (1, 2):
        budgets = Budgets(host_bytes=GIB, device_bytes=count * GIB, num_devices=count)
        device, _ = choose_placement(shape, config, budgets, Load.from_lanes(shape, [], 512)).ledgers
        found[count] = {entry.name: entry.num_bytes for entry in device.entries}
    for name in ("resident weights", "weight slots"):
        assert found[2][name] == 2 * found[1][name] > 0


def _others(met: Sequence[dict[str, str]], way: Parallelism = Parallelism.sharded) -> Ranks:
    """Rank 0 of several on one machine, whose others say `met` of themselves."""
    made = SimpleNamespace(
        exchange=lambda own: [own, *({**own, **each} for each in met)],
        machines=["here"] * (1 + len(met)),
        devices=DevicesConfig(way=way),
        local_rank=0,
        num_local_ranks=1 + len(met),
    )
    return cast(Ranks, made)


@pytest.mark.parametrize(
    ("said", "way", "named"),
    [
        ({"kind": "accelerator"}, Parallelism.sharded, "rank 1 computes on accelerator, this rank on processor"),
        (
            {"dtype": "bfloat16"},
            Parallelism.pipeline,
            "rank 1 computes in bfloat16, this rank in float32: set model.dtype",
        ),
        ({"name": "T4"}, Parallelism.tensor, "rank 1 computes on T4, this rank on a processor"),
    ],
)
def test_ranks_that_would_come_to_other_numbers_are_refused(said: dict[str, str], way: Parallelism, named: str) -> None:
    model = cast(LoadedModel, SimpleNamespace(compute_dtype=torch.float32))
    with pytest.raises(ConfigError, match=named):
        require_same_devices(_others([said], way), model, ComputeDevice("cpu"))
    require_same_devices(_others([{}], way), model, ComputeDevice("cpu"))


def test_two_ranks_that_have_one_accelerator_are_refused() -> None:
    model = cast(LoadedModel, SimpleNamespace(compute_dtype=torch.float32))
    with pytest.raises(ConfigError, match="the same accelerator"):
        require_same_devices(_others([{"device": "GPU-1"}, {"device": "GPU-1"}]), model, ComputeDevice("cpu"))
    require_same_devices(_others([{"device": "GPU-1"}, {"device": "GPU-2"}]), model, ComputeDevice("cpu"))


def test_each_rank_of_a_machine_takes_another_accelerator() -> None:
    assert [accelerator_index(place, 4, 4) for place in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="5 ranks on this machine, but torch finds 4 accelerators"):
        accelerator_index(4, 5, 4)
    assert choose_rank_device(_others([]), "cpu").torch_device == torch.device("cpu")
