"""Mixture-of-experts feed-forward over stored experts: tokens sorted by expert, each expert's matrices used once, as
they lie.

Registered under its own name with transformers' experts interface: it asks the engine, which answers for one lane or
for several at once (engine/experts.py). The module still owns gating, activation and layout.

Shapes: T tokens of D numbers, each visiting K experts; V = T x K visits.
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

Matrices = Mapping[str, torch.Tensor]  # of one expert, by the name of their stack


class Experts(Protocol):
    """What transformers' decorator promises of an experts module, beside its stacked parameters."""

    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    _apply_gate: Callable[[torch.Tensor], torch.Tensor]
    post_expert_norm: Callable[[torch.Tensor], torch.Tensor]  # only where `has_post_expert_norm` is there and true


@dataclass(frozen=True, kw_only=True)
class Visits:
    """Which tokens visit which expert, sorted by expert and in the order of the tokens. `ends[e]` is where those of
    expert e end."""

    tokens_V: torch.Tensor
    experts_V: torch.Tensor
    weights_V: torch.Tensor
    ends: Sequence[int]

    @staticmethod
    def from_top_k(top_k_index_TK: torch.Tensor, top_k_weights_TK: torch.Tensor, num_experts: int) -> "Visits":
        """Sorts visits. In front of a device the host waits for it once, to know the ends."""
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
        """The experts that at least one token visits, ascending."""
        return [expert for expert, end in enumerate(self.ends) if end > self._begin(expert)]

    def select_tokens(self, tokens: range) -> "Visits":
        """Those of a run of tokens alone."""
        is_theirs = (self.tokens_V >= tokens.start) & (self.tokens_V < tokens.stop)
        experts_V = self.experts_V[is_theirs]
        every_E = torch.arange(len(self.ends), device=experts_V.device, dtype=experts_V.dtype)
        return Visits(
            tokens_V=self.tokens_V[is_theirs],
            experts_V=experts_V,
            weights_V=self.weights_V[is_theirs],
            ends=torch.searchsorted(experts_V, every_E, right=True).tolist(),
        )

    def expert_rows(self, expert: int) -> slice:
        return slice(self._begin(expert), self.ends[expert])

    def _begin(self, expert: int) -> int:
        return self.ends[expert - 1] if expert else 0


class ExpertShare(ABC):
    """What one of several ranks has of an experts module: its `own` experts, or where None, a part of each."""

    def __init__(self, own: range | None = None):
        self.own = own

    @abstractmethod
    def mix_experts(
        self, module: torch.nn.Module, hidden_TD: torch.Tensor, visits: Visits, hit: Iterable[tuple[int, Matrices]]
    ) -> torch.Tensor:
        """What `mixed` gives of what all ranks have, (T, D). `hit` yields what this rank has, ascending."""


SHARE = "expert_share"  # the attribute of an experts module that ranks divide


def find_expert_share(module: torch.nn.Module) -> ExpertShare | None:
    """This rank's share; None where it has all of them."""
    return getattr(module, SHARE, None)


def experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states (T, D), top_k_index and top_k_weights (T, K) -> (T, D)."""
    return need_tensor(NeedExperts(self, hidden_states, top_k_index, top_k_weights))


def mix_experts(
    module: torch.nn.Module, hidden_TD: torch.Tensor, visits: Visits, hit: Iterable[tuple[int, Matrices]]
) -> torch.Tensor:
    """The sum over each token's experts (T, D), added in the order in which `hit` yields them. Each expert's matrices
    are used before the next one's are taken."""
    outputs = ((expert, expert_output(module, matrices, expert, hidden_TD, visits)) for expert, matrices in hit)
    return accumulate_outputs(hidden_TD, visits, outputs)


def expert_output(
    module: torch.nn.Module, matrices: Matrices, expert: int, hidden_TD: torch.Tensor, visits: Visits
) -> torch.Tensor:
    """What an expert makes of the tokens that visit it, (V, D) of its visits alone."""
    return run_expert(module, matrices, expert, hidden_TD[visits.tokens_V[visits.expert_rows(expert)]])


def accumulate_outputs(
    hidden_TD: torch.Tensor, visits: Visits, outputs: Iterable[tuple[int, torch.Tensor]]
) -> torch.Tensor:
    """The weighted sum over each token's experts (T, D), added in the order in which `outputs` come."""
    out_TD = torch.zeros_like(hidden_TD)
    for expert, result in outputs:
        mine = visits.expert_rows(expert)
        out_TD.index_add_(0, visits.tokens_V[mine], (result * visits.weights_V[mine, None]).to(out_TD.dtype))
    return out_TD


def bound_matrices(module: torch.nn.Module, expert: int, overrides: Matrices | None = None) -> Matrices:
    """Those bound to the module, but for the ones in `instead`."""
    overrides = overrides or {}
    return {n: overrides[n] if n in overrides else getattr(module, n)[expert] for n in matrix_names(module)}


def stack_names(model: PreTrainedModel) -> list[str]:
    """Full names of the stacks of matrices of all experts that run through our function."""
    found = [(path, module) for path, module in model.named_modules() if is_experts(module)]
    return [f"{path}.{name}" for path, module in found for name in matrix_names(module)]


def is_experts(module: torch.nn.Module) -> bool:
    return hasattr(module, "has_gate")  # set by transformers' decorator


def has_norm(experts: Experts) -> bool:
    """Whether outputs are normalised expert by expert. transformers up to 5.17 knows no such experts."""
    return getattr(experts, "has_post_expert_norm", False)


def matrix_names(module: torch.nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if cast("Experts", module).has_gate else "up_proj", "down_proj")


def run_expert(module: torch.nn.Module, matrices: Matrices, expert: int, x: torch.Tensor) -> torch.Tensor:
    """What an expert makes of its tokens x (V, D)."""
    experts, (up, down) = cast("Experts", module), matrices
    inner = _project(experts, matrices, up, expert, x)
    inner = apply_activation(experts, inner)
    out = _project(experts, matrices, down, expert, inner)
    return experts.post_expert_norm(out) if has_norm(experts) else out


def run_bare_expert(module: torch.nn.Module, matrices: Matrices, x: torch.Tensor) -> torch.Tensor:
    """The same of an expert that `is_bare`, wherever its matrices are: nothing else that is bound to the module is
    looked at, and the steps between products are transformers' own."""
    experts, (up, down) = cast("Experts", module), matrices
    inner = _product(experts, x, matrices[up])
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return _product(experts, inner, matrices[down])


def is_bare(module: torch.nn.Module) -> bool:
    """Whether experts have matrices and nothing beside."""
    experts = cast("Experts", module)
    return not experts.has_bias and not has_norm(experts)


def apply_activation(experts: Experts, inner: torch.Tensor) -> torch.Tensor:
    """Applies the activation, and the gate of gated experts: (V, 2H) or (V, H) to (V, H)."""
    if not experts.has_gate:
        return experts.act_fn(inner)
    act = getattr(experts, "act_fn", None)  # gated experts of some classes have none
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
    """A row for each expert (E, N), of the stack of that name."""
    return cast(torch.Tensor, getattr(experts, f"{name}_bias")) if experts.has_bias else None


def register() -> None:
    ExpertsInterface.register(NAME, experts_forward)
