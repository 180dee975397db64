"""Mixture-of-experts feed-forward: sorts tokens by expert, so that each expert's matrices are read and used once.

`experts_forward` is registered with transformers' experts interface. It only sends an event to the engine, which
computes the experts for one lane (micro-batch) or for several together (engine/experts.py). The functions here use the
transformers module for its activation, biases and layout.

A visit is one token routed to one expert. Experts with at least one visit are hit. A stack is one matrix of all
experts, such as `gate_up_proj` (E, N, D).

Shapes: T tokens of D numbers, each routed to K of E experts; V = T x K visits, or the visits of one expert; N outputs;
H intermediate numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from ..events import NeedExperts, need_tensor
from .fused import FusedGate

NAME = "weightstream_sorted"

Matrices = Mapping[str, torch.Tensor]  # name of the stack -> matrix of one expert; first up, then down


class Experts(Protocol):
    """The attributes that transformers' decorator adds to an experts module, besides its stacked parameters."""

    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    _apply_gate: Callable[[torch.Tensor], torch.Tensor]
    post_expert_norm: Callable[[torch.Tensor], torch.Tensor]  # if `has_post_expert_norm`


@dataclass(frozen=True, kw_only=True)
class Visits:
    """Pairs of token and expert, sorted by expert, then token."""

    tokens_V: torch.Tensor  # token indices
    experts_V: torch.Tensor
    weights_V: torch.Tensor  # of the router
    ends: Sequence[int]  # visits of expert e end before index ends[e]

    @staticmethod
    def from_top_k(top_k_index_TK: torch.Tensor, top_k_weights_TK: torch.Tensor, num_experts: int) -> "Visits":
        """Sorts the router's choices by expert. Waits for the device once, to read `ends`."""
        experts_V, order = torch.sort(top_k_index_TK.reshape(-1), stable=True)
        every_E = torch.arange(num_experts, device=experts_V.device, dtype=experts_V.dtype)
        return Visits(
            tokens_V=order // top_k_index_TK.shape[-1],
            experts_V=experts_V,
            weights_V=top_k_weights_TK.reshape(-1)[order],
            ends=torch.searchsorted(experts_V, every_E, right=True).tolist(),
        )

    @property
    def hit(self) -> list[int]:
        """Experts with at least one token, ascending."""
        return [expert for expert, end in enumerate(self.ends) if end > self._begin(expert)]

    def select_tokens(self, tokens: range) -> "Visits":
        """Returns the visits of a range of tokens."""
        is_selected = (self.tokens_V >= tokens.start) & (self.tokens_V < tokens.stop)
        experts_V = self.experts_V[is_selected]
        every_E = torch.arange(len(self.ends), device=experts_V.device, dtype=experts_V.dtype)
        return Visits(
            tokens_V=self.tokens_V[is_selected],
            experts_V=experts_V,
            weights_V=self.weights_V[is_selected],
            ends=torch.searchsorted(experts_V, every_E, right=True).tolist(),
        )

    def expert_rows(self, expert: int) -> slice:
        """The indices of an expert's visits."""
        return slice(self._begin(expert), self.ends[expert])

    def _begin(self, expert: int) -> int:
        return self.ends[expert - 1] if expert else 0


class ExpertShare(ABC):
    """This rank's share of an experts module: the experts in `own`, or if that is None a part of every expert."""

    def __init__(self, own: range | None = None):
        self.own = own

    @abstractmethod
    def mix_experts(
        self, module: torch.nn.Module, hidden_TD: torch.Tensor, visits: Visits, hit: Iterable[tuple[int, Matrices]]
    ) -> torch.Tensor:
        """Returns the output of `mix_experts` over the experts of all ranks, (T, D). `hit` yields (expert, matrices)
        for the hit experts of this rank, ascending."""


SHARE = "expert_share"  # attribute that holds the `ExpertShare` of an experts module divided among ranks


def find_expert_share(module: torch.nn.Module) -> ExpertShare | None:
    """Returns this rank's share; None if experts are not divided."""
    return getattr(module, SHARE, None)


def experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Maps hidden_states (T, D), top_k_index and top_k_weights (T, K) to (T, D); see transformers' experts
    interface."""
    return need_tensor(NeedExperts(self, hidden_states, top_k_index, top_k_weights))


def mix_experts(
    module: torch.nn.Module, hidden_TD: torch.Tensor, visits: Visits, hit: Iterable[tuple[int, Matrices]]
) -> torch.Tensor:
    """Returns the weighted sum over each token's experts (T, D), added in the order of `hit`, which yields (expert,
    matrices). Requests the matrices of the next expert only after the current expert is computed."""
    outputs = ((expert, expert_output(module, matrices, expert, hidden_TD, visits)) for expert, matrices in hit)
    return accumulate_outputs(hidden_TD, visits, outputs)


def expert_output(
    module: torch.nn.Module, matrices: Matrices, expert: int, hidden_TD: torch.Tensor, visits: Visits
) -> torch.Tensor:
    """Returns an expert's output (V, D) for its visits, without the router's weights."""
    return run_expert(module, matrices, expert, hidden_TD[visits.tokens_V[visits.expert_rows(expert)]])


def accumulate_outputs(
    hidden_TD: torch.Tensor, visits: Visits, outputs: Iterable[tuple[int, torch.Tensor]]
) -> torch.Tensor:
    """Returns the weighted sum over each token's experts (T, D), added in the order of `outputs`: (expert, its output
    for its visits)."""
    out_TD = torch.zeros_like(hidden_TD)
    for expert, result in outputs:
        rows = visits.expert_rows(expert)
        out_TD.index_add_(0, visits.tokens_V[rows], (result * visits.weights_V[rows, None]).to(out_TD.dtype))
    return out_TD


def bound_matrices(module: torch.nn.Module, expert: int, overrides: Matrices | None = None) -> Matrices:
    """Returns an expert's matrices: from `overrides`, or if missing there, from the module's parameters."""
    overrides = overrides or {}
    return {n: overrides[n] if n in overrides else getattr(module, n)[expert] for n in matrix_names(module)}


def stack_names(model: PreTrainedModel) -> list[str]:
    """Full names of all expert stacks that run through `experts_forward`."""
    modules = [(path, module) for path, module in model.named_modules() if is_experts(module)]
    return [f"{path}.{name}" for path, module in modules for name in matrix_names(module)]


def is_experts(module: torch.nn.Module) -> bool:
    """True for a module that runs through transformers' experts interface."""
    return hasattr(module, "has_gate")  # set by transformers' decorator


def has_norm(experts: Experts) -> bool:
    """True if outputs are normalized per expert. transformers has such experts since 5.18."""
    return getattr(experts, "has_post_expert_norm", False)


def matrix_names(module: torch.nn.Module) -> tuple[str, str]:
    """The names of the two stacks: up (with the gate if there is one) and down."""
    return ("gate_up_proj" if cast("Experts", module).has_gate else "up_proj", "down_proj")


def run_expert(module: torch.nn.Module, matrices: Matrices, expert: int, x: torch.Tensor) -> torch.Tensor:
    """Returns an expert's output for its tokens x (V, D)."""
    experts, (up, down) = cast("Experts", module), matrices
    inner = apply_activation(experts, _project(experts, matrices, up, expert, x))
    out = _project(experts, matrices, down, expert, inner)
    return experts.post_expert_norm(out) if has_norm(experts) else out


def run_bare_expert(module: torch.nn.Module, matrices: Matrices, x: torch.Tensor) -> torch.Tensor:
    """Same as `run_expert` for an expert without biases and norm (`is_bare`). Reads no parameter of the module, so the
    matrices may be on another device. The activation is transformers' code."""
    experts, (up, down) = cast("Experts", module), matrices
    inner = _product(experts, x, matrices[up])
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return _product(experts, inner, matrices[down])


def is_bare(module: torch.nn.Module) -> bool:
    """True if experts have matrices only: no biases, no norm."""
    experts = cast("Experts", module)
    return not experts.has_bias and not has_norm(experts)


def apply_activation(experts: Experts, inner: torch.Tensor) -> torch.Tensor:
    """Applies the activation, with the gate if there is one: (V, 2H) or (V, H) to (V, H)."""
    if not experts.has_gate:
        return experts.act_fn(inner)
    act = getattr(experts, "act_fn", None)  # missing in some classes with gates
    out = act.ops.gate_halves(inner) if isinstance(act, FusedGate) else None
    return experts._apply_gate(inner) if out is None else out


def _project(experts: Experts, matrices: Matrices, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    bias = stacked_bias(experts, name)
    return _product(experts, x, matrices[name], None if bias is None else bias[expert])


def _product(
    experts: Experts, x: torch.Tensor, weight: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    return F.linear(x, weight.t() if experts.is_transposed else weight, bias_N)


def stacked_bias(experts: Experts, name: str) -> torch.Tensor | None:
    """Returns the bias (E, N) of the stack `name`, or None."""
    return cast(torch.Tensor, getattr(experts, f"{name}_bias")) if experts.has_bias else None


def register() -> None:
    ExpertsInterface.register(NAME, experts_forward)
