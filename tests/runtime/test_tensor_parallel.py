"""Ranks that compute each token together come to the tokens of transformers; each reads and holds its part alone."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from jobs.packing.config import Format
from runtime import Runtime, RuntimeConfig
from runtime.config.settings import DividedExperts, KVConfig, KVDType, KVTier, Order, Quantize, Tier
from runtime.errors import ConfigError, PeerEnded
from runtime.ranks.collectives import AllGather
from runtime.ranks.launch import Launch
from runtime.ranks.ranks import Ranks
from tests.processes import PROCESSES
from tests.published_formats import PUBLISHED, write_published
from tests.rank_processes import in_ranks
from tests.runtime.rank_runs import completed, stopped_once
from tests.runtime.test_families import GREEDY, config_for
from tests.runtime.uneven_pages import Admitted, admitted, continuous
from tests.support import Reference, synthesize
from tests.tensor_bytes import TENSOR, held_each
from tests.weight_loss import packed

References = Callable[[str], Reference]
RunCase = tuple[RuntimeConfig, Sequence[Sequence[int]], DividedExperts]
Coming = tuple[RuntimeConfig, Sequence[Sequence[int]]]
AUTO, ROWS, WHOLE = DividedExperts.auto, DividedExperts.rows, DividedExperts.whole
FAMILIES = ("llama, tied", "qwen3-moe", "gemma-3", "phi-3")  # more: python -m tests.rank_families way=tensor


class RunResult(NamedTuple):
    """What a rank has come to: the tokens of a run, or why there are none."""

    tokens: Sequence[Sequence[int]]
    error: str = ""


def together(ranks: Ranks, cases: Sequence[RunCase]) -> list[RunResult]:
    return [run_result(ranks, *each) for each in cases]


def played(
    ranks: Ranks, cases: Sequence[RunCase], coming: Sequence[Coming], drawn: RuntimeConfig
) -> tuple[list[RunResult], list[Admitted], RunResult]:
    """What several runs come to, how others admit their rows, and what one does that each rank draws with a seed of its
    own."""
    found, entered = together(ranks, cases), [admitted(ranks, *each) for each in coming]
    seeded = replace(drawn, sampling=replace(drawn.sampling, seed=ranks.rank))
    return found, entered, run_result(ranks, seeded, coming[0][1], AUTO)


def run_result(
    ranks: Ranks, config: RuntimeConfig, prompts: Sequence[Sequence[int]], experts: DividedExperts
) -> RunResult:
    ranks.devices = replace(TENSOR, experts=AUTO if ranks.rank else experts)  # rank 0's counts
    try:
        return RunResult(completed(Runtime(config, ranks=ranks), prompts))
    except ConfigError as error:
        return RunResult([], str(error))


def of_one(cases: Sequence[RunCase]) -> list[RunResult]:
    return [RunResult(completed(Runtime(config), prompts)) for config, prompts, _ in cases]


@pytest.mark.slow("runtime/test_ranks_features.py::test_every_way_comes_to_the_completions_of_one_process")
def test_two_ranks_come_to_the_tokens_of_transformers_or_refuse_by_name(reference: References) -> None:
    """Numbers that go on as parts by a class's plan, that are made whole at once, experts by rows and whole, and one
    matrix for both ends; prompts in pieces, keys and values that travel, and experts of all lanes at once; rows that
    enter as others end, where one rank has fewer pages. Ranks that draw other tokens than one another are seen."""
    refs = [reference(family) for family in FAMILIES]
    llama, moe = refs[0], refs[1]
    plain, mixture = config_for(llama), config_for(moe)
    cases = [(config_for(ref, tier), ref, ROWS) for ref, tier in zip(refs, [Tier.cpu, *[Tier.nvme] * 3], strict=True)]
    flipped, batched = reference("gpt-oss"), replace(mixture.policy, schedule=Order.module_batched)
    cases += [
        (replace(plain, kv=KVConfig(tier=KVTier.nvme, device_fraction=0.0)), llama, AUTO),
        (replace(plain, policy=replace(plain.policy, prefill_chunk_tokens=7)), llama, AUTO),
        (replace(mixture, policy=batched), moe, WHOLE),
        (config_for(flipped), flipped, AUTO),
    ]
    refused = {
        "deepseek-v3": "MLA latents are not split by head",
        "bloom": "padded lanes cache all heads",
        "gpt-oss": "stored as (inputs, outputs); set devices.experts=whole",
    }
    configs = [(config, ref.prompts, experts) for config, ref, experts in cases]
    configs += [(config_for(reference(family)), llama.prompts, ROWS) for family in refused]
    coming = [(continuous(config_for(llama, tier)), llama.prompts) for tier in (Tier.cpu, Tier.nvme)]
    drawn = config_for(llama, sampling=replace(GREEDY, temperature=0.8))
    first, second = in_ranks(2, played, configs, coming, drawn)
    assert first == second, "all admit the same rows"
    found, entered, unlike = first
    assert [each.tokens for each in found[: len(cases)]] == [ref.expected for _, ref, _ in cases]
    for each, why in zip(found[len(cases) :], refused.values(), strict=True):
        assert "devices=tensor" in each.error
        assert why in each.error
    assert [each.tokens for each in entered] == [llama.expected] * 2
    assert "rank 1 has sampled other tokens than rank 0" in unlike.error


@pytest.mark.slow("runtime/test_ranks_features.py::test_every_way_comes_to_the_completions_of_one_process")
def test_four_ranks_come_to_the_tokens_of_one_process(tmp_path: Path) -> None:
    """Greedy and drawn ones, with weights that are rounded as they are read and with keys and values of 8 bits; whole
    experts of a published format and of a packed one, of which two ranks have one more."""
    directory = synthesize("llama", tmp_path / "llama", num_key_value_heads=4)
    ref = Reference(directory=directory, prompts=[[7, 8, 9 + i] for i in range(5)], expected=[], sampled=[])
    plain = config_for(ref)
    drawn = config_for(ref, sampling=replace(GREEDY, temperature=0.8, top_p=0.95))
    kept = config_for(ref, Tier.cpu)
    rounded = replace(kept, model=replace(kept.model, quantize=Quantize.int8), kv=KVConfig(dtype=KVDType.int8))
    cases = [(config, ref.prompts, AUTO) for config in (plain, drawn, rounded)]
    mixtral = synthesize("mixtral", tmp_path / "mixtral", num_key_value_heads=4)
    published, _ = write_published(mixtral, tmp_path, PUBLISHED["gptq"])
    uneven = synthesize("qwen3-moe", tmp_path / "uneven", num_key_value_heads=4, num_experts=6)
    stored = packed(uneven, Format.lossless, tmp_path / "packed")
    few = replace(GREEDY, max_new_tokens=4)
    cases += [(config_for(_at(directory), sampling=few), ref.prompts, WHOLE) for directory in (published, stored)]
    refused = {
        "2 KV heads are not a multiple of 4": synthesize("llama", tmp_path / "two", num_key_value_heads=2),
        "it has only 3 experts; set devices.experts=rows": synthesize(
            "mixtral", tmp_path / "three", num_key_value_heads=4, num_local_experts=3
        ),
    }
    expected = of_one(cases)
    refused_asked = [(config_for(_at(directory)), ref.prompts, WHOLE) for directory in refused.values()]
    for found in in_ranks(4, together, [*cases, *refused_asked]):
        assert found[: len(cases)] == expected
        for each, why in zip(found[len(cases) :], refused, strict=True):
            assert why in each.error


def _at(directory: Path) -> Reference:
    return Reference(directory=directory, prompts=[], expected=[], sampled=[])


@pytest.mark.slow("runtime/test_ranks.py::test_each_rank_reads_its_share_of_the_bytes_within_2_percent")
def test_each_rank_reads_its_part_of_the_weights_and_caches_its_part_of_the_heads(tmp_path: Path) -> None:
    """Exactly, as planned, but for norms and routers, which all have; what is read comes in whole blocks of the disk,
    with short runs of others' rows between them. Of six whole experts two ranks have two, and two have one."""
    wide = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "num_key_value_heads": 4}
    dense = synthesize("llama", tmp_path / "wide", **wide)
    mixture = synthesize("mixtral", tmp_path / "mixture", **wide | {"intermediate_size": 512}, num_local_experts=6)
    cases = [dense, mixture], 2, WHOLE
    [whole], parts = in_ranks(1, held_each, *cases), in_ranks(4, held_each, *cases)
    of_all, expert_bytes = (5 * 1024 * 2, (5 + 2 * 6) * 1024 * 2), 2 * 3 * 1024 * 512 * 2
    for rank, part in enumerate(parts):
        for all_, own, common, experts, along in zip(whole, part, of_all, (0, expert_bytes), (0.02, 0.05), strict=True):
            num_own = 2 if rank < 2 else 1
            cut_bytes = all_.weight_bytes - common - 6 * experts
            assert own.weight_bytes == cut_bytes // 4 + common + num_own * experts
            assert own.kv_bytes_per_token == all_.kv_bytes_per_token // 4
            assert (all_.num_kv_heads, own.num_kv_heads) == (4, 1)
            assert own.read_bytes == pytest.approx(all_.read_bytes * own.weight_bytes / all_.weight_bytes, rel=along)


def stopped(ranks: Ranks, config: RuntimeConfig, prompts: Sequence[Sequence[int]]) -> list[str]:
    """How a run ends of which one rank is stopped, and how a wait for rank 1 that has left the others and lives on."""
    ranks.devices = TENSOR
    found = [stopped_once(ranks, config, prompts, num_looks=3)]
    if not ranks.rank:
        with AllGather(ranks) as all_gather, pytest.raises(PeerEnded) as raised:
            all_gather.gather(torch.zeros(3))
        found.append(str(raised.value))
    return found


def test_one_rank_that_is_stopped_stops_all_and_so_does_one_that_is_gone_without_a_word(reference: References) -> None:
    ref = reference("llama, tied")
    first, second = in_ranks(2, stopped, config_for(ref), ref.prompts)
    assert "rank 1 of 2 has ended" in first.pop()
    assert "same command" in "".join(first)
    assert "same command" in "".join(second)


def left_alone(launch: Launch) -> None:
    """Rank 1 ends where rank 0 waits for its part."""
    ranks = Ranks(launch, devices=TENSOR)
    if ranks.rank:
        os._exit(1)
    all_gather = AllGather(ranks)
    try:
        with all_gather:
            all_gather.gather(torch.zeros(3))
    except PeerEnded as error:
        os._exit(error.exit_code)


def test_a_rank_that_ends_within_a_pass_ends_all(tmp_path: Path) -> None:
    launches = [Launch(rank=rank, size=2, url=f"file://{tmp_path / 'meet'}") for rank in range(2)]
    ranks = [PROCESSES.Process(target=left_alone, args=(launch,)) for launch in launches]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [each.exitcode for each in ranks] == [75, 1]
