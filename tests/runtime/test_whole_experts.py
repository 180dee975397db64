"""Experts that each belong to one rank give the sums of one process to the bit, however few tokens visit them."""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from runtime.config.settings import DividedExperts
from runtime.model.experts import SHARE, Visits, bound_matrices, find_expert_share, matrix_names, mix_experts
from runtime.plan.shape.rank_shares import split_evenly
from runtime.plan.shape.shapes import Parameter, TensorSlice
from runtime.ranks.tensor_experts import WholeExperts, split_experts

NUM_RANKS, NUM_EXPERTS, HIDDEN = 3, 5, 32
SIZES: Any = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
}


class Handing:
    """A rank's gathering where all ranks are threads, which leave on a `board` what they hand one another."""

    def __init__(self, index: int, board: list[Sequence[torch.Tensor]], met: Barrier):
        self.index, self.count, self._board, self._met = index, NUM_RANKS, board, met

    def all_to_all(self, rows: torch.Tensor, given: Sequence[int], taken: Sequence[int]) -> torch.Tensor:
        self._board[self.index] = rows.split([*given])
        self._met.wait()
        found = [each[self.index] for each in self._board]
        assert [len(each) for each in found] == [*taken]
        self._met.wait()
        return torch.cat(found)


def of_rank(module: torch.nn.Module, handing: Any) -> torch.nn.Module:
    part, own = copy.deepcopy(module), split_evenly(NUM_EXPERTS, NUM_RANKS)[handing.index]
    for name in matrix_names(part):
        part.register_parameter(name, torch.nn.Parameter(getattr(module, name)[own.start : own.stop]))
    setattr(part, SHARE, WholeExperts(handing, own))
    return part


def mixed_by(part: torch.nn.Module, hidden_TD: torch.Tensor, visits: Visits) -> torch.Tensor:
    share = find_expert_share(part)
    assert share is not None
    assert share.own is not None
    own = share.own
    hit = [(expert, bound_matrices(part, expert - own.start)) for expert in visits.hit if expert in own]
    with torch.inference_mode():
        return share.mix_experts(part, hidden_TD, visits, hit)


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
@pytest.mark.parametrize("module", [MixtralExperts(MixtralConfig(**SIZES)), GptOssExperts(GptOssConfig(**SIZES))])
@torch.inference_mode()
def test_sums_of_whole_experts_are_those_of_one_process(module: torch.nn.Module, num_tokens: int) -> None:
    """Gated, and with biases and matrices as (inputs, outputs)."""
    for parameter in module.parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(1))
    draw = torch.Generator().manual_seed(num_tokens)
    hidden_TD = torch.randn(num_tokens, HIDDEN, generator=draw)
    weights_TK, experts_TK = torch.rand(num_tokens, NUM_EXPERTS, generator=draw).topk(2)
    visits = Visits.from_top_k(experts_TK, weights_TK, NUM_EXPERTS)
    expected = mix_experts(
        module, hidden_TD, visits, [(expert, bound_matrices(module, expert)) for expert in visits.hit]
    )
    board, met = list[Sequence[torch.Tensor]]([()] * NUM_RANKS), Barrier(NUM_RANKS, timeout=10)
    parts = [of_rank(module, Handing(rank, board, met)) for rank in range(NUM_RANKS)]
    with ThreadPoolExecutor(NUM_RANKS) as ranks:
        found = list(ranks.map(mixed_by, parts, [hidden_TD] * NUM_RANKS, [visits] * NUM_RANKS))
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("num_ranks", [NUM_EXPERTS, NUM_EXPERTS + 1])
def test_as_many_ranks_as_experts_have_one_each_and_more_are_refused(num_ranks: int) -> None:
    module = MixtralExperts(MixtralConfig(**SIZES))
    stacks = {name: stack_of(name, getattr(module, name).shape) for name in matrix_names(module)}
    handing = SimpleNamespace(index=num_ranks - 1, count=num_ranks)
    found = split_experts(module, stacks, handing, DividedExperts.whole)  # pyright: ignore[reportArgumentType]
    if num_ranks > NUM_EXPERTS:
        assert found.why_not == f"it has only {NUM_EXPERTS} experts"
    else:
        assert found.own == range(NUM_EXPERTS - 1, NUM_EXPERTS)
        assert {stack.shape[0] for stack in found.stacks.values()} == {1}


def stack_of(name: str, shape: Sequence[int]) -> Parameter:
    """A file that holds the matrices of all experts in one tensor."""
    whole = TensorSlice(name=name, file="", offset=0, num_bytes=4 * prod(shape), dtype="F32", shape=tuple(shape))
    return Parameter(name=name, shape=tuple(shape), pieces=((whole,),))
