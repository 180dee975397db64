"""Ranks that compute each token together come to the tokens of transformers; each reads and holds its part alone."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from runtime import Runtime, RuntimeConfig
from runtime.config import KVConfig, KVDType, KVTier, Order, Quantize, Tier
from runtime.errors import ConfigError, PeerEnded
from runtime.plan.shape.row_shares import Share, cut
from runtime.plan.shape.shapes import Companion, Parameter, TensorSlice
from runtime.ranks.gathering import Gathering
from runtime.ranks.launch import Launch
from runtime.ranks.ranks import Ranks
from tests.processes import PROCESSES
from tests.rank_processes import in_ranks
from tests.runtime.test_families import GREEDY, config_for
from tests.runtime.test_ranks import completed, stopped_once
from tests.runtime.uneven_pages import Admitted, admitted, continuous
from tests.support import Reference, synthesize
from tests.tensor_bytes import TENSOR, held

References = Callable[[str], Reference]
Asked = tuple[RuntimeConfig, Sequence[Sequence[int]]]
FAMILIES = ("llama, tied", "qwen3-moe", "gemma-3", "phi-3")  # more: python -m tests.tensor_families


class Found(NamedTuple):
    """What a rank has come to: the tokens of a run, or why there are none."""

    tokens: Sequence[Sequence[int]]
    error: str = ""


def together(ranks: Ranks, asked: Sequence[Asked]) -> list[Found]:
    ranks.devices = TENSOR
    return [_found(ranks, *each) for each in asked]


def played(
    ranks: Ranks, asked: Sequence[Asked], coming: Sequence[Asked], drawn: RuntimeConfig
) -> tuple[list[Found], list[Admitted], Found]:
    """What several runs come to, how others admit their rows, and what one does that each rank draws with a seed of its
    own."""
    found, entered = together(ranks, asked), [admitted(ranks, *each) for each in coming]
    seeded = replace(drawn, sampling=replace(drawn.sampling, seed=ranks.rank))
    return found, entered, _found(ranks, seeded, coming[0][1])


def _found(ranks: Ranks, config: RuntimeConfig, prompts: Sequence[Sequence[int]]) -> Found:
    try:
        return Found(completed(Runtime(config, ranks=ranks), prompts))
    except ConfigError as error:
        return Found([], str(error))


def of_one(asked: Sequence[Asked]) -> list[Found]:
    return [Found(completed(Runtime(config), prompts)) for config, prompts in asked]


def test_two_ranks_come_to_the_tokens_of_transformers_or_refuse_by_name(reference: References) -> None:
    """Numbers that go on as parts by a class's plan, that are made whole at once, experts, and one matrix for both
    ends; prompts in pieces, keys and values that travel, and experts of all lanes at once; rows that enter as others
    end, where one rank has fewer pages. Ranks that draw other tokens than one another are seen."""
    refs = [reference(family) for family in FAMILIES]
    llama, moe = refs[0], refs[1]
    plain, mixture = config_for(llama), config_for(moe)
    asked = [(config_for(ref, tier), ref) for ref, tier in zip(refs, [Tier.cpu, *[Tier.nvme] * 3], strict=True)]
    asked += [
        (replace(plain, kv=KVConfig(tier=KVTier.nvme, device_fraction=0.0)), llama),
        (replace(plain, policy=replace(plain.policy, prefill_chunk_tokens=7)), llama),
        (replace(mixture, policy=replace(mixture.policy, schedule=Order.module_batched)), moe),
    ]
    refused = {"deepseek-v3": "latents are of all heads", "bloom": "padded lanes keep all heads"}
    configs = [(config, ref.prompts) for config, ref in asked]
    configs += [(config_for(reference(family)), llama.prompts) for family in refused]
    coming = [(continuous(config_for(llama, tier)), llama.prompts) for tier in (Tier.cpu, Tier.nvme)]
    drawn = config_for(llama, sampling=replace(GREEDY, temperature=0.8))
    first, second = in_ranks(2, played, configs, coming, drawn)
    assert first == second, "all admit the same rows"
    found, entered, unlike = first
    assert [each.tokens for each in found[: len(asked)]] == [ref.expected for _, ref in asked]
    for each, why in zip(found[len(asked) :], refused.values(), strict=True):
        assert "devices.way=tensor" in each.error
        assert why in each.error
    assert [each.tokens for each in entered] == [llama.expected] * 2
    assert "rank 1 has come to other tokens than rank 0" in unlike.error


def test_four_ranks_come_to_the_tokens_of_one_process(tmp_path: Path) -> None:
    """Greedy and drawn ones, with weights that are rounded as they are read and with keys and values of 8 bits."""
    directory = synthesize("llama", tmp_path / "llama", num_key_value_heads=4)
    ref = Reference(directory=directory, prompts=[[7, 8, 9 + i] for i in range(5)], expected=[], sampled=[])
    plain = config_for(ref)
    drawn = config_for(ref, sampling=replace(GREEDY, temperature=0.8, top_p=0.95))
    kept = config_for(ref, Tier.cpu)
    rounded = replace(kept, model=replace(kept.model, quantize=Quantize.int8), kv=KVConfig(dtype=KVDType.int8))
    asked = [(config, ref.prompts) for config in (plain, drawn, rounded)]
    expected = of_one(asked)
    for found in in_ranks(4, together, [*asked, (config_for(_two_heads(tmp_path)), ref.prompts)]):
        assert found[:-1] == expected
        assert "2 KV heads are no multiple of 4" in found[-1].error


def _two_heads(tmp_path: Path) -> Reference:
    directory = synthesize("llama", tmp_path / "two", num_key_value_heads=2)
    return Reference(directory=directory, prompts=[], expected=[], sampled=[])


def test_each_rank_reads_its_part_of_the_weights_and_caches_its_part_of_the_heads(tmp_path: Path) -> None:
    """Exactly, as planned, but for norms, which all have; what is read comes in whole blocks of the disk."""
    wide = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "num_key_value_heads": 4}
    directory, norm_bytes = synthesize("llama", tmp_path / "wide", **wide), 5 * 1024 * 2
    [whole], parts = in_ranks(1, held, directory, 2), in_ranks(4, held, directory, 2)
    for part in parts:
        assert part.weight_bytes == (whole.weight_bytes - norm_bytes) // 4 + norm_bytes
        assert part.kv_bytes_per_token == whole.kv_bytes_per_token // 4
        assert (whole.num_kv_heads, part.num_kv_heads) == (4, 1)
        assert part.read_bytes == pytest.approx(whole.read_bytes / 4, rel=0.02)


def stopped(ranks: Ranks, config: RuntimeConfig, prompts: Sequence[Sequence[int]]) -> str:
    ranks.devices = TENSOR
    return stopped_once(ranks, config, prompts, num_looks=3)


def test_one_rank_that_is_stopped_stops_all(reference: References) -> None:
    ref = reference("llama, tied")
    for found in in_ranks(2, stopped, config_for(ref), ref.prompts):
        assert "same command" in found


def left_alone(launch: Launch) -> None:
    """Rank 1 ends where rank 0 waits for its part."""
    ranks = Ranks(launch, devices=TENSOR)
    if ranks.rank:
        os._exit(1)
    gathering = Gathering(ranks)
    try:
        with gathering:
            gathering.whole(torch.zeros(3))
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


def piece_of(shape: tuple[int, ...], *companions: Companion, **more: object) -> TensorSlice:
    num_bytes = 2 * torch.Size(shape).numel()
    piece = TensorSlice(name="w", file="f", offset=1000, num_bytes=num_bytes, dtype="BF16", shape=shape)
    return replace(piece, companions=companions, **more)


def test_the_shares_of_a_matrix_are_its_rows_with_what_belongs_to_them() -> None:
    scales = Companion(role="scales", tensor=replace(piece_of((4, 3)), name="s", offset=0), block_rows=2)
    shared = Companion(role="table", tensor=replace(piece_of((16,)), name="t"))
    whole = Parameter(name="w", shape=(8, 6), pieces=((piece_of((8, 6), scales, shared),),))
    for index in range(2):
        part = cut(whole, Share(index=index, count=2))
        assert part is not None
        [[piece]] = part.pieces
        assert (part.shape, piece.offset, piece.num_bytes) == ((4, 6), 1000 + index * 48, 48)
        assert [(each.tensor.offset, each.tensor.shape) for each in piece.companions] == [
            (index * 12, (2, 3)),
            (1000, (16,)),
        ]
    assert cut(whole, Share(index=0, count=8)) is None, "a share would end inside a block with one scale"
    assert cut(whole, Share(index=0, count=3)) is None
    flipped = replace(whole, pieces=((piece_of((8, 6), is_transposed=True),),))
    assert cut(flipped, Share(index=0, count=2)) is None


def test_gates_and_what_they_let_through_are_cut_each_by_itself_in_every_expert() -> None:
    stack = Parameter(name="w", shape=(2, 8, 3), pieces=((piece_of((2, 8, 3)),),))
    part = cut(stack, Share(index=1, count=2), num_runs=2)
    assert part is not None
    assert (part.shape, part.is_stacked) == ((2, 4, 3), True)
    rows = [[(piece.offset - 1000) // 6 for piece in entry] for entry in part.pieces]
    assert rows == [[2, 6], [10, 14]]
    assert len({piece.name for entry in part.pieces for piece in entry}) == 4


def test_rows_in_another_order_are_cut_where_the_order_stays_within() -> None:
    ordered = Parameter(
        name="w", shape=(8, 3), pieces=((piece_of((8, 3), row_order=(range(3, -1, -1), range(4, 8))),),)
    )
    part = cut(ordered, Share(index=0, count=2))
    assert part is not None
    assert [row for run in part.pieces[0][0].row_order for row in run] == [3, 2, 1, 0]
    assert cut(ordered, Share(index=0, count=4)) is None
