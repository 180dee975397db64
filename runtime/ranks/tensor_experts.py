"""A rank's part of a mixture-of-experts layer: some rows of every expert's matrices, or some whole experts.

Split by rows, each rank computes some features of every expert's output. Split by expert (expert parallelism), each
rank computes the tokens routed to its experts, and sends each output to the rank that sums the outputs of that token.
The sums are then all-gathered. Products and the order of sums equal those of one process, so results are bit-identical.

A visit is a pair of a token and an expert that it is routed to.
Shapes: T tokens of D features, V visits, H an expert's inner size, M this rank's part of D, t this rank's part of T.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from ..config.settings import DividedExperts
from ..model.experts import (
    SHARE,
    Experts,
    ExpertShare,
    Matrices,
    Visits,
    apply_activation,
    expert_output,
    has_norm,
    matrix_names,
    stacked_bias,
)
from ..model.fused import has_same_code
from ..plan.shape.rank_shares import RowShare, cut_rows, slice_experts, split_evenly, whole_experts_send_less
from ..plan.shape.shapes import Parameter
from .collectives import AllGather

GATED: Any = MixtralExperts  # transformers' decorator adds `_apply_gate`
# The outputs of several experts are gathered in one call. The limit of visits in a call is T, or this if T is smaller.
MIN_VISIT_LIMIT = 512

Stacks = Mapping[str, Parameter]  # name in the experts module -> the stacked matrices of all experts


def num_fused(module: nn.Module) -> int:
    """2 if an expert's first matrix is split as two, gate and up, so that a rank gets the same rows of both; 1 if it is
    split as one. It is split as two if the activation is the usual one, without bias: a rank can then apply it to its
    own rows."""
    experts = cast("Experts", module)
    is_default = has_same_code(getattr(type(module), "_apply_gate", None), GATED._apply_gate)
    return 2 if experts.has_gate and is_default and not experts.has_bias else 1


def _batch_experts(
    visits: Visits, hit: Iterable[tuple[int, Matrices]], most_visits: int
) -> Iterator[Sequence[tuple[int, Matrices]]]:
    """Yields batches of consecutive experts, with at most `most_visits` visits in a batch of several experts. `hit`:
    (expert, its matrices)."""
    batch, num_visits = list[tuple[int, Matrices]](), 0
    for expert, matrices in hit:
        rows = visits.expert_rows(expert)
        if batch and num_visits + rows.stop - rows.start > most_visits:
            yield batch
            batch, num_visits = [], 0
        batch.append((expert, matrices))
        num_visits += rows.stop - rows.start
    if batch:
        yield batch


def _add_bias(experts: Experts, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    bias = stacked_bias(experts, name)
    return x if bias is None else x + bias[expert]


class ExpertRows(ExpertShare):
    """A rank's part of an experts module: some rows of every expert's matrices."""

    def __init__(self, all_gather: AllGather):
        super().__init__()
        self._all_gather = all_gather

    def mix_experts(
        self, module: nn.Module, hidden_TD: torch.Tensor, visits: Visits, hit: Iterable[tuple[int, Matrices]]
    ) -> torch.Tensor:
        """Adds the experts' outputs in the order of the `mix_experts` of a single process."""
        experts = cast("Experts", module)
        # Bias and norm need all features of an expert's output, so each output is gathered before they are applied.
        gathers_outputs = experts.has_bias or has_norm(experts)
        out: torch.Tensor | None = None  # (T, D) if `gathers_outputs`, else (T, M), gathered at the end
        for batch in _batch_experts(visits, hit, max(len(hidden_TD), MIN_VISIT_LIMIT)):
            for expert, output in self._outputs(module, batch, hidden_TD, visits, gathers_outputs=gathers_outputs):
                rows = visits.expert_rows(expert)
                if out is None:
                    out = hidden_TD.new_zeros(len(hidden_TD), output.shape[1])
                weighted = output * visits.weights_V[rows, None]
                out.index_add_(0, visits.tokens_V[rows], weighted.to(out.dtype))
        assert out is not None, "each token visits an expert"
        return out if gathers_outputs else self._all_gather.gather(out)

    def _outputs(
        self,
        module: nn.Module,
        batch: Sequence[tuple[int, Matrices]],
        hidden_TD: torch.Tensor,
        visits: Visits,
        *,
        gathers_outputs: bool,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (expert, output) for the experts of a batch: all features (V, D) if `gathers_outputs`, else this
        rank's (V, M)."""
        experts, (up, down) = cast("Experts", module), matrix_names(module)
        counts = [visits.expert_rows(expert).stop - visits.expert_rows(expert).start for expert, _ in batch]
        parts = [F.linear(hidden_TD[visits.tokens_V[visits.expert_rows(expert)]], own[up]) for expert, own in batch]
        # Apply the activation before the gather if this rank's features suffice: it has the gate and up of the same
        # features, or the activation has neither gate nor bias. Otherwise, apply it to all features after the gather.
        is_local = num_fused(module) == 2 or (not experts.has_gate and not experts.has_bias)
        if is_local:
            inner_VH = self._all_gather.gather(torch.cat([apply_activation(experts, part) for part in parts]))
        else:
            whole = self._all_gather.gather(torch.cat(parts)).split(counts)
            pairs = zip(batch, whole, strict=True)
            inner_VH = torch.cat(
                [apply_activation(experts, _add_bias(experts, up, expert, x)) for (expert, _), x in pairs]
            )
        pairs = zip(batch, inner_VH.split(counts), strict=True)
        outputs = [F.linear(inner, own[down]) for (_, own), inner in pairs]
        if gathers_outputs:
            outputs = self._all_gather.gather(torch.cat(outputs)).split(counts)
            outputs = [_add_bias(experts, down, expert, x) for (expert, _), x in zip(batch, outputs, strict=True)]
            outputs = [experts.post_expert_norm(x) for x in outputs] if has_norm(experts) else outputs
        yield from zip((expert for expert, _ in batch), outputs, strict=True)


class WholeExperts(ExpertShare):
    """A rank's part of an experts module: whole experts, which no other rank has."""

    def __init__(self, all_gather: AllGather, own: range):
        super().__init__(own)
        self._all_gather = all_gather

    def mix_experts(
        self, module: nn.Module, hidden_TD: torch.Tensor, visits: Visits, hit: Iterable[tuple[int, Matrices]]
    ) -> torch.Tensor:
        """Computes this rank's experts, sends their outputs to the ranks that sum them, and gathers the sums. `hit`
        yields only this rank's experts."""
        all_gather, num_experts = self._all_gather, cast("Experts", module).num_experts
        # Ranges by rank: the experts that it computes, and the tokens that it sums.
        experts, tokens = split_evenly(num_experts, all_gather.count), split_evenly(len(hidden_TD), all_gather.count)
        own_experts, own_tokens = experts[all_gather.index], tokens[all_gather.index]
        outputs, send_counts = _weighted_outputs(module, hidden_TD, visits, hit, own_experts, tokens)
        own_visits = visits.select_tokens(own_tokens)  # the visits whose outputs this rank sums
        visit_ranges = [
            (own_visits.expert_rows(each.start).start, own_visits.expert_rows(each[-1]).stop) for each in experts
        ]
        receive_counts = [stop - start for start, stop in visit_ranges]
        received = all_gather.all_to_all(outputs, send_counts, receive_counts)
        out_tD = hidden_TD.new_zeros(len(own_tokens), hidden_TD.shape[1])
        for expert in own_visits.hit:
            rows = own_visits.expert_rows(expert)
            out_tD.index_add_(0, own_visits.tokens_V[rows] - own_tokens.start, received[rows])
        # All-gather of the sums, which may be unequal numbers of tokens: each rank sends its sums to every rank.
        return all_gather.all_to_all(
            out_tD.repeat(all_gather.count, 1), [len(own_tokens)] * all_gather.count, [len(each) for each in tokens]
        )


def _weighted_outputs(
    module: nn.Module,
    hidden_TD: torch.Tensor,
    visits: Visits,
    hit: Iterable[tuple[int, Matrices]],
    own: range,
    tokens: Sequence[range],
) -> tuple[torch.Tensor, list[int]]:
    """The weighted outputs of this rank's experts (V, D), ordered by the rank that sums them, and the number for each
    rank. `own`: this rank's experts. `tokens`: the tokens that each rank sums."""
    begin, end = visits.expert_rows(own.start).start, visits.expert_rows(own[-1]).stop
    ends = torch.tensor([each.stop for each in tokens], device=visits.tokens_V.device)
    rank_V = torch.bucketize(visits.tokens_V[begin:end], ends, right=True)  # the summing rank of each visit
    rows_V = torch.empty_like(rank_V)  # the row of each visit in the result: the inverse of the sort by rank
    rows_V[rank_V.argsort(stable=True)] = torch.arange(end - begin, device=rank_V.device)
    out_VD = hidden_TD.new_empty(end - begin, hidden_TD.shape[1])
    for expert, matrices in hit:
        rows = visits.expert_rows(expert)
        weighted = expert_output(module, matrices, expert, hidden_TD, visits) * visits.weights_V[rows, None]
        out_VD[rows_V[rows.start - begin : rows.stop - begin]] = weighted.to(out_VD.dtype)
    return out_VD, rank_V.bincount(minlength=len(tokens)).tolist()


class ExpertSplit(NamedTuple):
    """How an experts module is split. `stacks`: this rank's part of the stacked matrices; empty if the module cannot be
    split. `own`: this rank's experts if split by expert, None if by rows. `why_not`: why the module cannot be split;
    `alternative`: a setting with which it can be split, or ""."""

    stacks: Stacks
    own: range | None = None
    why_not: str = ""
    alternative: str = ""


def split_experts(module: nn.Module, stacks: Stacks, all_gather: AllGather, requested: DividedExperts) -> ExpertSplit:
    """Splits an experts module by rows or by expert, as `requested`; mutates it, unless the returned `stacks` are
    empty. `auto` chooses the split with fewer bytes to exchange, or the only possible one."""
    share = RowShare(index=all_gather.index, count=all_gather.count)
    rows, whole = _split_by_rows(module, stacks, share), _split_by_expert(stacks, share)
    if requested is DividedExperts.auto:
        down_shape = stacks[matrix_names(module)[1]].shape[1:]
        hidden, inner = reversed(down_shape) if cast("Experts", module).is_transposed else down_shape
        # Split by rows, each rank would have to read all bytes of matrices with interleaved rows.
        is_interleaved = any(piece.is_interleaved for stack in stacks.values() for piece in stack.slices)
        prefers_whole = is_interleaved or whole_experts_send_less(hidden, inner, share.count)
        first, second = (whole, rows) if prefers_whole else (rows, whole)
        neither = ExpertSplit({}, why_not=f"{rows.why_not}, and {whole.why_not}")
        split = next((each for each in (first, second) if each.stacks), neither)
    else:
        split, other = (rows, whole) if requested is DividedExperts.rows else (whole, rows)
        if not split.stacks and other.stacks:
            key = DividedExperts.whole if requested is DividedExperts.rows else DividedExperts.rows
            split = ExpertSplit({}, why_not=split.why_not, alternative=f"devices.experts={key.value}")
    if split.stacks:
        for name, part in split.stacks.items():
            before = module._parameters[name]
            assert before is not None
            module._parameters[name] = nn.Parameter(
                torch.empty(part.shape, device="meta", dtype=before.dtype), requires_grad=False
            )
        own = split.own
        setattr(module, SHARE, ExpertRows(all_gather) if own is None else WholeExperts(all_gather, own))
    return split


def describe_unsplit(parameter: Parameter) -> str:
    """The reason why `cut_rows` returns None for a parameter."""
    piece = parameter.pieces[0][0]
    return f"its {piece.format or piece.dtype} rows of shape {piece.shape} cannot be cut into equal byte ranges"


def _split_by_rows(module: nn.Module, stacks: Stacks, share: RowShare) -> ExpertSplit:
    """Gives the rank some rows of every expert's matrices, if rows can be cut."""
    if cast("Experts", module).is_transposed:
        return ExpertSplit({}, why_not="expert matrices are stored as (inputs, outputs)")
    first, second = matrix_names(module)
    counts = {first: num_fused(module), second: 1}
    parts = {name: cut_rows(stacks[name], share, num_fused=count) for name, count in counts.items()}
    for name, part in parts.items():
        if part is None:
            return ExpertSplit({}, why_not=describe_unsplit(stacks[name]))
    return ExpertSplit({name: part for name, part in parts.items() if part is not None})


def _split_by_expert(stacks: Stacks, share: RowShare) -> ExpertSplit:
    """Gives the rank some whole experts, if there are enough and their bytes are separate."""
    num_experts = min(stack.shape[0] for stack in stacks.values())
    if num_experts < share.count:
        return ExpertSplit({}, why_not=f"it has only {num_experts} experts")
    own = split_evenly(num_experts, share.count)[share.index]
    parts = {name: slice_experts(stack, own) for name, stack in stacks.items()}
    if None in parts.values():
        return ExpertSplit({}, why_not="the bytes of its experts are interleaved")
    return ExpertSplit({name: part for name, part in parts.items() if part is not None}, own)
