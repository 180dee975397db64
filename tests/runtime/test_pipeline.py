"""Ranks that divide the layers of a model come to the tokens of one process; each reads and keeps its part alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from transformers import AutoConfig

from runtime import Runtime, RuntimeConfig
from runtime.cache.pages import KVPages
from runtime.config.settings import (
    Attention,
    DevicesConfig,
    ExpertPaging,
    KVConfig,
    KVTier,
    Order,
    Parallelism,
    PolicyConfig,
    Tier,
)
from runtime.errors import ConfigError
from runtime.plan.schedule.check import check_schedule
from runtime.plan.schedule.schedule import Schedule, make_schedule
from runtime.plan.schedule.walk import Walk
from runtime.plan.shape.rank_shares import split_stages
from runtime.plan.shape.shapes import Parameter, Stage, StageKind, TensorSlice
from runtime.probing.meta import build_meta_model
from runtime.ranks.pipeline import layer_signatures
from runtime.ranks.ranks import Ranks
from tests.rank_processes import in_ranks
from tests.runtime.rank_runs import completed, faulted_once, stopped_once
from tests.runtime.test_families import GREEDY, config_for
from tests.runtime.test_ranks import counted_reads
from tests.runtime.uneven_pages import Admitted, admitted, continuous
from tests.support import NUM_NEW_TOKENS, Reference

PIPELINE = DevicesConfig(way=Parallelism.pipeline)
LONG = 40  # new tokens, with which rows outgrow the pages that they enter with
RunCase = tuple[RuntimeConfig, Sequence[Sequence[int]]]
Generated = list[list[list[int]]]
References = Callable[[str], Reference]
FAMILIES = {  # all of them, in every tier: python -m tests.rank_families way=pipeline
    "llama, tied": Tier.nvme,
    "gemma-3": Tier.cpu,
    "qwen3-next": Tier.nvme,
    "bloom": Tier.cpu,
}


def generated(ranks: Ranks, cases: Sequence[RunCase]) -> Generated:
    """What each of several runs generates, one after another."""
    ranks.devices = PIPELINE
    return [completed(Runtime(config, ranks=ranks), prompts) for config, prompts in cases]


def played(ranks: Ranks, cases: Sequence[RunCase], coming: Sequence[RunCase]) -> tuple[Generated, list[Admitted]]:
    """What several runs generate, and how others admit their rows."""
    return generated(ranks, cases), [admitted(ranks, *each) for each in coming]


@pytest.mark.slow("runtime/test_pipeline.py::test_four_ranks_come_to_the_draws_of_one_process")
def test_tokens_of_two_ranks_are_those_of_transformers_however_a_pass_is_played(reference: References) -> None:
    """Families in packed and padded lanes, in memory and from disk; prompts in pieces, attention on the CPU, keys and
    values that travel, experts together and one by one, several blocks, and a policy that is open. Then rows that enter
    as others end, one of them behind others that gave way, where one rank has fewer pages than the other."""
    pairs = [(reference(family), tier) for family, tier in FAMILIES.items()]
    cases = [(config_for(each, tier), each.prompts) for each, tier in pairs]
    ref, experts = reference("llama"), reference("qwen3-moe")
    plain, batched = config_for(ref, Tier.cpu), config_for(experts)
    policies = [
        PolicyConfig(),
        replace(plain.policy, prefill_chunk_tokens=7),
        replace(plain.policy, micro_batch_size=2, num_micro_batches=1),
        replace(plain.policy, schedule=Order.cgopipe, attention=Attention.cpu),
    ]
    cases += [(replace(plain, policy=policy), ref.prompts) for policy in policies]
    cases += [(replace(plain, kv=KVConfig(tier=KVTier.nvme, device_fraction=0.0)), ref.prompts)]
    cases += [(replace(batched, policy=replace(batched.policy, schedule=Order.module_batched)), experts.prompts)]
    cases += [(replace(batched, offload=replace(batched.offload, expert_paging=ExpertPaging.hit)), experts.prompts)]
    expected = [each.expected for each, _ in pairs] + [ref.expected] * 5 + [experts.expected] * 2
    padded, disk = reference("bloom"), config_for(ref, Tier.nvme)
    coming = [(continuous(plain, LONG), ref.prompts), (continuous(disk), ref.prompts)]
    coming += [(continuous(config_for(padded)), padded.prompts)]
    first, second = in_ranks(2, played, cases, coming)
    assert first == second, "all admit the same rows"
    assert first[0] == expected
    long, *others = first[1]
    assert [tokens[:NUM_NEW_TOKENS] for tokens in long.tokens] == ref.expected
    assert long.num_preempted
    assert [each.tokens for each in others] == [ref.expected, padded.expected]


def test_four_ranks_come_to_the_draws_of_one_process(
    reference: References, opened: Callable[[RuntimeConfig], Runtime]
) -> None:
    ref = reference("llama")
    drawn = config_for(ref, Tier.cpu, replace(GREEDY, temperature=0.8, top_p=0.95, logprobs=2))
    expected = completed(opened(drawn), ref.prompts)
    for found in in_ranks(4, generated, [(drawn, ref.prompts)]):
        assert found == [expected]


@contextmanager
def layers_of_pages() -> Iterator[set[int]]:
    """The layers whose keys and values get memory in this process."""
    found, layer = set[int](), KVPages.layer

    def noting(pages: KVPages, index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found.add(index)
        return layer(pages, index, k, v)

    with mock.patch.object(KVPages, "layer", noting):
        yield found


def taken(ranks: Ranks, config: RuntimeConfig, prompts: Sequence[Sequence[int]]) -> tuple[int, int, int, set[int]]:
    """Bytes that a rank has read, those of its weights as planned, those of keys and values of a position, and the
    layers that it keeps them of."""
    ranks.devices = PIPELINE
    with counted_reads() as read, layers_of_pages() as layers:
        runtime = Runtime(config, ranks=ranks)
        completed(runtime, prompts)
    shape = runtime.model.shape
    return read.num_bytes, sum(shape.sizes.whole_bytes), shape.kv_bytes_per_token, layers


def test_each_rank_reads_the_weights_of_its_layers_once_and_keeps_their_keys_and_values_alone(
    reference: References, opened: Callable[[RuntimeConfig], Runtime]
) -> None:
    ref = reference("llama")
    config = config_for(ref, Tier.cpu)
    shape = opened(config).model.shape
    found = in_ranks(2, taken, config, ref.prompts)
    first, second = (layers for *_, layers in found)
    assert min(map(len, (first, second))) > 0
    assert (first | second, first & second, max(first) < min(second)) == ({0, 1, 2, 3}, set(), True)
    assert [kv for _, _, kv, _ in found] == [sum(shape.kv_layer_bytes[i] for i in each) for each in (first, second)]
    assert [num_bytes for num_bytes, *_ in found] == [planned for _, planned, *_ in found]
    assert sum(num_bytes for num_bytes, *_ in found) == sum(shape.sizes.whole_bytes)


def stopped_in_a_pipeline(ranks: Ranks, config: RuntimeConfig, prompts: Sequence[Sequence[int]]) -> list[str]:
    ranks.devices = PIPELINE
    longer = replace(config, sampling=replace(GREEDY, max_new_tokens=40))
    return [stopped_once(ranks, longer, prompts), faulted_once(ranks, config, prompts)]


def test_one_rank_that_is_stopped_stops_the_pipeline_and_so_does_one_that_fails(reference: References) -> None:
    ref = reference("llama")
    first, second = in_ranks(2, stopped_in_a_pipeline, config_for(ref), ref.prompts)
    assert "same command" in first[0]
    assert "same command" in second[0]
    assert first[1] == f"the disk is gone, {len(ref.prompts)} rows are known"
    assert "rank 0 of 2 has ended" in second[1]


def _stages(sizes: Sequence[int]) -> list[Stage]:
    kinds = [StageKind.embedding, *[StageKind.layer] * (len(sizes) - 2), StageKind.head]
    pieces = [
        TensorSlice(name=str(i), file="f", offset=0, num_bytes=size, dtype="F32", shape=(size // 4,))
        for i, size in enumerate(sizes)
    ]
    return [
        Stage(index=i, name=str(i), kind=kind, parameters=(Parameter(name=str(i), shape=p.shape, pieces=((p,),)),))
        for i, (kind, p) in enumerate(zip(kinds, pieces, strict=True))
    ]


@pytest.mark.parametrize(
    ("sizes", "count", "with_tables", "expected"),
    [
        ([400, 40, 40, 40, 40, 4], 2, False, [range(3), range(3, 6)]),
        ([400, 40, 40, 40, 40, 4], 2, True, [range(2), range(2, 6)]),
        ([4, 40, 40, 40, 40, 120], 3, False, [range(2), range(2, 4), range(4, 6)]),
        ([4, 400, 40, 40, 40, 40, 4], 3, False, [range(2), range(2, 4), range(4, 7)]),
    ],
)
def test_layers_are_divided_so_that_the_heaviest_rank_is_as_light_as_can_be(
    sizes: Sequence[int], count: int, with_tables: bool, expected: list[range]
) -> None:
    found = split_stages(_stages(sizes), count, count_embeddings=with_tables)
    assert [stage for part in found for stage in part] == [*range(len(sizes))]
    assert all(any(0 < stage < len(sizes) - 1 for stage in part) for part in found)
    weights = [max(sum(sizes[i] for i in part if with_tables or i) for part in parts) for parts in (found, expected)]
    assert weights[0] == weights[1]


def test_more_ranks_than_layers_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"devices=pipeline: 3 ranks for 2 layers"):
        split_stages(_stages([4, 4, 4, 4]), 3)


MIDDLE = Walk(num_stages=4, first_stage=2, streamed=(), num_slots=0, is_lane_major=True, receives=True, sends=True)


def test_a_lane_passes_all_layers_of_a_rank_before_the_next_one_begins() -> None:
    schedule = make_schedule(MIDDLE, 2)
    assert str(schedule).split("\n")[2:] == [
        *("recv 2.0", "run 2.0", "run 3.0", "send 3.0"),
        *("recv 2.1", "run 2.1", "run 3.1", "send 3.1"),
    ]
    check_schedule(schedule, MIDDLE, 2)


@pytest.mark.parametrize(
    ("left_out", "rule"),
    [
        (0, "'run 2.0': the lane enters before its hidden states arrived"),
        (7, "'send 3.1': missing: the next rank waits for it"),
    ],
)
def test_a_schedule_that_leaves_a_neighbour_waiting_is_refused(left_out: int, rule: str) -> None:
    cycle = list(make_schedule(MIDDLE, 2).cycle)
    del cycle[left_out]
    with pytest.raises(ValueError, match=rule):
        check_schedule(Schedule(prologue=(), cycle=tuple(cycle)), MIDDLE, 2)


@pytest.mark.parametrize("num_shared", [0, 2])
def test_layers_that_need_more_than_hidden_states_are_refused_by_name(num_shared: int) -> None:
    """Gemma-3n's have inputs of their own, made of the tokens, and some attend to keys and values of others."""
    config = AutoConfig.for_model(
        "gemma3n_text",
        **{"vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size": 32, "head_dim": 16},
        **{"intermediate_size": [64] * 4, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"layer_types": ["full_attention"] * 4, "activation_sparsity_pattern": [0.0] * 4},
        num_kv_shared_layers=num_shared,
    )
    with pytest.raises(ConfigError, match=r"devices=pipeline: the layers of Gemma3nForCausalLM cannot be split"):
        layer_signatures(build_meta_model(config, torch.float32))
