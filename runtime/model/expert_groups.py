"""Runs the experts of a layer together. One by one, each expert would need a dozen kernel launches on an accelerator,
or a thread barrier per product on a CPU.

A visit is one token routed to one expert. A stack is one matrix of all experts, such as all up projections; codes are a
stack of quantized matrices that device kernels decode. On an accelerator:

- Stacks of codes, and plain stacks with up to GROUPED_VISITS visits if torch or Triton has a kernel: one grouped
  product per stack, which multiplies each expert's visits by its matrix. The host does not wait for the routing.
- Otherwise, few tokens: all tokens are multiplied by all experts, and each token selects its outputs. This costs
  little, since reading the experts takes most of the time.
- Otherwise: the host waits for the number of visits of each expert, then launches one product per expert and stack.

On a CPU, compiled kernels compute the product of each stack for a run of experts: consecutive hit experts, whose visits
are few enough for one temporary.

Shapes: T tokens of D numbers, each routed to K of E experts; V = T x K visits, sorted by expert; products have N
outputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from ..linear import device_codes
from ..linear.backends import can_multiply_in_groups, grouped_linear
from ..linear.rows import Codes
from ..linear.stored import StoredWeight, have_equal_blocks
from ..plan.placement.experts import GROUPED_VISITS, multiplies_all_experts
from ..plan.placement.memory import GROUPED_BYTES, visit_elements
from .experts import (
    Experts,
    Matrices,
    Visits,
    apply_activation,
    expert_output,
    has_norm,
    matrix_names,
    stacked_bias,
)

VECTOR_BYTES = 16  # alignment of rows and experts for torch's grouped kernel
Spans = Sequence[tuple[int, slice]]  # (expert, its rows among the visits of a run)
MAX_GROUPS = 1023  # most experts in torch's grouped kernel
GROUPING_PROCESSORS = (9, 10)  # major compute capabilities; on others torch synchronizes and loops


class _Stacks(NamedTuple):
    """The stacks of a layer. Each is a sequence of parts with different outputs: plain tensors (E, inputs, N), or
    `Codes` of E matrices."""

    up: Sequence[Any]
    down: Sequence[Any]
    are_codes: bool = False


Products = Callable[[torch.Tensor, Any], torch.Tensor]  # x (V, inputs), a part of a stack -> (V, N)


def run_on_device(
    module: torch.nn.Module, hidden_TD: torch.Tensor, top_k_index_TK: torch.Tensor, top_k_weights_TK: torch.Tensor
) -> torch.Tensor | None:
    """Returns the weighted sum over each token's experts (T, D), added in the order of experts. Returns None if the
    stacks have an unsupported layout."""
    stacks = _stacks(module, hidden_TD.dtype)
    if stacks is None:
        return None
    parts, routed = [*stacks.up, *stacks.down], (hidden_TD, top_k_index_TK, top_k_weights_TK)
    if stacks.are_codes:
        max_tokens = max(1, GROUPED_VISITS // top_k_index_TK.shape[1])
        runs = zip(*(tensor.split(max_tokens) for tensor in routed), strict=True)

        def products(x: torch.Tensor, codes: Codes, *, offs: torch.Tensor) -> torch.Tensor:
            return device_codes.multiply_groups(x, codes, len(offs), offs)

        return torch.cat([_run_grouped(module, stacks, x, index, weights, products) for x, index, weights in runs])
    if top_k_index_TK.numel() <= GROUPED_VISITS and supports_grouped_mm(parts):
        return _run_grouped(module, stacks, *routed, F.grouped_mm)
    is_narrow = hidden_TD.dtype.itemsize == 2  # float32 is faster in torch's products, one by one
    if top_k_index_TK.numel() <= GROUPED_VISITS and is_narrow and all(map(device_codes.can_group, parts)):
        return _run_grouped(module, stacks, *routed, device_codes.grouped_mm)
    if multiplies_all_experts(len(hidden_TD), top_k_index_TK.shape[1], len(parts[0])):
        return _run_all_experts(module, stacks, *routed)
    visits = Visits.from_top_k(top_k_index_TK, top_k_weights_TK, len(parts[0]))
    return _run_one_by_one(module, stacks, hidden_TD, visits)


def run_on_host(module: torch.nn.Module, hidden_TD: torch.Tensor, visits: Visits) -> torch.Tensor | None:
    """Same as `run_on_device` for a CPU; returns None if experts are transposed, few, or have many visits. Products are
    bit-identical to those of single experts. A token's outputs are summed in the order of experts, in float32, and
    rounded once."""
    up, down = (getattr(module, name) for name in matrix_names(module))
    is_faster = can_multiply_in_groups(len(visits.tokens_V), len(visits.hit))
    are_uniform = all(isinstance(weight, StoredWeight) and weight.has_uniform_experts for weight in (up, down))
    if not is_faster or not are_uniform or cast("Experts", module).is_transposed:
        return None

    def products(x: torch.Tensor, stack: torch.Tensor, spans: Spans) -> torch.Tensor:
        stored = cast(StoredWeight, stack)
        return grouped_linear(x, [(rows, stored.entries[expert]) for expert, rows in spans], stored.table)

    per_visit, out_TD = visit_elements(hidden_TD.shape[1], down.shape[2]), torch.zeros(hidden_TD.shape)
    max_visits = GROUPED_BYTES // (hidden_TD.itemsize * per_visit)
    for _, tokens, outputs in _compute_runs(module, _Stacks([up], [down]), hidden_TD, visits, max_visits, products):
        out_TD.index_add_(0, tokens, outputs.float())
    return out_TD.to(hidden_TD.dtype)


def can_run_group(module: torch.nn.Module, hidden_TD: torch.Tensor, visits: Visits, group: Sequence[int]) -> bool:
    """True if `run_group` is likely faster than single experts, and the outputs of all visits fit GROUPED_BYTES."""
    experts, (_, down) = cast("Experts", module), matrix_names(module)
    if experts.is_transposed:
        return False
    num_visits = sum(rows.stop - rows.start for rows in map(visits.expert_rows, group))
    per_visit = visit_elements(hidden_TD.shape[1], getattr(module, down).shape[2])
    is_small = len(visits.tokens_V) * per_visit * hidden_TD.itemsize <= GROUPED_BYTES
    return is_small and can_multiply_in_groups(num_visits, len(group))


def run_group(
    module: torch.nn.Module, matrices: Mapping[int, Matrices], hidden_TD: torch.Tensor, visits: Visits
) -> dict[int, torch.Tensor]:
    """Returns `expert_output` of several experts, by expert, bit-identical: together if `can_run_group`, else one by
    one. Their matrices may be anywhere in host memory."""
    up, down = ([own[name] for own in matrices.values()] for name in matrix_names(module))
    is_faster = can_run_group(module, hidden_TD, visits, list(matrices))
    if not is_faster or not _are_alike(up) or not _are_alike(down):
        return {expert: expert_output(module, own, expert, hidden_TD, visits) for expert, own in matrices.items()}
    rows = [visits.expert_rows(expert) for expert in matrices]
    counts = [own.stop - own.start for own in rows]
    spans = [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]

    def products(x: torch.Tensor, weights: Sequence[StoredWeight]) -> torch.Tensor:
        groups = [(span, weight.entries[0]) for span, weight in zip(spans, weights, strict=True)]
        return grouped_linear(x, groups, weights[0].table)

    tokens_V, experts_V = (torch.cat([each[own] for own in rows]) for each in (visits.tokens_V, visits.experts_V))
    out_VD = _compute_outputs(module, _Stacks([up], [down]), hidden_TD[tokens_V], experts_V, products)
    return {expert: out_VD[span] for expert, span in zip(matrices, spans, strict=True)}


def _are_alike(weights: Sequence[torch.Tensor]) -> bool:
    """True if `grouped_linear` can multiply by these matrices in one call."""
    stored = [weight for weight in weights if isinstance(weight, StoredWeight) and weight.is_plain]
    return len(stored) == len(weights) and have_equal_blocks(weight.entries[0] for weight in stored)


def supports_grouped_mm(stacks: Sequence[torch.Tensor]) -> bool:
    """True if torch's grouped_mm multiplies these stacks (E, inputs, N) in one launch, without waiting for the device:
    aligned bfloat16 on Hopper and Blackwell. Also True for bfloat16 on a CPU, where grouped_mm is a loop."""
    first = stacks[0]
    if first.device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(first.device)
        if torch.version.cuda is None or major not in GROUPING_PROCESSORS:
            return False
    elif not first.is_cpu:
        return False
    if first.dtype != torch.bfloat16 or len(first) > MAX_GROUPS:
        return False
    for stack in stacks:
        strides = [stride * stack.element_size() for stride in stack.stride() if stride != 1]
        if stack.data_ptr() % VECTOR_BYTES or any(stride % VECTOR_BYTES for stride in strides):
            return False
    return True


def _stacks(module: torch.nn.Module, dtype: torch.dtype) -> _Stacks | None:
    """Returns the module's stacks; None if their storage or layout is not supported."""
    experts, (up_name, down_name) = cast("Experts", module), matrix_names(module)
    up_weight, down_weight = getattr(module, up_name), getattr(module, down_name)
    up, down = _stack_parts(up_weight, dtype), _stack_parts(down_weight, dtype)
    if not up or not down:
        weights = (up_weight, down_weight)
        if all(_are_codes(weight, dtype, experts.is_transposed) for weight in weights):
            return _Stacks(up_weight.codes, down_weight.codes, are_codes=True)
        return None
    if experts.is_transposed:
        return _Stacks(up, down) if len(up) == len(down) == 1 else None  # several parts would have different inputs
    return _Stacks([part.mT for part in up], [part.mT for part in down])


def _are_codes(weight: torch.Tensor, dtype: torch.dtype, is_transposed: bool) -> bool:
    """True if a stack is stored as codes that device kernels can multiply, with one row per output."""
    if not isinstance(weight, StoredWeight) or weight.compute_dtype != dtype or not weight.needs_dequantizing:
        return False
    return weight.is_transposed == is_transposed and weight.has_kernels


def _stack_parts(weight: torch.Tensor, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """Returns the parts of a stack as plain tensors; empty if it is not stored in `dtype`."""
    if isinstance(weight, StoredWeight):
        return weight.stacks() if weight.compute_dtype == dtype else ()
    return [weight] if weight.dim() == 3 and weight.dtype == dtype else []


def _run_grouped(
    module: torch.nn.Module,
    stacks: _Stacks,
    hidden_TD: torch.Tensor,
    index_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    grouped: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Returns the weighted sums (T, D) by `grouped(x, part, offs)`, which multiplies rows of x, sorted by expert.
    `offs`: the end of each expert's rows."""
    num_tokens, num_choices = index_TK.shape
    # Sort each token's choices by expert, so that its outputs are summed in the order of experts, then all visits.
    ascending_TK, ranks_TK = index_TK.sort(dim=1)
    experts_V, order_V = ascending_TK.view(-1).sort(stable=True)
    num_experts = stacks.up[0].num_matrices if stacks.are_codes else len(stacks.up[0])
    every_E = torch.arange(num_experts, device=index_TK.device, dtype=index_TK.dtype)
    ends_E = torch.searchsorted(experts_V, every_E, right=True, out_int32=True)
    out_VD = _compute_outputs(
        module, stacks, hidden_TD[order_V // num_choices], experts_V, lambda x, part: grouped(x, part, offs=ends_E)
    )
    inverse_V = torch.empty_like(order_V).scatter_(0, order_V, torch.arange(len(order_V), device=order_V.device))
    out_TKD = out_VD[inverse_V].view(num_tokens, num_choices, -1)
    return _sum_choices((out_TKD * weights_TK.gather(1, ranks_TK)[..., None]).to(hidden_TD.dtype))


def _run_all_experts(
    module: torch.nn.Module, stacks: _Stacks, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """Returns the weighted sums (T, D) by running all tokens through every expert. Outputs are selected by index: a NaN
    of an expert that was not chosen has no effect."""
    (num_tokens, _), num_experts = index_TK.shape, len(stacks.up[0])
    ascending_TK, ranks_TK = index_TK.sort(dim=1)
    every_E = torch.arange(num_experts, device=index_TK.device)

    def products(x: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
        x_ETn = x.expand(num_experts, num_tokens, -1) if len(x) == num_tokens else x.view(num_experts, num_tokens, -1)
        return torch.bmm(x_ETn, stack).flatten(0, 1)

    out_VD = _compute_outputs(module, stacks, hidden_TD, every_E.repeat_interleave(num_tokens), products)
    tokens_T = torch.arange(num_tokens, device=index_TK.device)
    out_TKD = out_VD[ascending_TK * num_tokens + tokens_T[:, None]]
    return _sum_choices((out_TKD * weights_TK.gather(1, ranks_TK)[..., None]).to(hidden_TD.dtype))


def _sum_choices(out_TKD: torch.Tensor) -> torch.Tensor:
    """Sums over K in a fixed order."""
    out_TD = out_TKD[:, 0].clone()
    for choice in range(1, out_TKD.shape[1]):  # not `sum`: all methods must round alike
        out_TD += out_TKD[:, choice]
    return out_TD


def _run_one_by_one(module: torch.nn.Module, stacks: _Stacks, hidden_TD: torch.Tensor, visits: Visits) -> torch.Tensor:
    """Returns the weighted sums (T, D). Launches a product per expert; applies activations and the router's weights to
    a run of experts at once."""

    def products(x: torch.Tensor, stack: torch.Tensor, spans: Spans) -> torch.Tensor:
        out = x.new_empty(len(x), stack.shape[2])
        for expert, rows in spans:
            torch.mm(x[rows], stack[expert], out=out[rows])
        return out

    out_TD, max_visits = torch.zeros_like(hidden_TD), max(len(hidden_TD), GROUPED_VISITS)
    for spans, tokens, outputs in _compute_runs(module, stacks, hidden_TD, visits, max_visits, products):
        for _, rows in spans:
            out_TD.index_add_(0, tokens[rows], outputs[rows])
    return out_TD


def _compute_runs(
    module: torch.nn.Module,
    stacks: _Stacks,
    hidden_TD: torch.Tensor,
    visits: Visits,
    max_visits: int,
    products: Callable[..., torch.Tensor],  # (x, part, spans) -> (V, N)
) -> Iterator[tuple[Spans, torch.Tensor, torch.Tensor]]:
    """Yields spans, token indices (V,) and weighted outputs (V, D) for each run of experts, which has up to
    `max_visits` visits, or a single expert."""
    for run in _split_runs(visits, max_visits):
        begin, end = visits.expert_rows(run[0]).start, visits.expert_rows(run[-1]).stop
        rows = [visits.expert_rows(expert) for expert in run]
        spans = [(expert, slice(own.start - begin, own.stop - begin)) for expert, own in zip(run, rows, strict=True)]
        tokens, run_products = visits.tokens_V[begin:end], partial(products, spans=spans)
        outputs = _compute_outputs(module, stacks, hidden_TD[tokens], visits.experts_V[begin:end], run_products)
        yield spans, tokens, (outputs * visits.weights_V[begin:end, None]).to(hidden_TD.dtype)


def _split_runs(visits: Visits, max_visits: int) -> Sequence[Sequence[int]]:
    """Divides the hit experts, in order, into runs with up to `max_visits` in total; a single expert may have more."""
    runs, count = list[list[int]](), 0
    for expert in visits.hit:
        rows = visits.expert_rows(expert)
        count += rows.stop - rows.start
        if not runs or count > max_visits:
            runs.append([])
            count = rows.stop - rows.start
        runs[-1].append(expert)
    return runs


def _compute_outputs(
    module: torch.nn.Module, stacks: _Stacks, x_VD: torch.Tensor, experts_V: torch.Tensor, products: Products
) -> torch.Tensor:
    """Returns the output (V, D) of each visit's expert for its token, without the router's weights."""
    experts, (up, down) = cast("Experts", module), matrix_names(module)

    def project(x: torch.Tensor, parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        outs = [products(x, part) for part in parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        bias = stacked_bias(experts, name)
        return out if bias is None else out + bias[experts_V]

    out = project(apply_activation(experts, project(x_VD, stacks.up, up)), stacks.down, down)
    return experts.post_expert_norm(out) if has_norm(experts) else out
