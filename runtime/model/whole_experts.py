"""Experts of which each belongs to one rank, which alone has its matrices.

All ranks know who visits whom. Each multiplies the tokens that visit its experts, and hands each output to the rank
that adds up that token's; what it adds up it tells all. Products and the order of sums are those of one process, so
that sums are, to the bit.

Letters as in experts.py.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn

from ..plan.shape.rank_shares import runs_of
from .experts import Experts, Matrices, Visits, output_of
from .split_experts import gathering_of

OWN = "own_experts"  # the attribute of an experts module that has some of them


def own_experts(module: nn.Module) -> range | None:
    """Those whose matrices the module has, where other ranks have others."""
    return getattr(module, OWN, None)


def mixed_among(
    module: nn.Module, hidden_TD: torch.Tensor, visits: Visits, hit: Iterable[tuple[int, Matrices]]
) -> torch.Tensor:
    """What `experts.mixed` gives, (T, D). `hit` yields this rank's experts alone, ascending."""
    gathering, num_experts = gathering_of(module), cast("Experts", module).num_experts
    assert gathering is not None, "asked of experts that no other rank has"
    experts, tokens = runs_of(num_experts, gathering.count), runs_of(len(hidden_TD), gathering.count)
    own, mine = experts[gathering.index], tokens[gathering.index]
    given, sizes_given = _given(module, hidden_TD, visits, hit, own, tokens)
    summed = visits.of_tokens(mine)
    taken = gathering.exchanged(given, sizes_given, [_num_visits(summed, each) for each in experts])
    out_tD = hidden_TD.new_zeros(len(mine), hidden_TD.shape[1])
    for expert in summed.hit:
        rows = summed.of(expert)
        out_tD.index_add_(0, summed.tokens_V[rows] - mine.start, taken[rows])
    return gathering.exchanged(
        out_tD.repeat(gathering.count, 1), [len(mine)] * gathering.count, [len(each) for each in tokens]
    )


def _given(
    module: nn.Module,
    hidden_TD: torch.Tensor,
    visits: Visits,
    hit: Iterable[tuple[int, Matrices]],
    own: range,
    tokens: Sequence[range],
) -> tuple[torch.Tensor, list[int]]:
    """The weighted outputs of this rank's experts, (V, D), by the rank that adds up the token's, and how many each
    gets."""
    begin, end = visits.of(own.start).start, visits.of(own[-1]).stop
    ends = torch.tensor([each.stop for each in tokens], device=visits.tokens_V.device)
    to_V = torch.bucketize(visits.tokens_V[begin:end], ends, right=True)
    places_V = torch.empty_like(to_V)
    places_V[to_V.argsort(stable=True)] = torch.arange(end - begin, device=to_V.device)
    out_VD = hidden_TD.new_empty(end - begin, hidden_TD.shape[1])
    for expert, matrices in hit:
        rows = visits.of(expert)
        found = output_of(module, matrices, expert, hidden_TD, visits) * visits.weights_V[rows, None]
        out_VD[places_V[rows.start - begin : rows.stop - begin]] = found.to(out_VD.dtype)
    return out_VD, to_V.bincount(minlength=len(tokens)).tolist()


def _num_visits(visits: Visits, experts: range) -> int:
    return visits.of(experts[-1]).stop - visits.of(experts.start).start
