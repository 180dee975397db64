"""Ranks that share the reads of the weights come to the tokens of one process, and each reads its share alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from runtime import OffloadConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import (
    Admission,
    Attention,
    DevicesConfig,
    DividedExperts,
    ExpertPaging,
    Gather,
    KVConfig,
    KVTier,
    Order,
    Parallelism,
    Prefetch,
    PrefetchConfig,
    Tier,
)
from runtime.devices.messages import config_for_ranks, end_sessions
from runtime.engine.records import PassRecord
from runtime.errors import ConfigError
from runtime.plan.shape.extents import ALIGNMENT_BYTES, Extent, reader_share
from runtime.ranks.ranks import Ranks
from runtime.sequences.sequence import Request
from runtime.store.reader import Reader
from tests.rank_processes import in_ranks
from tests.runtime.rank_runs import completed, faulted_once, stopped_once
from tests.runtime.test_families import GREEDY, config_for
from tests.support import Reference, synthesize

References = Callable[[str], Reference]
FAMILIES = (
    *("llama", "mistral", "gemma-3", "qwen3-moe", "mixtral", "deepseek-v3"),
    *("gpt-oss", "qwen3-next", "bloom", "phi-3", "gpt2"),
)
KINDS = ("qwen3-next", "llama", "mixtral", "gemma-3", "deepseek-v3", "bloom")
TIERS = (Tier.nvme, Tier.cpu)


@dataclass
class ReadBytes:
    num_bytes: int = 0


@contextmanager
def counted_reads() -> Iterator[ReadBytes]:
    """What is asked of all readers of this process."""
    found, submit = ReadBytes(), Reader.submit

    def counting(reader: Reader, extents: Sequence[Extent], target: memoryview) -> object:
        found.num_bytes += sum(extent.num_bytes for extent in extents)
        return submit(reader, extents, target)

    with mock.patch.object(Reader, "submit", counting):
        yield found


RunCase = tuple[RuntimeConfig, Sequence[Sequence[int]], Gather]


def generated(ranks: Ranks, cases: Sequence[RunCase]) -> list[list[list[int]]]:
    """What each of several runs generates, one after another."""
    results = list[list[list[int]]]()
    for config, prompts, gather in cases:
        ranks.devices = replace(ranks.devices, gather=gather)
        results.append(completed(Runtime(config, ranks=ranks), prompts))
    return results


@pytest.mark.parametrize(
    ("size", "families"),
    [(2, KINDS), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, FAMILIES), (4, KINDS)))],
)
def test_tokens_of_ranks_are_those_of_transformers_for_all_kinds_of_families(
    size: int, families: Sequence[str], reference: References
) -> None:
    """One family from disk, the next one from host memory."""
    pairs = [(reference(family), TIERS[turn % 2]) for turn, family in enumerate(families)]
    expected = [each.expected for each, _ in pairs]
    gather_of = {Tier.nvme: Gather.collective if size == 2 else Gather.memory, Tier.cpu: Gather.memory}
    cases = [(config_for(each, tier), each.prompts, gather_of[tier]) for each, tier in pairs]
    for found in in_ranks(size, generated, cases):
        assert found == expected


@pytest.mark.slow("runtime/test_ranks.py::test_tokens_of_ranks_are_those_of_transformers_for_all_kinds_of_families")
def test_tokens_of_ranks_are_those_of_transformers_however_a_pass_is_played(reference: References) -> None:
    """Orders, prefetch, pages, keys and values that travel, prompts in pieces, and more ranks than rows."""
    ref = reference("llama")
    plain = config_for(ref)
    policies = [
        {"schedule": Order.flexgen},
        {"schedule": Order.cgopipe, "attention": Attention.cpu},
        {"prefill_chunk_tokens": 7},
        {"micro_batch_size": 2, "num_micro_batches": 1},
    ]
    configs = [replace(plain, policy=replace(plain.policy, **changes)) for changes in policies]
    configs += [
        replace(plain, prefetch=PrefetchConfig(kind=kind, depth=2)) for kind in Prefetch if kind.value != "block"
    ]
    configs += [replace(plain, policy=replace(plain.policy, admission=Admission.continuous))] * 2
    configs += [replace(plain, kv=KVConfig(tier=tier, device_fraction=0.0)) for tier in (KVTier.cpu, KVTier.nvme)]
    ways = (Gather.collective, Gather.memory)
    cases = [(config, ref.prompts, ways[turn % 2]) for turn, config in enumerate(configs)]
    cases += [(plain, ref.prompts[:2], way) for way in ways]
    for found in in_ranks(3, generated, cases):
        assert found == [*(ref.expected for _ in configs), ref.expected[:2], ref.expected[:2]]


@pytest.mark.slow("runtime/test_ranks.py::test_tokens_of_ranks_are_those_of_transformers_for_all_kinds_of_families")
def test_few_rows_are_admitted_by_as_many_ranks_as_have_room_for_the_longest(reference: References) -> None:
    """Their 11 pages are 2 for each of four, and the longest takes 3."""
    ref = reference("llama")
    config = config_for(ref)
    config = replace(config, policy=replace(config.policy, admission=Admission.continuous))
    for [found] in in_ranks(4, generated, [(config, ref.prompts, Gather.memory)]):
        assert found == ref.expected


@pytest.mark.slow("runtime/test_ranks.py::test_tokens_of_ranks_are_those_of_transformers_for_all_kinds_of_families")
def test_experts_of_all_lanes_at_once_and_draws_of_each_row_are_as_those_of_one_process(
    reference: References, opened: Callable[[RuntimeConfig], Runtime]
) -> None:
    ref = reference("qwen3-moe")
    batched = config_for(ref)
    batched = replace(batched, policy=replace(batched.policy, schedule=Order.module_batched))
    drawn = config_for(reference("llama"), sampling=replace(GREEDY, temperature=0.8, top_p=0.95, logprobs=2))
    expected = completed(opened(drawn), ref.prompts)
    for found in in_ranks(2, generated, [(batched, ref.prompts, Gather.memory), (drawn, ref.prompts, Gather.auto)]):
        assert found == [ref.expected, expected]


def bytes_read(ranks: Ranks, directory: Path) -> tuple[int, int]:
    """What a rank has read, and how many passes that took."""
    config = config_for(Reference(directory=directory, prompts=[], expected=[], sampled=[]))
    runtime, records = Runtime(config, ranks=ranks), list[PassRecord]()
    requests = [runtime.request(str(i), [7 + i, 8, 9]) for i in range(6)]
    cases = [each for each in requests if isinstance(each, Request)]
    with counted_reads() as read:
        if ranks.rank:
            list(runtime.follow(cases))
        else:
            with runtime.open_with_backoff(cases) as (_, session):
                list(session.generate(cases, records.append))
            end_sessions(ranks)
    assert ranks.rank or sum(record.times.bytes_read_disk for record in records) <= read.num_bytes
    return read.num_bytes, len(records)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_rank_reads_its_share_of_the_bytes_within_2_percent(size: int, tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}
    directory = synthesize("llama", tmp_path / "wide", **wide)
    [(whole, _)] = in_ranks(1, bytes_read, directory)
    for found, _ in in_ranks(size, bytes_read, directory):
        assert found == pytest.approx(whole / size, rel=0.02)


def test_shares_of_readers_are_disjoint_and_cover_every_byte_in_whole_blocks() -> None:
    extents = [
        Extent(file="a", offset=4096, num_bytes=5 * 4096, used_bytes=18_000, slot_offset=8192),
        Extent(file="b", offset=0, num_bytes=4096, used_bytes=100, slot_offset=7 * 4096),
    ]
    for count in (1, 2, 3, 4, 7, 9):
        shares = [part for index in range(count) for part in reader_share(extents, index, count)]
        assert all(part.slot_offset % ALIGNMENT_BYTES == part.num_bytes % ALIGNMENT_BYTES == 0 for part in shares)
        for extent in extents:
            own = [part for part in shares if part.file == extent.file]
            assert sum(part.num_bytes for part in own) == extent.num_bytes
            assert sum(part.used_bytes for part in own) == extent.used_bytes
            ends = [part.slot_offset + part.num_bytes for part in own]
            assert [extent.slot_offset, *ends[:-1]] == [part.slot_offset for part in own]
    assert reader_share([], 0, 2) == ()


def stopped(ranks: Ranks, config: RuntimeConfig, prompts: Sequence[Sequence[int]]) -> list[str]:
    """How runs end that rank 1 alone is asked to stop, in the middle of a pass, however shares come together, and those
    in which rank 0 cannot read on."""
    found = list[str]()
    for gather in (Gather.memory, Gather.collective):
        ranks.devices = replace(ranks.devices, gather=gather)
        found += [stopped_once(ranks, config, prompts), faulted_once(ranks, config, prompts)]
    return found


@pytest.mark.slow(
    "jobs/test_ranks_killed.py::test_whoever_is_killed_whenever_all_end_with_75_and_another_number_of_ranks_goes_on"
)
def test_one_rank_that_is_stopped_stops_all_and_so_does_one_that_fails(reference: References) -> None:
    ref = reference("llama")
    first, *others = in_ranks(3, stopped, config_for(ref), ref.prompts)
    assert first[1::2] == [f"the disk is gone, {len(ref.prompts)} rows are known"] * 2
    for how_it_ended in (first[::2], *others):
        assert all("same command" in each for each in how_it_ended)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"offload": OffloadConfig(expert_paging=ExpertPaging.hit)}, "offload.expert_paging=hit"),
        ({"sampling": SamplingConfig(num_beams=2)}, "sampling.num_beams=2"),
    ],
)
def test_what_ranks_cannot_do_yet_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"devices=sharded does not support {named}"):
        config_for_ranks(RuntimeConfig(**changes))


@pytest.mark.parametrize("way", Parallelism)
def test_a_setting_that_is_for_another_way_is_refused_by_name(way: Parallelism) -> None:
    cases = [("gather", Gather.memory, Parallelism.sharded), ("experts", DividedExperts.whole, Parallelism.tensor)]
    for key, value, other in cases:
        if way is other:
            kept = DevicesConfig(way=way, **{key: value})
            assert kept.for_parallelism(way) == kept
            assert kept.for_parallelism(Parallelism.pipeline) == DevicesConfig(way=Parallelism.pipeline)
            continue
        said = rf"devices.{key}={value.value} has no effect with devices={way.value}: set devices={other.value}"
        with pytest.raises(ConfigError, match=said):
            DevicesConfig(way=way, **{key: value})
