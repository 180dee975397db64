"""What a rank has of the experts of a layer: rows of the matrices of each, or some of them whole."""

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import nn

from ..config.settings import DividedExperts
from ..plan.shape.rank_shares import RowShare, cut, runs_of, sends_less_whole, take_experts
from ..plan.shape.shapes import Parameter
from ..ranks.collectives import Gathering
from .experts import Experts, matrix_names
from .split_experts import GATHERING, num_runs
from .whole_experts import OWN

Stacks = Mapping[str, Parameter]  # by their names in an experts module


class Division(NamedTuple):
    """This rank's part of an experts module, or why there is none. `own`: the experts that it has whole; `instead`: the
    setting by which there would be one."""

    stacks: Stacks
    own: range | None = None
    why_not: str = ""
    instead: str = ""


def divide_experts(module: nn.Module, stacks: Stacks, gathering: Gathering, asked: DividedExperts) -> Division:
    """Leaves the module this rank's part of its stacks. Mutates the module, unless there is none."""
    share = RowShare(index=gathering.index, count=gathering.count)
    ways = {DividedExperts.rows: _by_rows(module, stacks, share), DividedExperts.whole: _by_expert(stacks, share)}
    found = _chosen(module, stacks, share, asked, ways)
    if found.stacks:
        for name, part in found.stacks.items():
            before = module._parameters[name]
            assert before is not None
            module._parameters[name] = nn.Parameter(
                torch.empty(part.shape, device="meta", dtype=before.dtype), requires_grad=False
            )
        setattr(module, GATHERING, gathering)
        setattr(module, OWN, found.own)
    return found


def _chosen(
    module: nn.Module,
    stacks: Stacks,
    share: RowShare,
    asked: DividedExperts,
    ways: Mapping[DividedExperts, Division],
) -> Division:
    rows, whole = ways[DividedExperts.rows], ways[DividedExperts.whole]
    if asked is DividedExperts.auto:
        inputs = stacks[matrix_names(module)[1]].shape[1:]
        hidden, inner = reversed(inputs) if cast("Experts", module).is_transposed else inputs
        is_mixed_up = any(piece.is_interleaved for stack in stacks.values() for piece in stack.slices)  # all is read
        is_whole = is_mixed_up or sends_less_whole(hidden, inner, share.count)
        first, second = (whole, rows) if is_whole else (rows, whole)
        both = f"{rows.why_not}, and {whole.why_not}"
        return first if first.stacks else second if second.stacks else Division({}, why_not=both)
    found, other = ways[asked], whole if asked is DividedExperts.rows else rows
    if found.stacks or not other.stacks:
        return found
    key = DividedExperts.whole if asked is DividedExperts.rows else DividedExperts.rows
    return Division({}, why_not=found.why_not, instead=f"devices.experts={key.value}")


def not_apart(parameter: Parameter) -> str:
    """Why its rows cannot be shared out."""
    piece = parameter.pieces[0][0]
    return f"rows of {piece.format or piece.dtype} of shape {piece.shape} do not lie apart in so many equal parts"


def _by_rows(module: nn.Module, stacks: Stacks, share: RowShare) -> Division:
    if cast("Experts", module).is_transposed:
        return Division({}, why_not="its experts' matrices lie as (inputs, outputs)")
    first, second = matrix_names(module)
    counts = {first: num_runs(module), second: 1}
    parts = {name: cut(stacks[name], share, num_runs=count) for name, count in counts.items()}
    for name, part in parts.items():
        if part is None:
            return Division({}, why_not=not_apart(stacks[name]))
    return Division({name: part for name, part in parts.items() if part is not None})


def _by_expert(stacks: Stacks, share: RowShare) -> Division:
    num_experts = min(stack.shape[0] for stack in stacks.values())
    if num_experts < share.count:
        return Division({}, why_not=f"it has {num_experts} experts")
    own = runs_of(num_experts, share.count)[share.index]
    parts = {name: take_experts(stack, own) for name, stack in stacks.items()}
    if None in parts.values():
        return Division({}, why_not="its experts' bytes do not lie apart")
    return Division({name: part for name, part in parts.items() if part is not None}, own)
