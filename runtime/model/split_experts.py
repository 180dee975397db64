"""Experts whose matrices are cut by their rows, as all others are: each rank makes some numbers of every visit.

Letters as in experts.py; N and M are a rank's part of what lies between an expert's matrices, and of D.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from ..ranks.collectives import Gathering
from .experts import Experts, Matrices, Visits, activated, bias_of, has_norm, matrix_names
from .fused import is_code_of

GATHERING = "gathering"  # the attribute of an experts module that is split
GATED: Any = MixtralExperts  # transformers' decorator adds `_apply_gate`
LEAST_VISITS = 512  # whose numbers are made whole together


def gathering_of(module: nn.Module) -> Gathering | None:
    """Who makes its numbers whole; None of experts that are not split."""
    return getattr(module, GATHERING, None)


def num_runs(module: nn.Module) -> int:
    """The runs of rows of the first matrix that are cut each by itself: 2 where a gate and what it lets through lie one
    below the other, and can be multiplied part by part."""
    experts = cast("Experts", module)
    is_usual = is_code_of(getattr(type(module), "_apply_gate", None), GATED._apply_gate)
    return 2 if experts.has_gate and is_usual and not experts.has_bias else 1


def split_mixed(
    module: nn.Module, hidden_TD: torch.Tensor, visits: Visits, hit: Iterable[tuple[int, Matrices]]
) -> torch.Tensor:
    """What `experts.mixed` gives, (T, D), of matrices of which each rank has some rows. Sums are made in its order."""
    gathering = gathering_of(module)
    assert gathering is not None, "asked of experts that are whole"
    experts = cast("Experts", module)
    is_last_whole = experts.has_bias or has_norm(experts)
    out_TM, width = None, 0
    for run in _runs(visits, hit, max(len(hidden_TD), LEAST_VISITS)):
        for expert, found in _outputs(module, gathering, run, hidden_TD, visits, is_whole=is_last_whole):
            mine = visits.of(expert)
            if out_TM is None:
                width = found.shape[1]
                out_TM = hidden_TD.new_zeros(len(hidden_TD), width)
            out_TM.index_add_(0, visits.tokens_V[mine], (found * visits.weights_V[mine, None]).to(out_TM.dtype))
    assert out_TM is not None, "each token visits an expert"
    return out_TM if is_last_whole else gathering.whole(out_TM)


def _runs(
    visits: Visits, hit: Iterable[tuple[int, Matrices]], most_visits: int
) -> Iterator[Sequence[tuple[int, Matrices]]]:
    """Experts in their order, as many as have together no more visits than that, or one."""
    run, num_visits = list[tuple[int, Matrices]](), 0
    for expert, matrices in hit:
        own = visits.of(expert)
        if run and num_visits + own.stop - own.start > most_visits:
            yield run
            run, num_visits = [], 0
        run.append((expert, matrices))
        num_visits += own.stop - own.start
    if run:
        yield run


def _outputs(
    module: nn.Module,
    gathering: Gathering,
    run: Sequence[tuple[int, Matrices]],
    hidden_TD: torch.Tensor,
    visits: Visits,
    *,
    is_whole: bool,
) -> Iterator[tuple[int, torch.Tensor]]:
    """What each expert of a run makes of its visits, (V, D) where it `is_whole`, else this rank's (V, M)."""
    experts, (up, down) = cast("Experts", module), matrix_names(module)
    counts = [visits.of(expert).stop - visits.of(expert).start for expert, _ in run]
    parts = [F.linear(hidden_TD[visits.tokens_V[visits.of(expert)]], own[up]) for expert, own in run]
    if num_runs(module) == 2 or (not experts.has_gate and not experts.has_bias):
        inner_VH = gathering.whole(torch.cat([activated(experts, part) for part in parts]))
    else:
        whole = gathering.whole(torch.cat(parts)).split(counts)
        pairs = zip(run, whole, strict=True)
        inner_VH = torch.cat([activated(experts, _biased(experts, up, expert, x)) for (expert, _), x in pairs])
    pairs = zip(run, inner_VH.split(counts), strict=True)
    found = [F.linear(inner, own[down]) for (_, own), inner in pairs]
    if is_whole:
        found = gathering.whole(torch.cat(found)).split(counts)
        found = [_biased(experts, down, expert, x) for (expert, _), x in zip(run, found, strict=True)]
        found = [experts.post_expert_norm(x) for x in found] if has_norm(experts) else found
    yield from zip((expert for expert, _ in run), found, strict=True)


def _biased(experts: Experts, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    bias = bias_of(experts, name)
    return x if bias is None else x + bias[expert]
