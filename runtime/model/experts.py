"""Mixture-of-experts feed-forward over stored experts: tokens sorted by expert, each expert's matrices used once, as
they lie.

Registered under its own name with transformers' experts interface; the module still owns gating, activation and layout.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ExpertsInterface

NAME = "millrace_sorted"


class Experts(Protocol):
    """What transformers' decorator promises of an experts module, beside its stacked parameters."""

    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    _apply_gate: Callable[[torch.Tensor], torch.Tensor]


def sorted_experts(
    self: Experts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states (T, hidden), top_k_index and top_k_weights (T, k) -> (T, hidden)."""
    num_choices = top_k_index.shape[-1]
    expert_ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
    token_ids = order // num_choices
    weights = top_k_weights.reshape(-1)[order]
    counts = torch.bincount(expert_ids, minlength=1).tolist()
    out = torch.zeros_like(hidden_states)
    begin = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        tokens = token_ids[begin : begin + count]
        result = _expert(self, expert, hidden_states[tokens]) * weights[begin : begin + count, None]
        out.index_add_(0, tokens, result.to(out.dtype))
        begin += count
    return out


def _expert(experts: Experts, index: int, x: torch.Tensor) -> torch.Tensor:
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _project(experts, name, index, x)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return _project(experts, "down_proj", index, inner)


def _project(experts: Experts, name: str, index: int, x: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)[index]
    bias = getattr(experts, f"{name}_bias")[index] if experts.has_bias else None
    return F.linear(x, weight.t() if experts.is_transposed else weight, bias)


def register() -> None:
    ExpertsInterface.register(NAME, sorted_experts)
